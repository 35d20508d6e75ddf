"""Random noise."""

from typing import Any

import torch
from torch import Tensor

from dfl_lightning.errors import UserError, finite
from dfl_lightning.phases import Attack
from dfl_lightning.round import Block, Round


class Gaussian(Attack):
    """Sends the own model plus independent normal noise (Blanchard et al. 2017; SketchGuard, sec. 5.1.3).

    Knows nothing about the others.

    Args:
        sigma: standard deviation of the noise, per parameter.
    """

    def __init__(self, sigma: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.sigma", sigma)
        if not sigma >= 0:
            raise UserError(f"attack.sigma is {sigma}, but a standard deviation is at least 0.")
        self.sigma = sigma

    def attack(self, round: Round) -> None:
        def noisy(block: Block) -> Tensor:
            own = block.own[round.byzantine]
            noise = torch.randn(own.shape, generator=block.generator("gaussian"), dtype=own.dtype)
            return own.add_(noise.to(own.device), alpha=self.sigma)

        round.forge(round.byzantine, noisy)
