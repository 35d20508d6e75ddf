"""Bucketing: a rule on means of a few models each."""

from typing import Any

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.errors import UserError
from dfl_lightning.vector_rule import Measure, OfMeans, VectorRule


class Bucketing(DeclaredRule, VectorRule):
    """Shuffles the models into buckets of s and applies a rule to the buckets' means (Karimireddy et al. 2022).

    The f of the rule stays the same: at most so many buckets hold a Byzantine model.

    Args:
        base: the rule; its own settings for Byzantine models are those of the bucketing.
        size: s, models in a bucket; the last one may have fewer, and its mean is that of those it has.
    """

    def __init__(self, base: VectorRule, size: int = 2, **options: Any) -> None:
        super().__init__(**options)
        if size < 1:
            raise UserError(f"aggregator.size is {size}, but a bucket holds at least 1 model.")
        self.base, self.size = base, size
        self.needs = f"{getattr(base, 'needs', 'n > f')} for its n / {size} buckets"

    def capacity(self, models: Tensor) -> Tensor:
        return self.base.capacity((models + self.size - 1).div(self.size, rounding_mode="floor"))

    def plan(self, measure: Measure, n: int, byzantine: int, generator: torch.Generator) -> Tensor:
        bucket = torch.empty(n, dtype=torch.long)
        bucket[torch.randperm(n, generator=generator)] = torch.arange(n) // self.size
        count = -(-n // self.size)
        means = torch.nn.functional.one_hot(bucket, count).T.double()
        means /= means.sum(1, keepdim=True)
        chosen = self.base.plan(OfMeans(measure, means), count, byzantine, generator)
        if chosen is None:
            return means.view(count, n, *[1] * len(measure.problems)).expand(count, n, *measure.problems)
        return torch.einsum("kt...,tn->kn...", chosen, means)

    def finish(self, vectors: Tensor, byzantine: int) -> Tensor:
        return self.base.finish(vectors, byzantine)
