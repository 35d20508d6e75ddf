"""The coordinate-wise median and trimmed mean."""

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.functional.coordinatewise import median, trimmed_mean
from dfl_lightning.vector_rule import Measure, VectorRule


class Median(VectorRule):
    """The median of every coordinate; of an even number of models, the mean of the middle two (Yin et al. 2018)."""

    def plan(self, measure: Measure, n: int, byzantine: int, generator: torch.Generator) -> None:
        return None

    def finish(self, vectors: Tensor, byzantine: int) -> Tensor:
        return median(vectors)


class TrimmedMean(DeclaredRule, VectorRule):
    """The mean of every coordinate without its f largest and f smallest values (Yin et al. 2018).

    The GAS paper's RBTM: with a server, reliable broadcast delivers what was sent.
    """

    needs = "n >= 2 f + 1"

    def capacity(self, models: Tensor) -> Tensor:
        return (models - 1).div(2, rounding_mode="floor")

    def plan(self, measure: Measure, n: int, byzantine: int, generator: torch.Generator) -> None:
        return None

    def finish(self, vectors: Tensor, byzantine: int) -> Tensor:
        return trimmed_mean(vectors, byzantine)
