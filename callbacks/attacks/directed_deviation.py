"""The directed deviation attack of Fang et al. 2020."""

from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.errors import one_of
from dfl_lightning.functional.deviation import deviation_interval, krum_deviation
from dfl_lightning.functional.distances import LIMIT
from dfl_lightning.phases import ColludingAttack, one_message
from dfl_lightning.round import Block, Round

Against = Literal["auto", "trimmed_mean", "krum"]


class DirectedDeviation(ColludingAttack):
    """Sends models that deviate against the direction in which honest training moves (Fang et al. 2020).

    Knows the honest models of this round; the form against Krum also the number of nodes and attackers.

    Args:
        against: the rule that is attacked. ``trimmed_mean``: every coordinate is drawn beyond the honest models'
            extreme value, each attacker on its own; this form hides among honest models. ``krum``: all attackers send
            one model, as far against the direction as Krum still picks it. ``auto``: ``krum`` if the aggregator is
            Krum or Multi-Krum, else ``trimmed_mean``.
    """

    needs_start = True

    def __init__(self, against: Against = "auto", **options: Any) -> None:
        super().__init__(**options)
        one_of("attack.against", against, Against)
        self.against = against

    def attack(self, round: Round) -> None:
        krum = self.against == "krum" or (
            self.against == "auto" and round.aggregator is not None and round.aggregator.krum_like
        )
        (self._against_krum if krum else self._against_trimmed_mean)(round, self.seen(round))

    def _against_trimmed_mean(self, round: Round, honest: Tensor) -> None:
        def forged(block: Block) -> Tensor:
            assert block.start is not None
            models = block.own[honest]
            highest, lowest = models.amax(0), models.amin(0)
            mean = models.mean(0).where(highest > lowest, highest)  # of equal numbers a rounded mean is not their value
            sign = (mean - block.start[round.byzantine]).sign()
            lower, upper = deviation_interval(highest, lowest, sign)
            draw = torch.rand(lower.shape, generator=block.generator("directed_deviation"), dtype=lower.dtype)
            return torch.where(sign == 0, mean, lower + (upper - lower) * draw.to(lower.device))

        round.forge(round.byzantine, forged)

    def _against_krum(self, round: Round, honest: Tensor) -> None:
        attackers = round.byzantine.nonzero()[:, 0]
        usable = round.reduce(lambda block: block.start[attackers].double().square().sum(1)).cpu() <= LIMIT  # type: ignore[index]
        if not usable.any():
            return
        leader = int(attackers[usable][0])  # they send one model, so they deviate from one of theirs

        def reference_and_direction(block: Block) -> tuple[Tensor, Tensor]:
            assert block.start is not None
            reference = block.start[leader]
            return reference, (block.own[honest].mean(0) - reference).sign()

        def gram(block: Block) -> Tensor:
            reference, direction = reference_and_direction(block)
            vectors = torch.cat([block.own[honest] - reference, direction[None]]).double()
            return vectors @ vectors.T

        far = krum_deviation(round.reduce(gram).cpu(), int(round.byzantine.sum()), round.num_parameters)

        def forged(block: Block) -> Tensor:
            reference, direction = reference_and_direction(block)
            return (reference - far * direction)[None]

        round.forge(one_message(round), forged)
