"""Colluders on a ladder from the honest models outwards."""

from typing import Any

import torch
from torch import Tensor

from dfl_lightning.errors import UserError, finite
from dfl_lightning.phases import ColludingAttack
from dfl_lightning.round import Block, Round


class Ladder(ColludingAttack):
    """The attackers stand at geometrically growing distances from the honest mean, against its update.

    The first is as far away as the median honest model, each next one ``ratio`` times farther, so that no gap parts
    them from the honest ones. Made against thresholds that adapt to what is seen. Knows the honest models and updates
    of this round.

    Args:
        ratio: of successive distances, at least 1.
    """

    needs_start = True

    def __init__(self, ratio: float = 1.4, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.ratio", ratio)
        if not ratio >= 1:
            raise UserError(f"attack.ratio is {ratio}, but it is a ratio of growing distances, at least 1.")
        self.ratio = ratio

    def attack(self, round: Round) -> None:
        honest = self.seen(round)

        def mean_and_update(block: Block) -> tuple[Tensor, Tensor]:
            assert block.start is not None
            mean = block.own[honest].mean(0)
            return mean, mean - block.start[honest].mean(0)

        def squares(block: Block) -> Tensor:  # of the honest deviations, then of the mean update
            mean, update = mean_and_update(block)
            return torch.cat([block.own[honest] - mean, update[None]]).double().square().sum(1)

        lengths = round.reduce(squares).sqrt().cpu()
        length = max(float(lengths[-1]), torch.finfo(torch.float32).tiny)
        far = lengths[:-1].median() * self.ratio ** torch.arange(int(round.byzantine.sum()), dtype=torch.float64)

        def rungs(block: Block) -> Tensor:
            mean, update = mean_and_update(block)
            return mean - far.to(block.own)[:, None] * (update / length)

        round.forge(round.byzantine, rungs)
