"""BALANCE: accept the neighbours whose models are near the own one."""

from torch import Tensor

from callbacks.aggregators.threshold import ThresholdRule
from dfl_lightning.functional.weights import own_and_mean
from dfl_lightning.round import Round


class BALANCE(ThresholdRule):
    """Accepts a neighbour within gamma exp(-kappa t/T) times the own model's norm (Fang et al. 2024).

    The accepted models' mean is mixed with the own model. Every node receives every neighbour's whole model.

    Args:
        gamma: width of the threshold at the first round, in norms of the own model.
        kappa: how fast it narrows; 0 keeps it.
        alpha: weight of the own model.
        fallback: who accepts nobody takes the ``nearest`` neighbour, or keeps its ``own`` model.
    """

    def aggregate(self, round: Round) -> Tensor:
        squared, norms = round.distances()
        own = norms[: round.num_nodes].sqrt()
        accepted = self.screen(round, round.to_messages(squared), own, round.candidates)
        round.count("models", round.links, round.num_parameters)
        round.mix_(own_and_mean(accepted, self.alpha))
        return accepted
