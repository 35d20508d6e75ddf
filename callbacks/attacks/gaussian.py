"""Random noise."""

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
        fraction: share of the nodes that are Byzantine, at least 0 and below 1.
        nodes: the Byzantine nodes by number, in place of a fraction.
        seed: of the choice (default: the run's seed).
    """

    def __init__(
        self, sigma: float = 1.0, fraction: float = 0.3, nodes: list[int] | None = None, seed: int | None = None
    ) -> None:
        super().__init__(fraction, nodes, seed)
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
