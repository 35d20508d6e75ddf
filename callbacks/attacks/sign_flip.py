"""The own update with its sign flipped."""

from typing import Any

from torch import Tensor

from dfl_lightning.errors import finite
from dfl_lightning.phases import Attack
from dfl_lightning.round import Block, Round


class SignFlip(Attack):
    """Sends the model that the opposite of the own update leads to: start - scale * update.

    Knows nothing about the others. (Minus the honest mean is ``IPM``, minus the own model is ``ScaledModel``.)

    Args:
        scale: what the flipped update is multiplied by.
    """

    needs_start = True

    def __init__(self, scale: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.scale", scale)
        self.scale = scale

    def attack(self, round: Round) -> None:
        def flipped(block: Block) -> Tensor:
            assert block.start is not None
            start = block.start[round.byzantine]
            return start - self.scale * (block.own[round.byzantine] - start)

        round.forge(round.byzantine, flipped)


class BitFlip(SignFlip):
    """Sends the model that minus the own update leads to, as the GAS paper names it (Allen-Zhu et al. 2020).

    Not flips of bits. Knows nothing about the others.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(1.0, **options)
