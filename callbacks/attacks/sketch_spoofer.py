"""An honest sketch, another model."""

import torch

from callbacks.attacks.scaled_model import ScaledModel
from dfl_lightning.round import Round


class SketchSpoofer(ScaledModel):
    """Announces the sketch of its own honest model, and sends another: ``factor`` times it.

    What the verification of fetched models is for. Where whole models are compared, it is ``ScaledModel``. Knows
    nothing about the others.

    Args:
        factor: what the own model is multiplied by.
    """

    def attack(self, round: Round) -> None:
        honest = torch.arange(round.num_nodes).expand(round.num_nodes, -1)
        round.forge(round.byzantine, lambda block: self.factor * block.own[round.byzantine], announce=honest)
