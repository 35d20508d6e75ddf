"""The own model times a factor."""

from typing import Any

from dfl_lightning.errors import finite
from dfl_lightning.phases import Attack
from dfl_lightning.round import Round


class ScaledModel(Attack):
    """Sends the own model times ``factor``; -5 is what the SketchGuard authors' framework calls directed deviation.

    Knows nothing about the others.

    Args:
        factor: what the own model is multiplied by.
    """

    def __init__(self, factor: float = -5.0, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.factor", factor)
        self.factor = factor

    def attack(self, round: Round) -> None:
        round.forge(round.byzantine, lambda block: self.factor * block.own[round.byzantine])
