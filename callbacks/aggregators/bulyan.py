"""Bulyan: Krum's choice, then a trimmed mean around the median."""

from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.errors import one_of
from dfl_lightning.functional.coordinatewise import mean_around_median
from dfl_lightning.functional.selection import krum_in_turn, krum_scores, lowest
from dfl_lightning.vector_rule import Measure, VectorRule

Selection = Literal["iterated", "oneshot"]


class Bulyan(DeclaredRule, VectorRule):
    """Selects n - 2f models by Krum, then averages in every coordinate the n - 4f values nearest to their median.

    Krum runs n - 2f times on what is left (El Mhamdi et al. 2018), in the last steps with the nearest model alone.

    Args:
        selection: ``iterated``: as published; ``oneshot``: the n - 2f best scores of one run.
    """

    needs = "n >= 4 f + 3"

    def __init__(self, selection: Selection = "iterated", **options: Any) -> None:
        super().__init__(**options)
        one_of("aggregator.selection", selection, Selection)
        self.selection = selection

    def capacity(self, models: Tensor) -> Tensor:
        return (models - 3).div(4, rounding_mode="floor")

    def plan(self, measure: Measure, n: int, byzantine: int, generator: torch.Generator) -> Tensor:
        squared, count = measure.squared(), n - 2 * byzantine
        if self.selection == "oneshot":
            return _one_hot(lowest(krum_scores(squared, byzantine), count), count)
        return _one_hot(krum_in_turn(squared, byzantine, count), count)

    def finish(self, vectors: Tensor, byzantine: int) -> Tensor:
        return mean_around_median(vectors, len(vectors) - 2 * byzantine)


def _one_hot(chosen: Tensor, count: int) -> Tensor:
    """Weights [count, n, ...] that pick the chosen ones of [n, ...] in order."""
    place = chosen.cumsum(0) - 1
    return torch.stack([(chosen & (place == k)).double() for k in range(count)])
