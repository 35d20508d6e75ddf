"""Krum and Multi-Krum, in every neighbourhood or on a server."""

from typing import Any

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.distance_rule import DistanceRule, View
from dfl_lightning.errors import UserError
from dfl_lightning.functional.selection import krum_scores, lowest, ranks
from dfl_lightning.functional.weights import mean_of
from dfl_lightning.round import Round
from dfl_lightning.vector_rule import Measure, VectorRule


class Krum(DeclaredRule, DistanceRule, VectorRule):
    """Takes the model that is nearest to its n - f - 2 nearest ones (Blanchard et al. 2017).

    A node's own model is one of its n candidates, and is kept where it wins. Scores are sums of squared distances.
    """

    krum_like = True
    needs = "n >= 2 f + 3"

    def capacity(self, models: Tensor) -> Tensor:
        return (models - 3).div(2, rounding_mode="floor")

    def how_many(self, models: Tensor, byzantine: Tensor) -> Tensor:
        """How many of the best of n models are taken, long, as n and f are."""
        return torch.ones_like(models)

    def screen(self, round: Round, view: View) -> Tensor:
        own = torch.eye(round.num_nodes, dtype=torch.bool)
        members = view.candidates | own
        byzantine, usable = self.declared(round, view.candidates)
        many = self.how_many(members.sum(1), byzantine)
        chosen = torch.zeros_like(members)
        for some, squared in view.neighbourhoods():
            scores = krum_scores(squared, byzantine[some], members[some].T)
            chosen[some] = (ranks(scores, 0) < many[some]).T & members[some]
        return torch.where(usable[:, None], chosen, own)

    def weights(self, round: Round, view: View, accepted: Tensor) -> Tensor:
        return mean_of(accepted)

    def plan(self, measure: Measure, n: int, byzantine: int, generator: torch.Generator) -> Tensor:
        many = int(self.how_many(torch.tensor(n), torch.tensor(byzantine)))
        return lowest(krum_scores(measure.squared(), byzantine), min(many, n))[None].double() / min(many, n)


class MultiKrum(Krum):
    """Averages the m models with the lowest Krum scores (Blanchard et al. 2017).

    Args:
        m: how many (default: n - f, all that can be honest).
    """

    def __init__(self, m: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if m is not None and m < 1:
            raise UserError(f"aggregator.m is {m}, but at least 1 model is averaged; null takes n - f.")
        self.m = m

    def how_many(self, models: Tensor, byzantine: Tensor) -> Tensor:
        return models - byzantine if self.m is None else torch.full_like(models, self.m)
