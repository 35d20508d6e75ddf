"""What the engine asks of a source of data: images that stay uint8 in memory, and which rows belong to which node."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor

from dfl_lightning.errors import UserError
from dfl_lightning.seeding import generator, global_seed

EVALUATION_IMAGES = 2048  # at most so many images in one evaluation batch, over all its nodes,
EVALUATION_VALUES = 2**26  # and at most so many values (one image may have more)


@dataclass
class NodeSplit:
    """The training or the test data of every node.

    Attributes:
        images: uint8 [total, C, H, W], in memory or memory-mapped; decoded once, never copied per node.
        labels: int64 [total].
        indices: for each node the rows of ``images`` that it holds, int64 [n_i].
    """

    images: Tensor
    labels: Tensor
    indices: list[Tensor]


@dataclass
class NodeData:
    """Everything that a data source knows about a network of nodes.

    Attributes:
        train: what the nodes train on.
        test: what they are measured on; no node is ever measured on a sample that some node trained on.
        source: one line that says where the data comes from, recorded with the run.
        users: for each node the names of the users (writers, people) whose data it holds; empty where there are none.
        class_names: what the labels stand for, for pictures.
        warning: one line to be said loudly before training, for example that the data is rendered.
    """

    train: NodeSplit
    test: NodeSplit
    source: str
    users: list[list[str]] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    warning: str | None = None

    def fingerprint(self) -> str:
        """16 hexadecimal digits over all labels, who holds what, and up to 4,096 evenly spaced images of each split."""
        digest = hashlib.sha256()
        for split in (self.train, self.test):
            digest.update(split.labels.numpy().tobytes())
            for rows in split.indices:
                digest.update(rows.numpy().tobytes() + b"|")
            step = max(1, len(split.images) // 4096)
            for image in split.images[::step]:  # one by one, since they may be mapped from a file larger than memory
                digest.update(image.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


@dataclass
class NodeBatch:
    """One local step of every active node; the samples of all nodes lie one after another.

    Attributes:
        nodes: the active nodes, ascending.
        sizes: how many samples each of them has here.
        images: [sum(sizes), C, H, W].
        labels: int64 [sum(sizes)].
    """

    nodes: list[int]
    sizes: list[int]
    images: Tensor
    labels: Tensor

    def to(self, *args: Any, **kwargs: Any) -> "NodeBatch":
        """The batch on another device (what Lightning calls)."""
        return replace(self, images=self.images.to(*args, **kwargs), labels=self.labels.to(*args, **kwargs))

    def per_node(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields (node, images [n, C, H, W], labels [n]), views of the batch."""
        yield from zip(self.nodes, self.images.split(self.sizes), self.labels.split(self.sizes))


