"""Self-centred clipping: nobody moves a node farther than its clipping radius."""

from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.distance_rule import DistanceRule, View
from dfl_lightning.errors import UserError, one_of
from dfl_lightning.functional.weights import metropolis, uniform
from dfl_lightning.round import Round

Mixing = Literal["metropolis", "uniform"]


class SCCLIP(DeclaredRule, DistanceRule):
    """Averages the neighbours' models after clipping them to a ball around the own (ClippedGossip, He et al. 2022).

    Node i becomes sum_j W_ij (w_i + (w_j - w_i) min(1, tau_i / ||w_j - w_i||)). A message that is not finite counts as
    w_i. Whole models are always fetched; the share of messages that were clipped is logged as ``screening/clipped``.

    Args:
        tau: the radius; null adapts it: the distance of the (|N_i| - f)-th nearest neighbour, f being declared. (The
            paper's own choice needs to know who is honest.)
        mixing: the matrix W, ``metropolis`` or ``uniform``.
    """

    needs = "a neighbour that is not among the f (n >= f + 2)"

    def __init__(self, tau: float | None = None, mixing: Mixing = "metropolis", **options: Any) -> None:
        super().__init__(**options)
        one_of("aggregator.mixing", mixing, Mixing)
        if tau is not None and not tau > 0:
            raise UserError(f"aggregator.tau is {tau}, but the clipping radius must be above 0; null adapts it.")
        self.tau, self.mixing = tau, mixing

    def capacity(self, models: Tensor) -> Tensor:
        return models - (2 if self.tau is None else 1)

    def screen(self, round: Round, view: View) -> Tensor:
        _, usable = self.declared(round, view.candidates)
        return view.candidates & usable[:, None]

    def weights(self, round: Round, view: View, accepted: Tensor) -> Tensor:
        distances = view.to_messages.masked_fill(~view.candidates, torch.inf)
        if self.tau is None:
            byzantine, _ = self.declared(round, view.candidates)
            place = (view.candidates.sum(1) - byzantine - 1).clamp(min=0)
            radius = distances.sort(1).values.gather(1, place[:, None])
        else:
            radius = torch.full((round.num_nodes, 1), self.tau, dtype=torch.float64)
        clipping = (radius / distances).clamp(max=1).where(distances > 0, 1.0)
        honest = accepted & ~round.byzantine[:, None]
        round.metrics["screening/clipped"] = float((clipping[honest] < 1).double().mean()) if honest.any() else 0.0
        matrix = (metropolis if self.mixing == "metropolis" else uniform)(round.links).fill_diagonal_(0)
        clipped = matrix * clipping.where(accepted, 0.0)
        return clipped + (1 - clipped.sum(1)).diag()
