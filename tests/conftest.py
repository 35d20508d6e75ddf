"""What many tests share: a tiny world of nodes that trains in a second."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer, seed_everything
from torch import nn

from dfl_lightning import Attack, DFLModule, NodeData, NodeDataModule, NodeSplit, Ring, Round
from dfl_lightning.seeding import generator

os.environ["WANDB_MODE"] = "disabled"


class Blobs(NodeDataModule):
    """Three classes of 4x4 images; node i holds 10 + 3 i samples, so that nodes finish at different steps."""

    num_classes = 3

    def load(self, num_nodes: int, seed: int) -> NodeData:
        splits = []
        for name, size in (("train", lambda node: 10 + 3 * node), ("test", lambda node: 6)):
            sizes = [size(node) for node in range(num_nodes)]
            draw = generator(seed, name)
            labels = torch.randint(3, (sum(sizes),), generator=draw)
            images = torch.randint(100, (sum(sizes), 1, 4, 4), generator=draw)
            images[:, 0, 0] += 50 * labels[:, None]
            splits.append(NodeSplit(images.to(torch.uint8), labels, list(torch.arange(sum(sizes)).split(sizes))))
        return NodeData(*splits, source="three blobs")


class TinyNet(nn.Module):
    """A linear layer, with or without BatchNorm before it."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.linear = nn.Linear(16, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(images.flatten(1)))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed_everything(1, verbose=False)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors are slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def blobs() -> type[NodeDataModule]:
    return Blobs


@pytest.fixture
def tiny_net() -> type[nn.Module]:
    return TinyNet


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., DFLModule]:
    """Trains the tiny world and returns its module; keywords named like Trainer options go to the Trainer."""

    def run(
        *callbacks: Any,
        module: DFLModule | None = None,
        data: NodeDataModule | None = None,
        ckpt_path: str | Path | None = None,
        **options: Any,
    ) -> DFLModule:
        module = module or DFLModule(TinyNet, Ring(4), lr=0.1)
        options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"} | options
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
        trainer = Trainer(callbacks=list(callbacks), default_root_dir=tmp_path, **quiet, **options)
        trainer.fit(module, data or Blobs(batch_size=8, local_epochs=2), ckpt_path=ckpt_path)
        return module

    return run


@pytest.fixture
def trained() -> Callable[..., Round]:
    """Makes a round of ten nodes after local training, on a graph where the attackers hear nothing of 6 and 9."""
    graph = "01 04 02 12 23 34 35 56 69 79 78 58 14 93"

    def make(
        *,
        byzantine: Sequence[int] = (1, 4, 8),
        complete: bool = False,
        broken: Sequence[int] = (),
        dim: int = 130,
        draw: int = 0,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float64,
        with_start: bool = True,
        **options: Any,
    ) -> Round:
        numbers = torch.Generator().manual_seed(draw)
        common = torch.randn(dim, generator=numbers, dtype=torch.float64)
        start = common + 0.1 * torch.randn(10, dim, generator=numbers, dtype=torch.float64)
        rows = start + 0.05 + 0.1 * torch.randn(10, dim, generator=numbers, dtype=torch.float64)
        rows[list(broken), 3] = torch.nan
        marks = torch.zeros(10, dtype=torch.bool)
        marks[list(byzantine)] = True
        neighbours = ~torch.eye(10, dtype=torch.bool)
        if not complete:
            neighbours[:] = False
            for a, b in graph.split():
                neighbours[int(a), int(b)] = neighbours[int(b), int(a)] = True
        rows, start = (scale * rows).to(dtype), (scale * start).to(dtype)
        return Round(rows, neighbours, marks, start=start if with_start else None, **options)

    return make


@pytest.fixture
def messages() -> Callable[..., torch.Tensor]:
    """What everybody is sent, [N, N, d], receiver by sender, once an attack (if one is given) has forged."""

    def look(round: Round, attack: Attack | None = None) -> torch.Tensor:
        if attack is not None:
            attack.on_attack(round)
        blocks: list[torch.Tensor] = []
        round.reduce(lambda block: blocks.append(block.rows.clone()) or torch.zeros(1))
        return torch.cat(blocks, 1)[round.sent]

    return look
