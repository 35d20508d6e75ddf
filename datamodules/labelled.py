"""What CIFAR and ImageNet share: labelled images of nobody, from files that are split, or drawn."""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from datamodules.augment import crop, draw_per_node, mirror_
from datamodules.spread import SpreadDataModule
from dfl_lightning.data import NodeBatch, NodeData, NodeSplit
from dfl_lightning.errors import UserError, one_of
from dfl_lightning.seeding import global_seed

Source = Literal["auto", "files", "rendered"]


@dataclass
class LabelledData:
    """A data set as its files have it.

    Attributes:
        train: images uint8 [total, C, H, W] and labels int64 [total] to train on.
        test: held-out ones.
        class_names: what the labels stand for.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    class_names: list[str]


class LabelledDataModule(SpreadDataModule):
    """Base of the data sets of labelled images. A subclass says the constants and how to find and read its files.

    Args:
        root: a folder with the data set's files (default: data/ and the name in small letters).
        source: "files", "rendered" (drawn stand-ins: shapes with textures), or "auto": files if they are there.
        augment: move (for CIFAR, by up to 4 pixels) and mirror training images at random, anew in every step.
        rendered_samples: how many training images to draw; a fifth as many are drawn for testing.
    """

    shape: tuple[int, int, int]
    padding: int  # pixels by which training images are moved at most

    def __init__(
        self,
        root: str | None = None,
        source: Source = "auto",
        augment: bool = True,
        rendered_samples: int = 5000,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of("data.source", source, Source)
        if rendered_samples < self.num_classes:
            raise UserError(
                f"data.rendered_samples is {rendered_samples}, but must be at least {self.num_classes}, one per class."
            )
        self.root = Path(root or f"data/{self.name.lower()}").expanduser()
        self.source, self.augment, self.rendered_samples = source, augment, rendered_samples

    @abstractmethod
    def find(self) -> Path | None:
        """The folder that holds the data set's files, or None if there are none."""

    @abstractmethod
    def read(self, folder: Path) -> LabelledData:
        """Reads the files.

        Raises:
            UserError: a file is missing or damaged.
        """

    @abstractmethod
    def remedy(self) -> str:
        """What to do to have the real data, as the end of a sentence."""

    def missing(self) -> str:
        """Why there are no files, as a part of a sentence."""
        found = "holds no files of this data set" if self.root.exists() else "was not found"
        return f"the folder {self.root} {found}"

    def load(self, num_nodes: int, seed: int) -> NodeData:
        data, source, warning = self._from_source(seed)
        train = NodeSplit(*data.train, self.spread(data.train[1], num_nodes, seed, "train"))
        test = NodeSplit(*data.test, self.spread(data.test[1], num_nodes, seed, "test"))
        counts = f"{len(train.labels)} training and {len(test.labels)} test images"
        return NodeData(train, test, f"{source} ({counts}), {self.partition} partition", [], data.class_names, warning)

    def _from_source(self, seed: int) -> tuple[LabelledData, str, str | None]:
        """The data, where it comes from, and a warning."""
        folder = self.find() if self.source != "rendered" else None
        if folder is not None:
            return self.read(folder), f"{self.name}, files in {folder}", None
        if self.source == "files":
            raise UserError(
                f"data.source is 'files', but {self.missing()}; set data.source to 'rendered', or {self.remedy()}"
            )
        warning = None
        if self.source == "auto":
            warning = (
                f"These images are RENDERED, they are NOT {self.name}: {self.missing()}. For real data {self.remedy()}"
            )
        return self._render(seed), f"rendered stand-ins, not {self.name}", warning

    def _render(self, seed: int) -> LabelledData:
        from datamodules.shapes import draw_shapes, shape_names

        size, held_out = self.shape[1], max(self.num_classes, self.rendered_samples // 5)
        train, test = (
            draw_shapes(self.num_classes, samples, size, seed, split)
            for split, samples in (("train", self.rendered_samples), ("test", held_out))
        )
        return LabelledData(train, test, shape_names(self.num_classes))

    def augmented(self, batch: NodeBatch, round_index: int, step: int) -> NodeBatch:
        if not self.augment:
            return batch
        seed = (global_seed(), "augment", round_index, step)
        mirrored = draw_per_node(batch, 2, 1, *seed, "mirror").bool().squeeze(1)
        if self.padding:
            batch.images = crop(
                batch.images, self.padding, draw_per_node(batch, 2 * self.padding + 1, 2, *seed, "crop")
            )
        mirror_(batch.images, mirrored)
        return batch
