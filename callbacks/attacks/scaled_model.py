"""The own model times a factor."""

from dfl_lightning.errors import finite
from dfl_lightning.phases import Attack
from dfl_lightning.round import Round


class ScaledModel(Attack):
    """Sends the own model times ``factor``; -5 is what the SketchGuard authors' framework calls directed deviation.

    Knows nothing about the others.

    Args:
        factor: what the own model is multiplied by.
        fraction: share of the nodes that are Byzantine, at least 0 and below 1.
        nodes: the Byzantine nodes by number, in place of a fraction.
        seed: of the choice (default: the run's seed).
    """

    def __init__(
        self, factor: float = -5.0, fraction: float = 0.3, nodes: list[int] | None = None, seed: int | None = None
    ) -> None:
        super().__init__(fraction, nodes, seed)
        finite("attack.factor", factor)
        self.factor = factor

    def attack(self, round: Round) -> None:
        round.forge(round.byzantine, lambda block: self.factor * block.own[round.byzantine])
