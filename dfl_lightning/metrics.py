"""Measures with one value per node."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import Metric


class NodeMean(Metric):
    """The mean of some figure over each node's samples; NaN for a node without samples.

    Args:
        num_nodes: N.

    >>> metric = NodeMean(2)
    >>> metric.update(0, torch.tensor([1.0, 3.0]))
    >>> metric.compute()
    tensor([2., nan], dtype=torch.float64)
    """

    full_state_update = False
    sums: Tensor
    counts: Tensor

    def __init__(self, num_nodes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(num_nodes, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(num_nodes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, node: int, values: Tensor) -> None:
        """Adds the values [n] of some samples of a node."""
        self.sums[node] += values.sum(dtype=torch.float64)
        self.counts[node] += len(values)

    def compute(self) -> Tensor:
        """Float64 [N]."""
        return self.sums / self.counts.where(self.counts > 0, torch.nan)


class TestErrorRate(NodeMean):
    """TER: 1 - accuracy of each node's model on its held-out samples (SketchGuard, sec. 5.1.5).

    >>> ter = TestErrorRate(2)
    >>> ter.update(0, torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    >>> ter.compute()
    tensor([0.5000,    nan], dtype=torch.float64)
    """

    __test__ = False  # no test class, for pytest

    def update(self, node: int, logits: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        """Adds predictions [n, classes] and labels [n] of a node; a prediction that is not a number is an error."""
        wrong = (logits.argmax(1) != labels) | ~logits.isfinite().all(1)
        super().update(node, wrong)


class NodeMeasures(nn.Module):
    """TER and loss of every node on one kind of held-out data.

    Args:
        num_nodes: N.
    """

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.ter, self.loss = TestErrorRate(num_nodes), NodeMean(num_nodes)

    def update(self, node: int, logits: Tensor, labels: Tensor) -> None:
        """Adds predictions [n, classes] and labels [n] of a node."""
        self.ter.update(node, logits, labels)
        self.loss.update(node, cross_entropy(logits, labels, reduction="none"))

    def compute(self) -> tuple[Tensor, Tensor]:
        """TER [N] and loss [N]."""
        return self.ter.compute().reshape(-1), self.loss.compute().reshape(
            -1
        )  # of one node torchmetrics makes a scalar

    @property
    def measured(self) -> Tensor:
        """bool [N]: nodes that have held-out samples."""
        return self.ter.counts.cpu() > 0

    def reset(self) -> None:
        """Forgets everything."""
        self.ter.reset()
        self.loss.reset()


def over_honest(values: Tensor, chosen: Tensor) -> dict[str, float]:
    """Mean, worst and spread (standard deviation) of values [N] over the chosen nodes: the honest and measured ones.

    >>> over_honest(torch.tensor([0.25, 0.75, 0.9]), torch.tensor([True, True, False]))
    {'mean': 0.5, 'worst': 0.75, 'std': 0.25}
    """
    honest = values.cpu()[chosen]
    if not len(honest):
        return {}
    return {"mean": honest.mean().item(), "worst": honest.max().item(), "std": honest.std(unbiased=False).item()}
