"""DnC: who stands out along the main direction of spread."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.errors import UserError
from dfl_lightning.functional.selection import lowest
from dfl_lightning.vector_rule import Measure, VectorRule


class DnC(DeclaredRule, VectorRule):
    """Divide and conquer: averages the models that stand out least (Shejwalkar and Houmansadr 2021).

    On some random coordinates the models' main direction of spread is found; the n - floor(c f) with the smallest
    squared projections onto it are good. The mean of those that are good every time is taken; if there is none, of
    those that are good most often.

    Args:
        c: how many models are left out for each Byzantine one; at least one model is kept.
        iterations: how often, each time on other coordinates.
        coordinates: how many random ones.
    """

    needs = "n > f"

    def __init__(self, c: float = 4.0, iterations: int = 1, coordinates: int = 10_000, **options: Any) -> None:
        super().__init__(**options)
        for name, value in (("c", c), ("iterations", iterations), ("coordinates", coordinates)):
            if not value > 0:
                raise UserError(f"aggregator.{name} is {value}, but it must be above 0.")
        self.c, self.iterations, self.coordinates = c, iterations, coordinates

    def capacity(self, models: Tensor) -> Tensor:
        return models - 1

    def plan(self, measure: Measure, n: int, byzantine: int, generator: torch.Generator) -> Tensor:
        removed = math.floor(self.c * byzantine + 1e-9)
        if removed >= n:
            warnings.warn(f"DnC would leave out {removed} of {n} models (c = {self.c}); it keeps one.", stacklevel=2)
        keep = max(1, n - removed)
        times = torch.zeros(n, *measure.problems, dtype=torch.long)
        for draw in range(self.iterations):
            times += lowest(self._outlyingness(measure.squared(self.coordinates, draw)), keep)
        good = times == times.amax(0)
        return (good.double() / good.sum(0))[None]

    @staticmethod
    def _outlyingness(squared: Tensor) -> Tensor:
        """Squared projections [n, ...] onto the main direction, from squared distances [n, n, ...].

        With C the centred vectors, C C' = -J D J / 2 has the eigenvector u and the eigenvalue l of that direction, and
        the projections are sqrt(l) u.
        """
        squared = squared.double()
        rows = squared.mean(1, keepdim=True)
        gram = (rows + rows.transpose(0, 1) - squared - rows.mean(0, keepdim=True)) / 2
        values, vectors = torch.linalg.eigh(gram.movedim((0, 1), (-2, -1)))
        return (values[..., -1:].clamp(min=0) * vectors[..., :, -1].square()).movedim(-1, 0)
