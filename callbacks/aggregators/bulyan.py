"""Bulyan: Krum's choice, then a trimmed mean around the median."""

from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.errors import one_of
from dfl_lightning.functional.coordinatewise import mean_around_median
from dfl_lightning.functional.selection import krum_in_turn, krum_scores, lowest
from dfl_lightning.functional.sorting import ascending
from dfl_lightning.vector_rule import Measure, VectorRule, group_distances

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
        chosen = self._select(measure.squared(), byzantine)
        place = chosen.cumsum(0) - 1
        return torch.stack([(chosen & (place == k)).double() for k in range(n - 2 * byzantine)])

    def _select(self, squared: Tensor, byzantine: int) -> Tensor:
        """Which of the vectors are averaged, bool [n, ...]."""
        count = len(squared) - 2 * byzantine
        if self.selection == "oneshot":
            return lowest(krum_scores(squared, byzantine), count)
        return krum_in_turn(squared, byzantine, count)

    def combine(self, vectors: Tensor, byzantine: int, generator: torch.Generator) -> Tensor:
        """As planned, but groups are not copied: of the 2f that were not selected, half sorts first and half last."""
        n, squared = len(vectors), group_distances(vectors)
        chosen = self._select(squared, byzantine)
        place = (~chosen).cumsum(0)
        first, last = ~chosen & (place <= byzantine), ~chosen & (place > byzantine)
        side = torch.zeros_like(squared[0]).masked_fill(first, -torch.inf).masked_fill(last, torch.inf)
        sides = vectors + side[:, None]
        return mean_around_median(ascending(sides, byzantine, n - byzantine), n - 4 * byzantine)

    def finish(self, vectors: Tensor, byzantine: int) -> Tensor:
        return mean_around_median(ascending(vectors, 0, len(vectors)), len(vectors) - 2 * byzantine)
