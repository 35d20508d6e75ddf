"""Inner product manipulation: against the honest mean."""

from typing import Any

from torch import Tensor

from dfl_lightning.errors import finite
from dfl_lightning.phases import ColludingAttack
from dfl_lightning.round import Block, Round


class IPM(ColludingAttack):
    """Sends the model that minus epsilon times the honest mean update leads to (Xie et al. 2020).

    Every attacker starts from its own model of the round's start. Knows the honest updates of this round.

    Args:
        epsilon: size of the opposite update.
    """

    needs_start = True

    def __init__(self, epsilon: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.epsilon", epsilon)
        self.epsilon = epsilon

    def attack(self, round: Round) -> None:
        honest = self.seen(round)

        def opposite(block: Block) -> Tensor:
            assert block.start is not None
            update = (block.own[honest] - block.start[honest]).mean(0)
            return block.start[round.byzantine] - self.epsilon * update

        round.forge(round.byzantine, opposite)
