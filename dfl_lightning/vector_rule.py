"""Rules that make one vector of n, whoever receives them: on graphs, on a server, in groups of coordinates."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.functional.weights import mean_of
from dfl_lightning.phases import Aggregator
from dfl_lightning.round import Block, Round, equal_receivers

STRIPS = 5  # in which the distances of small groups are computed
SMALL = 16  # coordinates in a group; from there on a matrix product is faster


class Measure(ABC):
    """What a rule may know of n vectors: of whole models, of groups of their coordinates, or of means of them.

    Attributes:
        problems: shape of the further dimensions.
    """

    problems: tuple[int, ...] = ()

    @abstractmethod
    def squared(self, sample: int | None = None, draw: int = 0) -> Tensor:
        """Squared distances [n, n, ...], over all coordinates or over so many random ones of each problem.

        Args:
            sample: how many coordinates.
            draw: number of the draw of coordinates.
        """

    @abstractmethod
    def norms(self) -> Tensor:
        """Squared norms [n, ...]."""


class OfRows(Measure):
    """Some rows of a round."""

    def __init__(self, round: Round, rows: Tensor) -> None:
        self.round, self.rows = round, rows

    def squared(self, sample: int | None = None, draw: int = 0) -> Tensor:
        if sample is None or sample >= self.round.num_parameters:
            squared, _ = self.round.distances()
        else:
            squared = self.round.sampled_distances(sample, draw)
        return squared[self.rows][:, self.rows]

    def norms(self) -> Tensor:
        return self.round.distances()[1][self.rows]


class OfGroups(Measure):
    """Vectors [n, m, g] of m coordinates in each of g groups."""

    def __init__(self, vectors: Tensor, generator: torch.Generator) -> None:
        self.vectors, self.generator, self.problems = vectors, generator, tuple(vectors.shape[2:])

    def squared(self, sample: int | None = None, draw: int = 0) -> Tensor:
        size = self.vectors.shape[1]
        if sample is None or sample >= size:
            return group_distances(self.vectors)
        return group_distances(self.vectors[:, torch.randperm(size, generator=self.generator)[:sample]])

    def norms(self) -> Tensor:
        return self.vectors.square().sum(1, dtype=torch.float64)


class OfMeans(Measure):
    """Weighted means of measured vectors, by weights [t, n] that sum to 1."""

    def __init__(self, measure: Measure, weights: Tensor) -> None:
        self.measure, self.weights, self.problems = measure, weights, measure.problems

    def _mixed(self, squared: Tensor) -> tuple[Tensor, Tensor]:
        """A D A' [t, t, ...] and half its diagonal [t, ...]."""
        mixed = torch.einsum("si,ij...,tj->st...", self.weights, squared.double(), self.weights)
        return mixed, mixed.diagonal().movedim(-1, 0) / 2

    def squared(self, sample: int | None = None, draw: int = 0) -> Tensor:
        mixed, half = self._mixed(self.measure.squared(sample, draw))
        return (mixed - half[:, None] - half).clamp(min=0)

    def norms(self) -> Tensor:
        _, half = self._mixed(self.measure.squared())
        return torch.einsum("si,i...->s...", self.weights, self.measure.norms().double()) - half