class NodeLoader:
    """Yields :class:`NodeBatch` es.

    For training, step s holds the s-th mini-batch of every node that still has one; a node's order of samples depends
    on (seed, node, round, local epoch) alone, and nodes with less data finish earlier. For evaluation
    (``local_epochs=0``) every sample is seen once, in order, several nodes to a batch. ``augment`` may change training
    batches: it is given each one with the round and the step.
    """

    def __init__(
        self,
        split: NodeSplit,
        batch_size: int,
        local_epochs: int = 0,
        seed: int = 0,
        round_index: Callable[[], int] | None = None,
        clients: Callable[[], Tensor] | None = None,
        augment: Callable[[NodeBatch, int, int], NodeBatch] | None = None,
    ) -> None:
        self.split, self.batch_size, self.local_epochs, self.seed = split, batch_size, local_epochs, seed
        self.round_index, self.clients = round_index or (lambda: 0), clients
        self.augment = augment or (lambda batch, index, step: batch)

    def __len__(self) -> int:
        if not self.local_epochs:
            return sum(1 for _ in self._packs())
        return self.local_epochs * max(-(-len(rows) // self.batch_size) for rows in self.split.indices)

    def __iter__(self) -> Iterator[NodeBatch]:
        yield from self._training() if self.local_epochs else map(self._gather, self._packs())

    def _training(self) -> Iterator[NodeBatch]:
        clients = range(len(self.split.indices)) if self.clients is None else self.clients().tolist()
        steps = [iter(self._mini_batches(client, self.split.indices[client])) for client in clients]
        for number in range(len(self)):  # the Trainer counts on it, so a round without the largest client ends idly
            parts = [(node, rows) for node, step in enumerate(steps) if (rows := next(step, None)) is not None]
            batch = self._gather(parts)
            yield self.augment(batch, self.round_index(), number) if parts else batch

    def _mini_batches(self, node: int, rows: Tensor) -> Iterator[Tensor]:
        for epoch in range(self.local_epochs):
            order = torch.randperm(
                len(rows), generator=generator(self.seed, "batches", node, self.round_index(), epoch)
            )
            yield from rows[order].split(self.batch_size) if len(rows) else ()

    def _packs(self) -> Iterator[list[tuple[int, Tensor]]]:
        pack: list[tuple[int, Tensor]] = []
        values = self.split.images.shape[1:].numel()
        most = room = max(1, min(EVALUATION_IMAGES, EVALUATION_VALUES // values))
        for node, rows in enumerate(self.split.indices):
            for chunk in rows.split(most) if len(rows) else ():
                if len(chunk) > room:
                    yield pack
                    pack, room = [], most
                pack.append((node, chunk))
                room -= len(chunk)
        if pack:
            yield pack

    def _gather(self, parts: list[tuple[int, Tensor]]) -> NodeBatch:
        rows = torch.cat([rows for _, rows in parts]) if parts else torch.empty(0, dtype=torch.long)
        nodes, sizes = [node for node, _ in parts], [len(rows) for _, rows in parts]
        return NodeBatch(nodes, sizes, self.split.images[rows], self.split.labels[rows])


class NodeDataModule(LightningDataModule, ABC):
    """Base of every source of data. A subclass says ``num_classes`` and writes :meth:`load`.

    Args:
        batch_size: samples in one local step of a node.
        local_epochs: passes over a node's data in one round.
        max_samples: a node keeps at most so many training samples, chosen by the seed (default: all).
        evaluate_union: also measure every node on the union of all test data (keys ``ter/union_mean`` ...).

    Attributes:
        nodes: the data, once it is set up.
        fingerprint: of the data as it was dealt, once it is set up.
    """

    num_classes: int

    def __init__(
        self, batch_size: int = 64, local_epochs: int = 1, max_samples: int | None = None, evaluate_union: bool = False
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("local_epochs", local_epochs), ("max_samples", max_samples)):
            if (value is None and name != "max_samples") or (value is not None and value < 1):
                raise UserError(f"data.{name} is {value}, but it must be at least 1.")
        self.batch_size, self.local_epochs, self.max_samples = batch_size, local_epochs, max_samples
        self.evaluate_union = evaluate_union
        self.nodes: NodeData | None = None
        self.fingerprint = ""
        self._loaded: tuple[int, int] | None = None

    @abstractmethod
    def load(self, num_nodes: int, seed: int) -> NodeData:
        """Reads the data and deals it to ``num_nodes`` nodes, the same way for the same seed.

        Raises:
            UserError: the data is missing, malformed, or not enough for so many nodes.
        """

    @property
    def _module(self) -> Any:
        return self.trainer.lightning_module  # type: ignore[union-attr]

    def setup(self, stage: str | None = None) -> None:
        """Loads the data once, for the number of nodes that the topology of the trainer's module has."""
        module = self._module
        wanted = (module.topology.num_clients, global_seed())
        if module.topology.central and self.evaluate_union:
            raise UserError(
                "data.evaluate_union is true, but a server's model is always measured on the union; leave it false."
            )
        if self._loaded == wanted:
            return
        self.nodes = self.load(*wanted)
        train, test = self.nodes.train, self.nodes.test
        if not len(train.indices) == len(test.indices) == wanted[0]:
            raise ValueError(
                f"{type(self).__name__}.load must deal its data to {wanted[0]} nodes, no more and no fewer."
            )
        for node, rows in enumerate(train.indices):
            if not len(rows):
                raise UserError(
                    f"Node {node} got no training data from {self.nodes.source}; use fewer nodes or more data."
                )
            if self.max_samples is not None and len(rows) > self.max_samples:
                chosen = torch.randperm(len(rows), generator=generator(global_seed(), "max_samples", node))
                train.indices[node] = rows[chosen[: self.max_samples].sort().values]
        self.fingerprint = self.nodes.fingerprint()
        self._loaded = wanted

    def mini_batch(self, node: int, rows: Tensor) -> NodeBatch:
        """Some training samples of one node, as one batch.

        Args:
            node: number of the node.
            rows: which rows of the training images, long [n].
        """
        assert self.nodes is not None
        train = self.nodes.train
        return NodeBatch([node], [len(rows)], train.images[rows], train.labels[rows])

    def train_dataloader(self) -> NodeLoader:
        assert self.nodes is not None
        assert self.trainer is not None
        trainer, module = self.trainer, self._module
        return NodeLoader(
            self.nodes.train,
            self.batch_size,
            self.local_epochs,
            global_seed(),
            lambda: trainer.current_epoch,
            (lambda: module.clients) if module.topology.central else None,
            self.augmented,
        )

    def val_dataloader(self) -> list[NodeLoader]:
        """Each node's own held-out data and, if asked for, the union of all nodes' held-out data for each node.

        A server's model is measured once, as node 0, on the union of all clients' held-out data.
        """
        assert self.nodes is not None
        test = self.nodes.test
        if self._module.topology.central:
            return [NodeLoader(replace(test, indices=[torch.cat(test.indices).unique()]), self.batch_size)]
        loaders = [NodeLoader(test, self.batch_size)]
        if self.evaluate_union:
            everything = torch.cat(test.indices).unique()  # nodes may share held-out users
            loaders.append(NodeLoader(replace(test, indices=[everything] * len(test.indices)), self.batch_size))
        return loaders

    def augmented(self, batch: NodeBatch, round_index: int, step: int) -> NodeBatch:
        """A training batch as the nodes shall see it, still bytes on the CPU; it may be changed in place.

        What is drawn for a node's samples may depend on (seed, node, round, step) alone: then a resumed run draws the
        same, whichever nodes share the batch.
        """
        return batch

    def on_after_batch_transfer(self, batch: NodeBatch, dataloader_idx: int) -> NodeBatch:
        """Bytes become numbers in [0, 1] here, on the device."""
        return replace(batch, images=batch.images.float().div_(255))
