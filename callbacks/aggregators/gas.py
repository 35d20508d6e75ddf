"""GAS: robust rules on groups of coordinates, and the mean of the models that are near their results."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.errors import UserError, one_of
from dfl_lightning.functional.selection import ranks
from dfl_lightning.functional.splitting import Split, split_coordinates
from dfl_lightning.functional.weights import mean_of
from dfl_lightning.round import Round, equal_receivers
from dfl_lightning.vector_rule import VectorRule

SCRATCH = 2**19  # numbers that are gathered at a time, and distances between them


class GAS(DeclaredRule):
    """Gradient splitting (GAS, sec. 5): any rule, applied to random groups of coordinates, scores the models.

    The coordinates are divided into p random groups, new ones in every round; the base rule makes one vector of each
    group (eq. 8); a model's score is the sum of its distances to them (eq. 9); the n - f models with the lowest scores
    are averaged (eq. 10, 11).

    Args:
        base: the rule, for example MultiKrum, Median or Bucketing; it gets the same f.
        num_splits: p, the number of groups; 1 is the rule on whole models.
        split: ``balanced``: exactly p groups; ``chunk``: groups of ceil(d / p), as the authors' code; ``layer``: one
            group per tensor of the model, in place of p.
    """

    central = True

    def __init__(self, base: VectorRule, num_splits: int = 100, split: Split = "balanced", **options: Any) -> None:
        super().__init__(**options)
        one_of("aggregator.split", split, Split)
        if num_splits < 1:
            raise UserError(f"aggregator.num_splits is {num_splits}, but there must be at least 1 group.")
        self.base, self.num_splits, self.split = base, num_splits, split
        self.needs = f"{getattr(base, 'needs', 'n > f')} for its base {type(base).__name__}"

    def capacity(self, models: Tensor) -> Tensor:
        """Clamping lowers the f of the base alone; of the n models, f are left out."""
        return models - 1 if self.on_invalid == "clamp" else self.base.capacity(models)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.split != "layer" and self.num_splits > (dim := pl_module.replicas.num_parameters):
            raise UserError(
                f"aggregator.num_splits is {self.num_splits}, but the model has {dim} parameters; use fewer."
            )

    def aggregate(self, round: Round) -> Tensor:
        own = torch.eye(round.num_nodes, dtype=torch.bool)
        candidates = round.candidates
        byzantine, usable = self.declared(round, candidates)
        members = (candidates | own) & usable[:, None] & round.sane[:, None]
        sets = list(equal_receivers(round.sent, members, byzantine))
        scores = self.scores(round, [(rows, int(byzantine[receivers[0]])) for rows, receivers in sets])
        chosen = own.clone()
        to_receivers = torch.full(members.shape, torch.inf, dtype=torch.float64)
        for of_rows, (_, receivers) in zip(scores, sets):
            to_receivers[receivers] = of_rows[round.sent[receivers]].masked_fill(~members[receivers], torch.inf)
            keep = members[receivers].sum(1) - byzantine[receivers]
            chosen[receivers] = (ranks(to_receivers[receivers]) < keep[:, None]) & members[receivers]
        round.count("models", round.links, round.num_parameters)
        self._report(round, to_receivers, chosen)
        round.mix_(mean_of(chosen))
        return chosen.fill_diagonal_(False)

    def scores(self, round: Round, sets: list[tuple[Tensor, int]]) -> Tensor:
        """Sums over all groups of the distances to the base rule's vector, float64 [sets, N + F].

        Args:
            round: the round.
            sets: rows that are combined, and how many of them are assumed to be Byzantine.
        """
        scores = torch.zeros(len(sets), round.num_nodes + round.num_forged, dtype=torch.float64)
        generator = round.generator(f"splits {round.exchanges}")
        for columns in self._chunks(round, generator):  # [g, m]
            groups, size = columns.shape
            if groups > size:  # what lies side by side in memory is computed together
                gathered = round.gather(columns.T.flatten()).view(-1, size, groups)
            else:
                gathered = round.gather(columns.flatten()).view(-1, groups, size).transpose(1, 2)
            for total, (rows, byzantine) in zip(scores, sets):
                vectors = gathered[rows]
                f = min(byzantine, max(int(self.base.capacity(torch.tensor(len(rows)))), 0))
                middle = self.base.combine(vectors, f, generator)
                total[rows] += (vectors - middle).square().sum(1).sqrt().sum(1, dtype=torch.float64)
        return scores

    def _chunks(self, round: Round, generator: torch.Generator) -> Iterator[Tensor]:
        order = torch.randperm(round.num_parameters, generator=generator)
        rows = round.num_nodes + round.num_forged
        for part in split_coordinates(order, self.num_splits, self.split, round.layers):
            yield from part.split(max(1, SCRATCH // (rows * max(rows, part.shape[1]))))

    @staticmethod
    def _report(round: Round, scores: Tensor, chosen: Tensor) -> None:
        seen = round.observers[:, None] & scores.isfinite()
        for name, senders in (("honest", ~round.byzantine), ("byzantine", round.byzantine)):
            if (some := seen & senders).any():
                round.metrics[f"score/{name}"] = float(scores[some].mean())
        selected = (chosen & round.byzantine)[round.observers].sum(1)
        round.metrics["gas/byzantine_selected"] = float(selected.double().mean())
