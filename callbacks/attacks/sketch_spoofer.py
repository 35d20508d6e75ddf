"""An honest sketch, another model."""

from typing import Any

import torch

from dfl_lightning.errors import finite
from dfl_lightning.phases import Attack
from dfl_lightning.round import Round


class SketchSpoofer(Attack):
    """Announces the sketch of its own honest model, and sends another: ``factor`` times it.

    What the verification of fetched models is for. Where whole models are compared, it is ``ScaledModel``. Knows
    nothing about the others.

    Args:
        factor: what the own model is multiplied by.
    """

    def __init__(self, factor: float = -5.0, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.factor", factor)
        self.factor = factor

    def attack(self, round: Round) -> None:
        honest = torch.arange(round.num_nodes).expand(round.num_nodes, -1)
        round.forge(round.byzantine, lambda block: self.factor * block.own[round.byzantine], announce=honest)
