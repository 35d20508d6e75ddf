"""Handwritten characters by writer."""

from string import ascii_lowercase, ascii_uppercase, digits

from datamodules.dealing import UserData
from datamodules.leaf import LeafFiles, encode_pixels, read_leaf
from datamodules.sources import Source, UserDataModule


class FEMNIST(UserDataModule):
    """Handwritten digits and letters, 62 classes, 1x28x28, black (0) on white (1); a node holds one or more writers.

    Args:
        root: a folder with LEAF's train/ and test/ JSON files, or with what the download wrote.
        source: "leaf" (LEAF's JSON files), "hub" (the download), "rendered" (characters drawn from fonts, a style
            per writer), or "auto": the first of these that is there.
        users_per_node: how many writers' images a node holds (default: all writers are dealt out).
        rendered_users: how many writers to draw (default: as many as the nodes need).
        rendered_samples: how many images a drawn writer has on average.
        batch_size: samples in one local step of a node.
        local_epochs: passes over a node's data in one round.
        max_samples: a node keeps at most so many training samples (default: all).
        evaluate_union: also measure every node on the union of all test data.
    """

    num_classes = 62
    name = "FEMNIST"
    shape = (1, 28, 28)
    class_names = list(digits + ascii_uppercase + ascii_lowercase)

    def __init__(
        self,
        root: str = "data/femnist",
        source: Source = "auto",
        users_per_node: int | None = None,
        rendered_users: int | None = None,
        rendered_samples: int = 300,
        batch_size: int = 64,
        local_epochs: int = 1,
        max_samples: int | None = None,
        evaluate_union: bool = False,
    ) -> None:
        super().__init__(
            root,
            source,
            users_per_node,
            rendered_users,
            rendered_samples,
            batch_size,
            local_epochs,
            max_samples,
            evaluate_union,
        )

    def read(self, files: LeafFiles, seed: int) -> UserData:
        return read_leaf(files, encode_pixels(self.shape), self.num_classes, seed)

    def render(self, num_users: int, seed: int) -> UserData:
        from datamodules.characters import render_characters

        return render_characters(num_users, self.rendered_samples, self.class_names, seed)
