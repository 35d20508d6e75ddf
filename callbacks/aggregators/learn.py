"""LEARN: several exchanges of models in a round, each with a robust mean."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.errors import one_of
from dfl_lightning.functional.coordinatewise import trimmed_mean
from dfl_lightning.functional.selection import smallest_diameter
from dfl_lightning.functional.weights import mean_of
from dfl_lightning.round import Block, Round, equal_receivers

Rule = Literal["rbtm", "mda"]


class LEARN(DeclaredRule):
    """Averaging agreement in ceil(log2(t + 2)) exchanges per round, at least one (El-Mhamdi et al. 2021).

    In each exchange a node replaces its model by a robust mean of its own and its neighbours' current models; attackers
    forge anew every time, and every exchange is paid for.

    Args:
        rule: ``rbtm``: the coordinate-wise trimmed mean; ``mda``: the mean of the n - f models with the smallest
            diameter, which takes long where f is large.
    """

    needs = "n >= 2 f + 1"

    def __init__(self, rule: Rule = "rbtm", **options: Any) -> None:
        super().__init__(**options)
        one_of("aggregator.rule", rule, Rule)
        self.rule = rule

    def capacity(self, models: Tensor) -> Tensor:
        return (models - 1).div(2, rounding_mode="floor")

    def aggregate(self, round: Round) -> Tensor:
        for exchange in range(max(1, math.ceil(math.log2(round.index + 2)))):
            if exchange:
                round.exchange()
            round.count("models", round.links, round.num_parameters)
            accepted = self._mda(round) if self.rule == "mda" else self._trimmed_mean(round)
        return accepted

    def _mda(self, round: Round) -> Tensor:
        squared, _ = round.distances()
        byzantine, usable = self.declared(round, round.candidates)
        chosen = torch.eye(round.num_nodes, dtype=torch.bool)
        members = round.candidates | chosen
        found: dict[tuple[int, ...], Tensor] = {}
        for receiver in usable.nonzero()[:, 0].tolist():
            senders = members[receiver].nonzero()[:, 0]
            rows, keep = round.sent[receiver, senders], len(senders) - int(byzantine[receiver])
            key = (keep, *rows.tolist())
            if key not in found:
                found[key] = smallest_diameter(squared[rows][:, rows], keep)
            chosen[receiver] = False
            chosen[receiver, senders[found[key]]] = True
        round.mix_(mean_of(chosen))
        return chosen.fill_diagonal_(False)

    def _trimmed_mean(self, round: Round) -> Tensor:
        candidates = round.candidates
        byzantine, usable = self.declared(round, candidates)
        own = torch.eye(round.num_nodes, dtype=torch.bool)
        members = (candidates | own) & usable[:, None]
        sets = list(equal_receivers(round.sent, members, byzantine))

        def trimmed(block: Block) -> Tensor:
            new, rows = block.own.clone(), block.rows
            for some, receivers in sets:
                new[receivers] = trimmed_mean(rows[some], int(byzantine[receivers[0]]))
            return new

        round.combine_(trimmed, mean_of(members))
        return candidates & usable[:, None]
