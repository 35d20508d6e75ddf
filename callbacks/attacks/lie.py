"""A little is enough: small deviations in every coordinate."""

from typing import Any

from torch import Tensor

from dfl_lightning.errors import finite
from dfl_lightning.functional.envelope import alie_z
from dfl_lightning.phases import ColludingAttack, one_message
from dfl_lightning.round import Block, Round


def deviation(models: Tensor) -> Tensor:
    """Standard deviation over honest models [h, c] (with h - 1); 0 of a single one."""
    return models.std(0) if len(models) > 1 else models.new_zeros(models.shape[1])


class LIE(ColludingAttack):
    """All attackers send mean - z * standard deviation of the honest models (Baruch et al. 2019).

    Knows the honest models of this round.

    Args:
        z: how many standard deviations; 1.5 in the GAS paper.
    """

    def __init__(self, z: float = 1.5, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.z", z)
        self.z = z

    def _z(self, round: Round) -> float:
        return self.z

    def attack(self, round: Round) -> None:
        honest, z = self.seen(round), self._z(round)

        def near(block: Block) -> Tensor:
            models = block.own[honest]
            return (models.mean(0) - z * deviation(models))[None]

        round.forge(one_message(round), near)


class ALIE(LIE):
    """LIE with the z that its paper derives from the numbers of nodes and attackers (Baruch et al. 2019).

    z is 0 or less, and the attack harmless, where attackers are few. Knows the honest models of this round and the
    number of nodes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def _z(self, round: Round) -> float:
        return alie_z(round.num_nodes, int(round.byzantine.sum()))
