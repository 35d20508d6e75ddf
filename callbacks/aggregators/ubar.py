"""UBAR: near models first, then those that do well on the own data."""

from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.distance_rule import DistanceRule, View
from dfl_lightning.errors import UserError, one_of
from dfl_lightning.functional.selection import ranks
from dfl_lightning.functional.weights import own_and_mean
from dfl_lightning.round import Round

Fallback = Literal["min_loss", "nearest"]


class UBAR(DistanceRule):
    """Of the nearest neighbours takes those whose loss on a local mini-batch is at most the own one (Guo et al. 2021).

    First the floor(rho |N_i|) neighbours nearest to the own model (at least one) are kept; then their models are run on
    one mini-batch of the node's training data, and so is the own. The mean of the rest is mixed with the own model,
    which has been trained before (SketchGuard's flow). A loss that is not a number rejects.

    Args:
        rho: share of the neighbours that pass the first stage (default: the share of honest nodes).
        alpha: weight of the own model.
        fallback: who keeps nobody in the second stage takes the one of the ``min_loss``, or the ``nearest``.
    """

    def __init__(
        self, rho: float | None = None, alpha: float = 0.5, fallback: Fallback = "min_loss", **options: Any
    ) -> None:
        super().__init__(**options)
        one_of("aggregator.fallback", fallback, Fallback)
        if rho is not None and not 0 < rho <= 1:
            raise UserError(f"aggregator.rho is {rho}, but it is a share of the neighbours, above 0 and at most 1.")
        if not 0 <= alpha <= 1:
            raise UserError(f"aggregator.alpha is {alpha}, but it is the own model's weight, from 0 to 1.")
        self.rho, self.alpha, self.fallback = rho, alpha, fallback

    def screen(self, round: Round, view: View) -> Tensor:
        rho = float((~round.byzantine).double().mean()) if self.rho is None else self.rho
        many = (rho * round.links.sum(1) + 1e-9).floor().clamp(min=1)
        distances = view.to_messages.masked_fill(~view.candidates, torch.inf)
        return (ranks(distances) < many[:, None]) & view.candidates

    def judge(self, round: Round, view: View, accepted: Tensor) -> Tensor:
        own = torch.eye(len(accepted), dtype=torch.bool) & accepted.any(1, keepdim=True)
        losses = round.losses(accepted | own)
        losses = losses.where(losses.isfinite(), torch.inf)
        runs = accepted & losses.isfinite()
        kept = runs & (losses <= losses.diagonal()[:, None])
        order = losses if self.fallback == "min_loss" else view.to_messages
        best = ranks(order.masked_fill(~runs, torch.inf)).argmin(1)
        alone = runs.any(1) & ~kept.any(1)
        kept[alone, best[alone]] = True
        return kept

    def weights(self, round: Round, view: View, accepted: Tensor) -> Tensor:
        return own_and_mean(accepted, self.alpha)
