"""RFA: the geometric median of every neighbourhood."""

from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.distance_rule import DistanceRule, View
from dfl_lightning.errors import UserError, one_of
from dfl_lightning.functional.geometric_median import weiszfeld
from dfl_lightning.round import Round
from dfl_lightning.vector_rule import Measure, VectorRule

Start = Literal["mean", "zeros"]


class RFA(DistanceRule, VectorRule):
    """The smoothed geometric median of a node's own and its neighbours' models (Pillutla et al. 2019).

    A few iterations of Weiszfeld's algorithm, which needs distances only. Everybody's model is mixed with a weight.

    Args:
        iterations: T.
        nu: the least distance that is divided by.
        start: the point to start from: the ``mean`` of the models, or ``zeros``.
    """

    def __init__(self, iterations: int = 3, nu: float = 1e-6, start: Start = "mean", **options: Any) -> None:
        super().__init__(**options)
        one_of("aggregator.start", start, Start)
        if iterations < 1:
            raise UserError(f"aggregator.iterations is {iterations}, but it must be at least 1.")
        if not nu > 0:
            raise UserError(f"aggregator.nu is {nu}, but the least distance that is divided by must be above 0.")
        self.iterations, self.nu, self.start = iterations, nu, start

    def screen(self, round: Round, view: View) -> Tensor:
        return view.candidates | torch.eye(round.num_nodes, dtype=torch.bool)

    def weights(self, round: Round, view: View, accepted: Tensor) -> Tensor:
        weights = torch.zeros(accepted.shape, dtype=torch.float64)
        for some, squared in view.neighbourhoods():
            first = view.norms[view.rows[some].T] if self.start == "zeros" else None
            weights[some] = weiszfeld(squared, accepted[some].T, self.iterations, self.nu, first).T
        return weights

    def plan(self, measure: Measure, n: int, byzantine: int, generator: torch.Generator) -> Tensor:
        squared = measure.squared()
        first = measure.norms() if self.start == "zeros" else None
        members = torch.ones(squared.shape[1:], dtype=torch.bool)
        return weiszfeld(squared, members, self.iterations, self.nu, first)[None]
