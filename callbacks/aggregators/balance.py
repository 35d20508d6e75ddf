"""BALANCE: accept the neighbours whose models are near the own one."""

from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.distance_rule import DistanceRule, View
from dfl_lightning.errors import UserError, finite, one_of
from dfl_lightning.functional.screening import screen, threshold_factor
from dfl_lightning.functional.selection import largest_gap
from dfl_lightning.functional.weights import own_and_mean
from dfl_lightning.round import Round

Fallback = Literal["nearest", "own"]
Threshold = Literal["model", "update", "gap"]
GAP = 1.5  # a ratio of successive distances that is larger parts the near from the far


class BALANCE(DistanceRule):
    """Accepts a neighbour within gamma exp(-kappa t/T) times the own model's norm (Fang et al. 2024).

    The accepted models' mean is mixed with the own model.

    Args:
        gamma: width of the threshold at the first round, in norms of the own model.
        kappa: how fast it narrows; 0 keeps it.
        alpha: weight of the own model.
        threshold: ``model``: the published one, relative to the own model; ``update``: ``c`` times how far the own
            model moved in this round, which is the size of honest differences; ``gap``: as ``model``, but nobody beyond
            the largest ratio of successive distances, if that exceeds 1.5.
        c: width of the threshold with ``threshold: update``.
        fallback: who accepts nobody takes the ``nearest`` neighbour, or keeps its ``own`` model (default: own with
            ``threshold: update``, else nearest).
    """

    def __init__(
        self,
        gamma: float = 2.0,
        kappa: float = 1.0,
        alpha: float = 0.5,
        threshold: Threshold = "model",
        c: float = 3.0,
        fallback: Fallback | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of("aggregator.threshold", threshold, Threshold)
        if fallback is not None:
            one_of("aggregator.fallback", fallback, Fallback)
        for name, value in (("gamma", gamma), ("kappa", kappa), ("c", c)):
            finite(f"aggregator.{name}", value)
        for name, value in (("gamma", gamma), ("c", c)):
            if not value > 0:
                raise UserError(f"aggregator.{name} is {value}, but the threshold's width must be above 0.")
        if not kappa >= 0:
            raise UserError(f"aggregator.kappa is {kappa}, but the threshold's decay must be at least 0.")
        if not 0 <= alpha <= 1:
            raise UserError(f"aggregator.alpha is {alpha}, but it is the own model's weight, from 0 to 1.")
        self.gamma, self.kappa, self.alpha = gamma, kappa, alpha
        self.threshold, self.c, self.fallback = threshold, c, fallback
        self.needs_start = threshold == "update"

    def bounds(self, round: Round, view: View) -> Tensor:
        """How far a message may be from each node's model, [N]."""
        if self.threshold == "update":
            return self.c * view.updates
        own = view.norms[: round.num_nodes].sqrt()
        bounds = threshold_factor(self.gamma, self.kappa, round.index, round.total) * own
        if self.threshold == "gap":
            distances = view.to_messages.masked_fill(~view.candidates, torch.inf)
            bounds = torch.minimum(bounds, largest_gap(distances, GAP))
        return bounds

    def reach(self, round: Round) -> Tensor:
        return self.bounds(round, View(round))

    def screen(self, round: Round, view: View) -> Tensor:
        nearest = (self.fallback or ("own" if self.threshold == "update" else "nearest")) == "nearest"
        return screen(view.to_messages, self.bounds(round, view), view.candidates, nearest)

    def within(self, round: Round, view: View, true: Tensor) -> Tensor:
        return true <= self.bounds(round, View(round))[:, None]

    def weights(self, round: Round, view: View, accepted: Tensor) -> Tensor:
        return own_and_mean(accepted, self.alpha)
