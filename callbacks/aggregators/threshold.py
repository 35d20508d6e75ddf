"""What BALANCE and SketchGuard share: the threshold on a distance."""

from typing import Literal

from torch import Tensor

from dfl_lightning.errors import UserError, finite, one_of
from dfl_lightning.functional.screening import screen, threshold_factor
from dfl_lightning.phases import Aggregator
from dfl_lightning.round import Round

Fallback = Literal["nearest", "own"]


class ThresholdRule(Aggregator):
    """Base of the rules that accept whoever is within a shrinking multiple of the own model's norm.

    Args:
        gamma: width of the threshold at the first round, in norms of the own model.
        kappa: how fast it narrows; 0 keeps it.
        alpha: weight of the own model.
        fallback: who accepts nobody takes the ``nearest`` neighbour, or keeps its ``own`` model.
    """

    def __init__(
        self,
        gamma: float = 2.0,
        kappa: float = 1.0,
        alpha: float = 0.5,
        fallback: Fallback = "nearest",
    ) -> None:
        super().__init__()
        one_of("aggregator.fallback", fallback, Fallback)
        for name, value in (("gamma", gamma), ("kappa", kappa)):
            finite(f"aggregator.{name}", value)
        if not gamma > 0:
            raise UserError(f"aggregator.gamma is {gamma}, but the threshold's width must be above 0.")
        if not kappa >= 0:
            raise UserError(f"aggregator.kappa is {kappa}, but the threshold's decay must be at least 0.")
        if not 0 <= alpha <= 1:
            raise UserError(f"aggregator.alpha is {alpha}, but it is the own model's weight, from 0 to 1.")
        self.gamma, self.kappa, self.alpha, self.fallback = gamma, kappa, alpha, fallback

    def screen(self, round: Round, distances: Tensor, norms: Tensor, candidates: Tensor) -> Tensor:
        """Whom each node accepts, bool [N, N], from distances [N, N] to its messages and its own norm [N]."""
        bounds = threshold_factor(self.gamma, self.kappa, round.index, round.total) * norms
        return screen(distances, bounds, candidates, self.fallback == "nearest")
