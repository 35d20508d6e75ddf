"""Plain decentralised averaging."""

from typing import Literal

from torch import Tensor

from dfl_lightning.errors import UserError, one_of
from dfl_lightning.functional.weights import metropolis, own_and_mean, uniform
from dfl_lightning.phases import Aggregator
from dfl_lightning.round import Round

Mixing = Literal["uniform", "metropolis", "alpha"]


class DFedAvg(Aggregator):
    """Averages the own model with all neighbours' models; trusts everyone (Lian et al. 2017; SketchGuard, eq. 3).

    Args:
        mixing: ``uniform``: 1 / (1 + |N_i|) for everyone; ``metropolis``: 1 / (1 + the larger degree of the two) for
            each neighbour, the rest for the own; ``alpha``: alpha for the own model, the rest for the neighbours' mean.
        alpha: weight of the own model, with ``mixing: alpha``.
    """

    central = True

    def __init__(self, mixing: Mixing = "uniform", alpha: float = 0.5) -> None:
        super().__init__()
        one_of("aggregator.mixing", mixing, Mixing)
        if not 0 <= alpha <= 1:
            raise UserError(f"aggregator.alpha is {alpha}, but it is the own model's weight, from 0 to 1.")
        self.mixing, self.alpha = mixing, alpha

    def weights(self, links: Tensor) -> Tensor:
        """The mixing matrix [n, n] for the given links."""
        if self.mixing == "alpha":
            return own_and_mean(links, self.alpha)
        return uniform(links) if self.mixing == "uniform" else metropolis(links)

    def aggregate(self, round: Round) -> Tensor:
        links = round.links
        round.count("models", links, round.num_parameters)
        round.mix_(self.weights(links))
        return links
