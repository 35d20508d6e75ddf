"""All nodes' models as one matrix: a node's parameters, then its floating-point buffers, are one contiguous row."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dfl_lightning.errors import UserError
from dfl_lightning.seeding import derive_seed

Init = Literal["shared", "independent"]


@dataclass(frozen=True)
class Slot:
    """Where one tensor of the network lies in a row."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class Layout:
    """Names and shapes of a network's tensors, and where they lie in a row.

    Attributes:
        parameters: one slot per parameter, filling columns [0, d).
        buffers: one slot per floating-point buffer, filling columns [d, D).
        counters: names of the other buffers, which count (BatchNorm's batches) and do not travel.
        num_parameters: d.
        width: D.
    """

    def __init__(self, network: nn.Module) -> None:
        if any(is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
            raise UserError(f"The network {type(network).__name__} is lazy; give its layers their input sizes.")
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise UserError(
                f"The network {type(network).__name__} has no parameter to train; choose another model.network."
            )
        self.parameters = self._slots(network.named_parameters(), 0)
        self.num_parameters = self.parameters[-1].stop if self.parameters else 0
        floating = [(name, buffer) for name, buffer in network.named_buffers() if buffer.is_floating_point()]
        self.buffers = self._slots(floating, self.num_parameters)
        self.width = self.buffers[-1].stop if self.buffers else self.num_parameters
        self.counters = [name for name, buffer in network.named_buffers() if not buffer.is_floating_point()]
        kinds = {tensor.dtype for tensor in network.parameters()} | {buffer.dtype for _, buffer in floating}
        if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
            raise UserError(
                f"The network {type(network).__name__} has tensors of types {sorted(map(str, kinds))}, but a replica's "
                "are all float32 or all float64; convert the network."
            )

    @staticmethod
    def _slots(tensors: Any, start: int) -> list[Slot]:
        slots = []
        for name, tensor in tensors:
            slots.append(Slot(name, tensor.shape, start))
            start = slots[-1].stop
        return slots

    def describe(self) -> dict[str, list[int]]:
        """Names and shapes, as a checkpoint keeps them to recognise its network."""
        return {slot.name: list(slot.shape) for slot in self.parameters + self.buffers}

    def variances(self) -> Tensor | None:
        """bool [D - d]: which buffers are BatchNorm's running variances and must not be negative; None without any."""
        marks = [torch.full((slot.shape.numel(),), slot.name.endswith("running_var")) for slot in self.buffers]
        return torch.cat(marks) if marks and any(mark.any() for mark in marks) else None


class Replicas(nn.Module):
    """The models of all nodes.

    One network serves every node in turn: :meth:`load` points its parameters and buffers at a node's row, so that
    training it changes the row and nothing is ever flattened or copied.

    Args:
        make_network: builds the network; called once, or once per node for independent initialisation.
        num_nodes: N.
        init: ``shared``: all replicas start equal, as the papers' analyses assume; ``independent``: each its own.
        seed: of the initialisation.

    Attributes:
        rows: Tensor [N, D], a buffer of this module.
        layout: where each tensor of the network lies in a row.
    """

    rows: Tensor

    def __init__(
        self, make_network: Callable[[], nn.Module], num_nodes: int, init: Init = "shared", seed: int = 0
    ) -> None:
        super().__init__()
        network = self._draw(make_network, seed, 0)
        self.layout = Layout(network)
        dtype = next(network.parameters()).dtype
        self.register_buffer("rows", torch.empty(num_nodes, self.layout.width, dtype=dtype))
        buffers = dict(network.named_buffers())
        self.counters = {n: buffers[n].repeat(num_nodes, *[1] * buffers[n].dim()) for n in self.layout.counters}
        for node in range(num_nodes):
            source = network if node == 0 or init == "shared" else self._draw(make_network, seed, node)
            self._copy_in(source, self.rows[node])
        self._network = (network,)  # in a tuple, so that it is no submodule: its tensors are views of the rows
        self._parameters_of = [(network.get_parameter(slot.name), slot) for slot in self.layout.parameters]
        self._shown: list[tuple[nn.Module, str, Tensor]] = []

    @staticmethod
    def _draw(make_network: Callable[[], nn.Module], seed: int, node: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, "init", node))
            return make_network()

    def _copy_in(self, network: nn.Module, row: Tensor) -> None:
        tensors = dict(network.named_parameters()) | dict(network.named_buffers())
        for slot in self.layout.parameters + self.layout.buffers:
            row[slot.start : slot.stop] = tensors[slot.name].detach().reshape(-1)

    @property
    def network(self) -> nn.Module:
        """The one network that serves all nodes; it shows the node that was loaded last."""
        return self._network[0]

    @property
    def num_parameters(self) -> int:
        """d: parameters of one model, buffers not counted."""
        return self.layout.num_parameters

    def load(self, node: int, row: Tensor | None = None) -> nn.Module:
        """The network, showing a node's model: what it learns from here on, it writes into that node's row.

        Args:
            node: number of the node.
            row: another model [D] that the network shall show, with the node's counters.
        """
        row = self.rows[node] if row is None else row
        for tensor, slot in self._parameters_of:
            tensor.data = row[slot.start : slot.stop].view(slot.shape)
        self._shown = []
        for name, view in self._buffer_views(node, row):
            owner, _, leaf = name.rpartition(".")
            module = self.network.get_submodule(owner)
            module._buffers[leaf] = view
            self._shown.append((module, leaf, view))
        torch.clear_autocast_cache()  # it remembers casts by tensor, and these tensors have just become another node's
        return self.network.train(self.training) if self.network.training != self.training else self.network

    def store(self) -> None:
        """Takes back the buffers that the loaded network replaced by new tensors, where others change them in place."""
        for module, leaf, view in self._shown:
            if (current := module._buffers[leaf]) is not view and current is not None:
                view.copy_(current)

    def _buffer_views(self, node: int, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        for slot in self.layout.buffers:
            yield slot.name, row[slot.start : slot.stop].view(slot.shape)
        for name, values in self.counters.items():
            yield name, values[node]

    def _apply(self, fn: Any, recurse: bool = True) -> "Replicas":
        super()._apply(fn, recurse)
        self.counters = {name: fn(values) for name, values in self.counters.items()}
        return self

    def get_extra_state(self) -> dict[str, Tensor]:
        """The counters, for the checkpoint."""
        return self.counters

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Takes the counters from a checkpoint."""
        for name, values in self.counters.items():
            values.copy_(state[name])

    def named_views(self, node: int) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of a node's model (views of its row, then its counters), as in a state dict."""
        for slot in self.layout.parameters:
            yield slot.name, self.rows[node, slot.start : slot.stop].view(slot.shape)
        yield from self._buffer_views(node, self.rows[node])
