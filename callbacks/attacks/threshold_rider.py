"""Just inside the receivers' thresholds."""

from typing import Any

import torch
from torch import Tensor

from dfl_lightning.errors import UserError, finite
from dfl_lightning.phases import Attack
from dfl_lightning.round import Block, Round


class ThresholdRider(Attack):
    """Sends each receiver a model just inside its threshold, against the honest mean update.

    Receiver i gets w_i - margin * (its threshold) * (the unit vector of the honest mean update). Where the rule has no
    threshold, the distance of its farthest honest neighbour takes its place. Knows the rule and its settings, the
    round, the graph and all models; sends different models to different receivers.

    Args:
        margin: share of the threshold that is used, above 0.
    """

    needs_start = True
    needs_graph = True

    def __init__(self, margin: float = 0.9, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.margin", margin)
        if not margin > 0:
            raise UserError(f"attack.margin is {margin}, but it is a share of the threshold, above 0.")
        self.margin = margin

    def attack(self, round: Round) -> None:
        honest = ~round.byzantine & round.sane
        victims = (honest & (round.neighbours & round.byzantine).any(1)).nonzero()[:, 0]
        if not len(victims):
            return
        reach = round.aggregator.reach(round) if round.aggregator is not None else None
        if reach is None:
            distances = round.to_messages(round.distances()[0])
            reach = distances.masked_fill(~(round.links & honest), 0).amax(1)

        def update(block: Block) -> Tensor:
            assert block.start is not None
            return (block.own[honest] - block.start[honest]).mean(0)

        length = float(round.reduce(lambda block: update(block).double().square().sum()).sqrt())
        length, far = max(length, torch.finfo(torch.float32).tiny), self.margin * reach[victims]
        route = torch.full(round.neighbours.shape, -1)
        route[victims] = torch.where(round.byzantine, torch.arange(len(victims))[:, None], -1)
        round.forge(route, lambda block: block.own[victims] - far.to(block.own)[:, None] * (update(block) / length))
