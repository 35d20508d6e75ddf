from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from matplotlib.colors import to_rgb
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from callbacks.pictures import BYZANTINE, HONEST, Pictures, draw_samples, draw_topology, label_counts
from dfl_lightning.data import NodeData, NodeSplit
from dfl_lightning.topology import ErdosRenyi, FromFile, FullyConnected, KRegular, Ring, Topology

BLACK = (0.0, 0.0, 0.0)


def some(count: int, num_nodes: int) -> Tensor:
    return torch.arange(num_nodes) < count


def node_data(sizes: list[int], shape: tuple[int, int, int], classes: int = 4, **more: Any) -> NodeData:
    """Black images; sample number s has label s modulo the number of classes."""
    total = sum(sizes)
    split = NodeSplit(
        torch.zeros(total, *shape, dtype=torch.uint8),
        torch.arange(total) % classes,
        list(torch.arange(total).split(sizes)),
    )
    return NodeData(split, split, "black squares", **more)


def pixels(path: Path) -> Tensor:
    """A PNG as [H, W, 3]."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        flat = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
        return flat.view(image.height, image.width, 3)


def area(picture: Tensor, colour: str | tuple[float, float, float]) -> int:
    """How many pixels have exactly this colour."""
    wanted = torch.tensor([round(255 * part) for part in to_rgb(colour)], dtype=torch.uint8)
    return int((picture == wanted).all(-1).sum())


def framed(picture: Tensor) -> bool:
    """Nothing touches the border, so nothing is cut off there."""
    return all(bool((edge == 255).all()) for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]))


@pytest.mark.parametrize(
    "topology",
    [Ring(1), FullyConnected(2), KRegular(10, 2), ErdosRenyi(20, 0.05, if_disconnected="keep"), ErdosRenyi(300, 0.03)],
    ids=lambda topology: f"{type(topology).__name__}-{topology.num_nodes}",
)  # fmt: skip
def test_a_topology_of_any_size_is_drawn_with_both_kinds_of_nodes(topology: Topology, tmp_path: Path) -> None:
    n, path = topology.num_nodes, tmp_path / "topology.png"
    areas = []
    for byzantine in (n // 3, n - n // 3):
        draw_topology(topology.adjacency(seed=0), some(byzantine, n), path)
        picture = pixels(path)
        assert framed(picture)
        areas.append((area(picture, HONEST), area(picture, BYZANTINE)))
    (honest, few), (fewer_honest, many) = areas
    assert honest > fewer_honest > 0  # the legend shows both kinds, even where there is no such node
    assert many > few > 0


def test_the_same_topology_gives_the_same_picture(tmp_path: Path) -> None:
    adjacency = ErdosRenyi(20, 0.3).adjacency(seed=0)
    for name in ("a.png", "b.png"):
        draw_topology(adjacency, some(5, 20), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_rings_are_round_in_whatever_order_their_nodes_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "ring.txt").write_text("0 3\n3 1\n1 4\n4 2\n2 0\n")
    for name, topology in (("a.png", Ring(5)), ("b.png", FromFile(str(tmp_path / "ring.txt")))):
        draw_topology(topology.adjacency(seed=0), some(0, 5), tmp_path / name)
    differ = (pixels(tmp_path / "a.png") != pixels(tmp_path / "b.png")).any(-1).float().mean()
    assert 0 < differ < 0.001  # only the numbers in the nodes differ


@pytest.mark.parametrize(
    ("num_nodes", "shape", "more"),
    [
        (1, (1, 8, 8), {}),
        (10, (1, 28, 28), {"class_names": ["a", "$b$", "c", "a name that is much too long to be written out"]}),
        (12, (3, 84, 84), {"users": [["ann"] if node % 2 else ["bob", "eve"] for node in range(12)]}),
        (300, (3, 20, 32), {}),
    ],
)
def test_samples_of_any_shape_and_number_of_nodes_are_drawn(
    num_nodes: int, shape: tuple[int, int, int], more: dict, tmp_path: Path
) -> None:
    path = tmp_path / "samples.png"
    draw_samples(node_data([9] * num_nodes, shape, **more), path)
    picture = pixels(path)
    assert framed(picture)
    assert area(picture, BLACK) > 0.03 * picture[..., 0].numel() * min(num_nodes, 6) / 6


def test_images_are_shown_of_at_most_max_nodes_nodes(tmp_path: Path) -> None:
    data = node_data([9] * 6, (1, 8, 8))
    areas = []
    for max_nodes in (2, 6):
        draw_samples(data, tmp_path / "samples.png", max_nodes=max_nodes)
        areas.append(area(pixels(tmp_path / "samples.png"), BLACK))
    assert 2 * areas[0] < areas[1]


def test_nodes_with_few_or_no_samples_are_drawn(tmp_path: Path) -> None:
    draw_samples(node_data([0, 1, 3], (1, 8, 8)), tmp_path / "samples.png")
    assert framed(pixels(tmp_path / "samples.png"))


def test_label_counts_are_per_node_over_all_labels() -> None:
    data = node_data([2, 5], (1, 8, 8), classes=3, class_names=["a", "b", "c", "never seen"])
    assert label_counts(data).tolist() == [[1, 1, 0, 0], [2, 1, 2, 0]]


class Module(LightningModule):
    """As much of the engine's module as the callback reads."""

    def __init__(self) -> None:
        super().__init__()
        self.topology = Ring(4)
        self.neighbours, self.byzantine = self.topology.adjacency(seed=0), some(1, 4)
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.nodes = node_data([5] * 4, (1, 8, 8))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(1, 1))  # type: ignore[arg-type]


def fit(folder: Path, **settings: Any) -> Trainer:
    settings = {"logger": CSVLogger(str(folder), name="run", version="0"), "max_epochs": 1, **settings}
    trainer = Trainer(
        accelerator="cpu", default_root_dir=str(folder), callbacks=[Pictures()], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **settings,
    )  # fmt: skip
    trainer.fit(Module(), datamodule=Data())
    return trainer


def test_a_run_leaves_both_pictures_in_its_folder(tmp_path: Path) -> None:
    trainer = fit(tmp_path)
    assert trainer.log_dir == str(tmp_path / "run" / "0")
    for name in ("topology.png", "samples.png"):
        assert framed(pixels(tmp_path / "run" / "0" / name))


def test_a_fast_development_run_leaves_no_pictures(tmp_path: Path) -> None:
    fit(tmp_path, fast_dev_run=True)
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(("folder", "rank_zero"), [(None, True), ("here", False)])
def test_only_the_first_process_of_a_run_with_a_folder_draws(
    folder: str | None, rank_zero: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, data = Module(), SimpleNamespace(nodes=node_data([5] * 4, (1, 8, 8)))
    trainer: Any = SimpleNamespace(
        log_dir=folder, loggers=[object()], fast_dev_run=False, is_global_zero=rank_zero, datamodule=data
    )
    Pictures().on_fit_start(trainer, module)
    assert not list(tmp_path.rglob("*"))
