"""What a callback may do in a round: the bases of attacks, of aggregators and of anything else that watches."""

import math
from abc import ABC, abstractmethod

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dfl_lightning.errors import UserError
from dfl_lightning.round import Round
from dfl_lightning.seeding import generator


class RoundCallback(Callback):
    """A Lightning callback with the three phases of a round.

    The module runs each phase over all callbacks before the next one, whatever their order, between the last local
    step of an epoch and its validation.

    Attributes:
        needs_start: keep the rows of the round's start, for update-space maths ([N, D] more memory).
    """

    needs_start: bool = False

    def on_attack(self, round: Round) -> None:
        """Messages may be forged."""

    def on_aggregate(self, round: Round) -> None:
        """Models are screened and mixed."""

    def on_round_end(self, round: Round) -> None:
        """The round is over; its record may be read."""


def share(fraction: float, count: int) -> int:
    """ceil(fraction * count), with care for rounding: 0.3 of 10 is 3.

    >>> share(0.3, 10), share(0.3, 11), share(0.0, 5)
    (3, 4, 0)
    """
    return math.ceil(fraction * count - 1e-9)


class Attack(RoundCallback, ABC):
    """Base of attacks: who is Byzantine, and what they send instead of their models.

    Byzantine nodes train and aggregate like everyone; an attack changes only what they send.

    Args:
        fraction: share of the nodes that are Byzantine, at least 0 and below 1.
        nodes: the Byzantine nodes by number, in place of a fraction.
        seed: of the choice (default: the run's seed).
    """

    def __init__(self, fraction: float = 0.3, nodes: list[int] | None = None, seed: int | None = None) -> None:
        super().__init__()
        if not 0 <= fraction < 1:
            raise UserError(f"attack.fraction is {fraction}, but it is a share of all nodes, at least 0 and below 1.")
        self.fraction, self.nodes, self.seed = fraction, nodes, seed

    def choose(self, num_nodes: int, seed: int) -> Tensor:
        """bool [N]: the Byzantine nodes. ceil(fraction * N) drawn by the seed, or those listed.

        Raises:
            UserError: a listed node does not exist, or no node would be honest.
        """
        byzantine = torch.zeros(num_nodes, dtype=torch.bool)
        if self.nodes is None:
            count = share(self.fraction, num_nodes)
            order = torch.randperm(
                num_nodes, generator=generator(seed if self.seed is None else self.seed, "attackers")
            )
            byzantine[order[:count]] = True
        else:
            for node in self.nodes:
                if not 0 <= node < num_nodes:
                    raise UserError(f"attack.nodes names node {node}, but the nodes are 0 to {num_nodes - 1}.")
            byzantine[self.nodes] = True
        if byzantine.all():
            raise UserError(f"The attack makes all {num_nodes} nodes Byzantine; leave at least one honest to measure.")
        return byzantine

    def on_attack(self, round: Round) -> None:
        if round.byzantine.any():
            self.attack(round)

    @abstractmethod
    def attack(self, round: Round) -> None:
        """Forges messages by ``round.forge``; called when there is a Byzantine node."""


class Aggregator(RoundCallback, ABC):
    """Base of aggregation rules: how every node makes its next model of its own and its neighbours'.

    A subclass writes :meth:`aggregate`. The rule also works without a Trainer, on any matrix of vectors:

    >>> from dfl_lightning.functional.weights import uniform
    >>> class Mean(Aggregator):
    ...     def aggregate(self, round):
    ...         round.mix_(uniform(round.links))
    ...         return round.links
    >>> Mean()(torch.tensor([[0.0], [1.0], [5.0]]))[0]
    tensor([[2.],
            [2.],
            [2.]])

    Attributes:
        krum_like: whether the rule is Krum or a variant, for attacks that are made against it.
    """

    krum_like: bool = False

    @abstractmethod
    def aggregate(self, round: Round) -> Tensor:
        """Counts what moves, changes the models by the round's verbs, returns whom each node accepted, bool [N, N]."""

    def on_aggregate(self, round: Round) -> None:
        accepted = self.aggregate(round)
        if not isinstance(accepted, Tensor) or accepted.dtype != torch.bool or accepted.shape != round.neighbours.shape:
            n = round.num_nodes
            raise TypeError(f"{type(self).__name__}.aggregate must return whom each node accepted, bool [{n}, {n}].")
        round.accepted = accepted

    def __call__(
        self, models: Tensor, neighbours: Tensor | None = None, index: int = 0, total: int = 1, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Applies the rule once to models [n, d], which stay as they are.

        Args:
            models: one vector per node.
            neighbours: bool [n, n], receiver by sender (default: everyone hears everyone).
            index: t, the round's number from 0.
            total: T, the number of rounds.
            seed: of the rule's random choices.

        Returns:
            The new models [n, d], and whom each node accepted, bool [n, n].
        """
        n = len(models)
        if neighbours is None:
            neighbours = ~torch.eye(n, dtype=torch.bool)
        rows = models.clone()
        round = Round(rows, neighbours, torch.zeros(n, dtype=torch.bool), index=index, total=total, seed=seed)
        self.on_aggregate(round)
        assert round.accepted is not None
        return rows, round.accepted
