from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from datamodules import CIFAR10, ImageNet12
from datamodules.augment import crop, mirror_
from datamodules.labelled import LabelledDataModule
from dfl_lightning import DFLModule, Ring
from dfl_lightning.data import NodeBatch, NodeLoader, NodeSplit


def images(count: int) -> torch.Tensor:
    return torch.randint(1, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def batch(nodes: list[int], size: int) -> NodeBatch:
    """The same images for every node."""
    return NodeBatch(nodes, [size] * len(nodes), images(size).repeat(len(nodes), 1, 1, 1), torch.zeros(0))


def augmented(nodes: list[int], size: int, index: int = 0, step: int = 0) -> list[torch.Tensor]:
    """What the images become, by node."""
    changed = CIFAR10().augmented(batch(nodes, size), index, step)
    return [mine for _, mine, _ in NodeBatch(nodes, [size] * len(nodes), changed.images, changed.images).per_node()]


def test_crop_moves_images_and_brings_in_black() -> None:
    source = images(25)
    down, right = torch.meshgrid(torch.arange(0, 9, 2), torch.arange(0, 9, 2), indexing="ij")
    offsets = torch.stack([down.flatten(), right.flatten()], dim=1)
    for cut, image, (top, left) in zip(crop(source, 4, offsets), source, offsets.tolist()):
        expected = torch.zeros(3, 40, 40, dtype=torch.uint8)
        expected[:, 4:36, 4:36] = image
        assert torch.equal(cut, expected[:, top : top + 32, left : left + 32])


def test_mirror_swaps_left_and_right_of_the_chosen() -> None:
    source = images(3)
    result = mirror_(source.clone(), torch.tensor([True, False, True]))
    assert torch.equal(result[0], source[0].flip(2))
    assert torch.equal(result[1], source[1])


def test_all_offsets_and_both_sides_are_equally_likely() -> None:
    """A lone white pixel in the middle tells where an image went; one beside it, whether it was mirrored."""
    source = torch.zeros(16_200, 3, 32, 32, dtype=torch.uint8)
    source[:, 0, 16, 15:17] = 255
    source[:, 1, 16, 16] = 255
    result = CIFAR10().augmented(NodeBatch([0], [16_200], source, torch.zeros(0)), 0, 0).images
    rows = result[:, 0].amax(2).int().argmax(1)
    columns = result[:, 0].amax(1).int().argmax(1)
    counts = torch.zeros(9, 9).index_put_((rows - 12, columns - 11), torch.ones(16_200), accumulate=True)
    assert counts.sum() == 16_200
    assert (counts - 200).abs().max() < 5 * 200**0.5
    mirrored = result[torch.arange(16_200), 1, rows, columns] > 0
    assert abs(mirrored.float().mean() - 0.5) < 0.02
    assert abs(torch.corrcoef(torch.stack([mirrored.float(), columns.float()]))[0, 1]) < 0.04


def test_what_is_drawn_depends_on_seed_node_round_and_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = augmented([0, 2, 5], 20)
    torch.rand(3)  # the global generator is elsewhere now
    assert torch.equal(augmented([2], 20)[0], first[1])
    assert torch.equal(augmented([1, 2, 3, 4], 20)[1], first[1])
    for other in (augmented([3], 20)[0], augmented([2], 20, index=1)[0], augmented([2], 20, step=1)[0]):
        assert not torch.equal(other, first[1])
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    assert not torch.equal(augmented([2], 20)[0], first[1])


def test_only_training_batches_are_changed(set_up: Callable) -> None:
    module = CIFAR10("nothing", source="rendered", rendered_samples=100, batch_size=8)
    set_up(module, 2)
    assert module.nodes is not None
    plain = NodeLoader(module.nodes.train, 8, 1, 1)
    changed, same = list(module.train_dataloader()), list(plain)
    assert [one.sizes for one in changed] == [one.sizes for one in same]
    assert all(torch.equal(one.labels, other.labels) for one, other in zip(changed, same))
    assert not any(torch.equal(one.images, other.images) for one, other in zip(changed, same))
    (held_out,) = module.val_dataloader()
    assert torch.equal(next(iter(held_out)).images, module.nodes.test.images[torch.cat(module.nodes.test.indices)])
    module.augment = False
    assert all(torch.equal(one.images, other.images) for one, other in zip(module.train_dataloader(), same))


def test_the_loader_says_which_round_and_step_a_batch_is_of() -> None:
    told: list[tuple[int, int]] = []

    def tell(changed: NodeBatch, index: int, step: int) -> NodeBatch:
        told.append((index, step))
        return changed

    split = NodeSplit(images(10), torch.zeros(10), [torch.arange(6), torch.arange(6, 10)])
    list(NodeLoader(split, 4, local_epochs=2, round_index=lambda: 7, augment=tell))
    assert told == [(7, 0), (7, 1), (7, 2), (7, 3)]


def test_large_images_are_evaluated_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfl_lightning.data.EVALUATION_VALUES", 4 * 3 * 32 * 32)
    split = NodeSplit(images(10), torch.arange(10), [torch.arange(9), torch.arange(9, 10)])
    batches = list(NodeLoader(split, 4))
    assert [(one.nodes, one.sizes) for one in batches] == [([0], [4]), ([0], [4]), ([0, 1], [1, 1])]
    assert torch.equal(torch.cat([one.labels for one in batches]), torch.arange(10))


def test_the_data_itself_stays_as_it_is(set_up: Callable) -> None:
    module = ImageNet12("nothing", source="rendered", rendered_samples=60, size=16, min_samples=1)
    set_up(module, 2)
    assert module.nodes is not None
    before = module.nodes.train.images.clone()
    changed = torch.cat([one.images for one in module.train_dataloader()])
    assert torch.equal(module.nodes.train.images, before)
    known = {image.numpy().tobytes() for image in before}
    mirrored = [image.numpy().tobytes() not in known for image in changed]
    assert 0 < sum(mirrored) < len(mirrored)
    assert all(image.flip(2).numpy().tobytes() in known for image, other in zip(changed, mirrored) if other)


class StopAfter(Callback):
    """Ends a run as a crash would, after one round."""

    def on_train_epoch_start(self, trainer: object, pl_module: DFLModule) -> None:
        if pl_module.current_epoch == 1:
            raise RuntimeError("power cut")


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layer(images.flatten(1))


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(fit: Callable, tmp_path: Path) -> None:
    def run(*callbacks: Callback, augment: bool = True, **options: object) -> torch.Tensor:
        data: LabelledDataModule = CIFAR10("nothing", "rendered", augment, 150, batch_size=8)
        keep = ModelCheckpoint(tmp_path, "last", save_on_train_epoch_end=True, enable_version_counter=False)
        module = DFLModule(Linear, Ring(3), lr=0.01)
        fit(keep, *callbacks, module=module, data=data, enable_checkpointing=True, **options)
        return module.replicas.rows

    whole = run()
    with pytest.raises(RuntimeError, match="power cut"):
        run(StopAfter())
    assert torch.equal(run(ckpt_path=tmp_path / "last.ckpt"), whole)
    assert not torch.equal(run(augment=False), whole)
