"""Min-Max and Min-Sum: as far from the honest mean as honest models are from each other."""

from typing import Any, Literal

import torch
from torch import Tensor

from callbacks.attacks.lie import deviation
from dfl_lightning.errors import one_of
from dfl_lightning.functional.envelope import Bound, largest_deviation
from dfl_lightning.phases import ColludingAttack, one_message
from dfl_lightning.round import Block, Round

Direction = Literal["std", "unit", "sign"]
SumBound = Literal["max", "min"]


class MinMax(ColludingAttack):
    """Sends mean - gamma v, no farther from any honest model than these are from each other (Shejwalkar 2021).

    Knows the honest models of this round.

    Args:
        direction: v: the ``std`` of the honest models per coordinate, or the ``unit`` vector or the ``sign`` of the
            honest mean update.
    """

    limit: Bound = "max_distance"

    def __init__(self, direction: Direction = "std", **options: Any) -> None:
        super().__init__(**options)
        one_of("attack.direction", direction, Direction)
        self.direction = direction
        self.needs_start = direction != "std"

    def attack(self, round: Round) -> None:
        honest = self.seen(round)

        def mean_and_direction(block: Block) -> tuple[Tensor, Tensor, Tensor]:
            models = block.own[honest]
            mean = models.mean(0)
            if self.direction == "std":
                return models, mean, deviation(models)
            assert block.start is not None
            update = mean - block.start[honest].mean(0)
            return models, mean, update.sign() if self.direction == "sign" else update

        def gram(block: Block) -> Tensor:
            models, mean, direction = mean_and_direction(block)
            vectors = torch.cat([models - mean, direction[None]]).double()
            return vectors @ vectors.T

        products = round.reduce(gram).cpu()
        if self.direction == "unit" and (length := float(products[-1, -1].sqrt())) > 0:
            products[-1] /= length
            products[:, -1] /= length
            gamma = largest_deviation(products, self.limit) / length
        else:
            gamma = largest_deviation(products, self.limit)

        def far(block: Block) -> Tensor:
            _, mean, direction = mean_and_direction(block)
            return (mean - gamma * direction)[None]

        round.forge(one_message(round), far)


class MinSum(MinMax):
    """As MinMax, but the sum of the squared distances to honest models is bounded (Shejwalkar 2021).

    Knows the honest models of this round.

    Args:
        bound: by the largest (``max``, the paper's) or the smallest (``min``, its authors' code) such sum of an honest
            model.
    """

    def __init__(self, bound: SumBound = "max", **options: Any) -> None:
        super().__init__(**options)
        one_of("attack.bound", bound, SumBound)
        self.bound = bound
        self.limit = "max_sum" if bound == "max" else "min_sum"