class VectorRule(Aggregator):
    """Base of rules that treat a node's own model as one of its n vectors. A subclass writes :meth:`plan`.

    A rule is a linear step, planned from distances, that makes k vectors of n, and a coordinate-wise one, which makes
    one of k. Either may be missing. So the same code works on whole models, on many groups of their coordinates at
    once (``GAS``), and on means of models (``Bucketing``).
    """

    central = True

    def capacity(self, models: Tensor) -> Tensor:
        """The largest f that the rule allows for numbers n of models, long."""
        return models - 1

    @abstractmethod
    def plan(self, measure: Measure, n: int, byzantine: int, generator: torch.Generator) -> Tensor | None:
        """The linear step: weights [k, n, ...] of k vectors, float64; None to leave the n vectors as they are.

        Args:
            measure: of the n vectors; the further dimensions of what it gives are problems of their own.
            n: number of vectors.
            byzantine: f.
            generator: for random choices.
        """

    def finish(self, vectors: Tensor, byzantine: int) -> Tensor:
        """The coordinate-wise step: [k, ...] -> [...]; by default there is one vector left."""
        return vectors[0]

    def combine(self, vectors: Tensor, byzantine: int, generator: torch.Generator) -> Tensor:
        """The rule on many groups of coordinates: vectors [n, m, g], m coordinates in each of g groups, -> [m, g]."""
        weights = self.plan(OfGroups(vectors, generator), len(vectors), byzantine, generator)
        return self.finish(vectors if weights is None else mix_groups(weights, vectors), byzantine)

    # Whole models

    def aggregate(self, round: Round) -> Tensor:
        own = torch.eye(round.num_nodes, dtype=torch.bool)
        byzantine, usable = torch.zeros(round.num_nodes, dtype=torch.long), own.any(1)
        if isinstance(self, DeclaredRule):
            byzantine, usable = self.declared(round, round.candidates)
        members = (round.candidates | own) & usable[:, None] & round.sane[:, None]
        plans = []
        for rows, receivers in equal_receivers(round.sent, members, byzantine):
            weights = self.plan(OfRows(round, rows), len(rows), int(byzantine[receivers[0]]), round.generator("plan"))
            plans.append((rows, receivers, weights))
        round.count("models", round.links, round.num_parameters)
        used = members.clone()
        for rows, receivers, weights in plans:
            if weights is not None:  # who has no weight was not accepted
                taken = rows[(weights != 0).any(0)]
                used[receivers] &= torch.isin(round.sent[receivers], taken)
        if all(weights is not None and len(weights) == 1 for _, _, weights in plans):
            round.mix_(self._mixing(round, members, plans))
        else:
            round.combine_(lambda block: self._finished(block, plans, byzantine), mean_of(used))
        return used.fill_diagonal_(False)

    @staticmethod
    def _mixing(round: Round, members: Tensor, plans: list) -> Tensor:
        matrix = torch.eye(round.num_nodes, dtype=torch.float64)
        for _, receivers, weights in plans:
            for receiver in receivers.tolist():
                matrix[receiver] = 0
                matrix[receiver, members[receiver]] = weights[0]
        return matrix

    def _finished(self, block: Block, plans: list, byzantine: Tensor) -> Tensor:
        new, everything = block.own.clone(), block.rows
        for rows, receivers, weights in plans:
            vectors = everything[rows]
            if weights is not None:
                vectors = weights.to(vectors) @ vectors
            new[receivers] = self.finish(vectors, int(byzantine[receivers[0]]))
        return new


def group_distances(vectors: Tensor) -> Tensor:
    """Squared distances [n, n, g] between vectors [n, m, g] within each of g groups of m coordinates.

    Small groups coordinate by coordinate, large ones by a product in float64 of vectors centred on the first.
    """
    n, m, g = vectors.shape
    if m <= SMALL:
        squared = vectors.new_zeros(n, n, g)
        step = -(-n // STRIPS)
        for low in range(0, n, step):  # the others mirror those that were done before
            high = min(low + step, n)
            strip = squared[low:high, low:]
            for one in vectors.unbind(1):
                difference = one[low:high, None] - one[low:]
                strip.addcmul_(difference, difference)
            squared[high:, low:high] = squared[low:high, high:].transpose(0, 1)
        return squared
    centred = (vectors - vectors[:1]).double().permute(2, 0, 1)
    gram = torch.matmul(centred, centred.transpose(1, 2)).permute(1, 2, 0)
    norms = gram.diagonal(dim1=0, dim2=1).T
    squared = (norms[:, None] + norms - 2 * gram).clamp_(min=0)
    return (squared + squared.transpose(0, 1)) / 2


def mix_groups(weights: Tensor, vectors: Tensor) -> Tensor:
    """sum_j weights[k, j, g] vectors[j, m, g], [k, m, g]."""
    weights = weights.to(vectors)
    if vectors.shape[1] <= SMALL:
        mixed = weights[:, 0, None] * vectors[0]
        for j in range(1, len(vectors)):
            mixed += weights[:, j, None] * vectors[j]
        return mixed
    return torch.matmul(weights.permute(2, 0, 1), vectors.permute(2, 0, 1)).permute(1, 2, 0)
