"""One optimizer for Lightning, one state per node underneath."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class NodeOptimizer(Optimizer):
    """A stock torch optimizer that remembers a separate state (momentum ...) for every node.

    Lightning sees one optimizer whose :meth:`step` runs one local step of all active nodes as its closure; inside it,
    :meth:`step_node` updates the node whose model is loaded, with that node's state. Nodes that are not stepped are not
    touched.

    Args:
        stock: the optimizer of the one network that serves all nodes.
        num_nodes: N.
    """

    def __init__(self, stock: Optimizer, num_nodes: int) -> None:
        super().__init__([{"params": group["params"]} for group in stock.param_groups], dict(stock.defaults))
        self.param_groups = (
            stock.param_groups
        )  # one list, so that a learning-rate scheduler reaches the stock optimizer
        self.stock = stock
        self.states: list[Any] = [defaultdict(dict) for _ in range(num_nodes)]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the closure, which steps the nodes one by one."""
        return closure() if closure is not None else None

    def step_node(self, node: int) -> None:
        """Updates the loaded model by its gradients and the node's state."""
        self.stock.state = self.states[node]
        self.stock.step()

    def forget(self) -> None:
        """Every node starts from a fresh state."""
        for state in self.states:
            state.clear()

    def state_dict(self) -> dict[str, Any]:
        """The states of all nodes, as in the stock optimizer's own state dict."""
        packed = []
        for state in self.states:
            self.stock.state = state
            packed.append(self.stock.state_dict()["state"])
        return {"nodes": packed, "param_groups": self.stock.state_dict()["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the states of all nodes from :meth:`state_dict`."""
        for node, state in enumerate(state_dict["nodes"]):
            self.stock.load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})
            self.states[node] = self.stock.state
        self.param_groups = self.stock.param_groups
