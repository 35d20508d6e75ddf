"""Driving neighbours apart."""

from typing import Any

import torch
from torch import Tensor

from dfl_lightning.errors import finite
from dfl_lightning.functional.weights import metropolis
from dfl_lightning.phases import Attack
from dfl_lightning.round import Block, Round


class Dissensus(Attack):
    """Sends each receiver the opposite of what its honest neighbours would pull it to (He et al. 2022).

    Receiver i gets w_i - epsilon sum_k W_ik (w_k - w_i) / sum_j W_ij over its honest neighbours k and its Byzantine
    ones j, W being the Metropolis matrix. Knows the graph and the models of each receiver and its neighbours.

    Args:
        epsilon: how much of the honest pull is undone; 1 cancels it where the receiver just averages.
    """

    needs_graph = True

    def __init__(self, epsilon: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.epsilon", epsilon)
        self.epsilon = epsilon

    def attack(self, round: Round) -> None:
        byzantine, honest = round.byzantine, ~round.byzantine & round.sane
        weights = metropolis(round.neighbours)
        victims = (honest & (round.neighbours & byzantine).any(1)).nonzero()[:, 0]
        pull = weights[victims] * honest / (weights[victims] * byzantine).sum(1, keepdim=True) * self.epsilon
        pull[torch.arange(len(victims)), victims] = 0
        total = pull.sum(1, keepdim=True)
        route = torch.full(round.neighbours.shape, -1)
        route[victims] = torch.where(byzantine, torch.arange(len(victims))[:, None], -1)

        def apart(block: Block) -> Tensor:
            sane = block.own.masked_fill(~honest.to(block.own.device)[:, None], 0)
            return (1 + total.to(block.own)) * block.own[victims] - pull.to(block.own) @ sane

        if len(victims):
            round.forge(route, apart)
