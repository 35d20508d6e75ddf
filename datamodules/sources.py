"""What FEMNIST and CelebA share: images that belong to users, from LEAF's files, from a download, or drawn."""

from abc import abstractmethod
from pathlib import Path
from typing import Literal, get_args

from datamodules.dealing import UserData, deal, hold_out
from datamodules.hub import load_hub
from datamodules.leaf import LeafFiles, find_leaf
from dfl_lightning.data import NodeData, NodeDataModule
from dfl_lightning.errors import UserError

Source = Literal["auto", "leaf", "hub", "rendered"]


class UserDataModule(NodeDataModule):
    """Base of the data sets whose images belong to users. A subclass says the constants and how to read and draw.

    Args:
        root: a folder with LEAF's train/ and test/ JSON files, or with what the download wrote (default: data/femnist
            or data/celeba).
        source: "leaf" (LEAF's JSON files), "hub" (the download), "rendered" (drawn stand-ins, a style per user), or
            "auto": the first of these that is there.
        users_per_node: how many users' images a node holds (default: all users are dealt out).
        rendered_users: how many users to draw (default: as many as the nodes need).
        rendered_samples: how many images a drawn user has on average.
        batch_size: samples in one local step of a node.
        local_epochs: passes over a node's data in one round.
        max_samples: a node keeps at most so many training samples (default: all).
        evaluate_union: also measure every node on the union of all test data.
    """

    name: str  # also the name of its folders, in small letters
    shape: tuple[int, int, int]
    class_names: list[str]

    def __init__(
        self,
        root: str | None = None,
        source: Source = "auto",
        users_per_node: int | None = None,
        rendered_users: int | None = None,
        rendered_samples: int = 300,
        batch_size: int = 64,
        local_epochs: int = 1,
        max_samples: int | None = None,
        evaluate_union: bool = False,
    ) -> None:
        super().__init__(batch_size, local_epochs, max_samples, evaluate_union)
        if source not in get_args(Source):
            raise UserError(f"data.source is '{source}', but must be one of {', '.join(get_args(Source))}.")
        for key, value, least in (
            ("users_per_node", users_per_node, 1),
            ("rendered_users", rendered_users, 1),
            ("rendered_samples", rendered_samples, 10),
        ):
            if value is not None and value < least:
                raise UserError(f"data.{key} is {value}, but must be at least {least}.")
        self.root = Path(root or f"data/{self.name.lower()}").expanduser()
        self.source, self.users_per_node = source, users_per_node
        self.rendered_users, self.rendered_samples = rendered_users, rendered_samples

    @abstractmethod
    def read(self, files: LeafFiles, seed: int) -> UserData:
        """Reads LEAF's files."""

    @abstractmethod
    def render(self, num_users: int, seed: int) -> UserData:
        """Draws stand-ins."""

    def load(self, num_nodes: int, seed: int) -> NodeData:
        data, source, warning = self._from_source(num_nodes * (self.users_per_node or 1), seed)
        train, test, users = deal(data, num_nodes, self.users_per_node, seed)
        return NodeData(train, test, source, users, self.class_names, warning)

    def _from_source(self, needed: int, seed: int) -> tuple[UserData, str, str | None]:
        """The data, where it comes from, and a warning."""
        files = find_leaf(self.root, self.name.lower()) if self.source in ("auto", "leaf") else None
        hub = self.root / "hub"
        if files is not None:
            data = self.read(files, seed)
            copies = f", {data.copies} copies of held-out images left out of training" if data.copies else ""
            return data, f"{self.name}, LEAF files in {files.root} ({_count(data)}{copies})", None
        if self.source == "hub" or (self.source == "auto" and hub.is_dir()):
            data = hold_out(load_hub(hub, self.shape, self.num_classes, self._download_command()), seed)
            return data, f"{self.name}, downloaded to {hub} ({_count(data)})", None
        if self.source == "leaf":
            raise UserError(
                f"data.source is 'leaf', but {self._what_is_missing()}; set data.root to a folder with LEAF's "
                "train/ and test/ JSON files, or data.source to 'rendered'."
            )
        data = self.render(self.rendered_users or needed, seed)
        warning = None
        if self.source == "auto":
            warning = (
                f"These images are RENDERED, they are NOT {self.name}: {self._what_is_missing()}. For real data set "
                f"data.root to a folder with LEAF's train/ and test/ JSON files, or run: {self._download_command()}"
            )
        return data, f"rendered stand-ins, not {self.name} ({_count(data)})", warning

    def _what_is_missing(self) -> str:
        if not self.root.exists():
            return f"the folder {self.root} was not found"
        return f"no LEAF JSON files were found in {self.root}"

    def _download_command(self) -> str:
        return f"python -m datamodules.download {self.name.lower()} --root {self.root}"


def _count(data: UserData) -> str:
    users = len(data.train.rows.keys() | data.test.rows.keys())
    images = sum(len(rows) for split in (data.train, data.test) for rows in split.rows.values())
    return f"{users} users, {images} images"
