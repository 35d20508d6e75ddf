"""What a callback may do in a round: the bases of attacks, of aggregators and of anything else that watches."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dfl_lightning.errors import UserError, one_of
from dfl_lightning.functional.sketch import CountSketch
from dfl_lightning.round import Round
from dfl_lightning.seeding import generator
from dfl_lightning.topology import Topology

Knowledge = Literal["all", "neighbours"]


class RoundCallback(Callback):
    """A Lightning callback with the three phases of a round.

    The module runs each phase over all callbacks before the next one, whatever their order, between the last local
    step of an epoch and its validation.

    Attributes:
        needs_start: keep the rows of the round's start, for update-space maths ([N, D] more memory).
    """

    needs_start: bool = False

    def check(self, topology: Topology, byzantine: Tensor, seed: int, rounds: int) -> None:
        """Called before any data is read: raises UserError if this callback does not fit such a network."""

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
        fraction: share of the nodes (or of a server's clients) that is Byzantine, at least 0 and below 1.
        nodes: the Byzantine nodes by number, in place of a fraction.
        seed: of the choice (default: the run's seed).

    Attributes:
        needs_graph: whether it sends different receivers different messages, which a server does not have.
    """

    needs_graph: bool = False

    def __init__(self, fraction: float = 0.3, nodes: list[int] | None = None, seed: int | None = None) -> None:
        super().__init__()
        if not 0 <= fraction < 1:
            raise UserError(f"attack.fraction is {fraction}, but it is a share of all nodes, at least 0 and below 1.")
        self.fraction, self.nodes, self.seed = fraction, nodes, seed

    def check(self, topology: Topology, byzantine: Tensor, seed: int, rounds: int) -> None:
        if topology.central and self.needs_graph:
            raise UserError(
                f"attack is {type(self).__name__}, which sends every receiver another message, but a server is one "
                "receiver; use another attack or another topology."
            )

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


class ColludingAttack(Attack):
    """Base of attacks by nodes that work together and see honest models.

    Args:
        knowledge: ``all``: they know every honest node's model; ``neighbours``: those of their own neighbours, which
            they tell each other.
    """

    def __init__(self, knowledge: Knowledge = "all", **options: Any) -> None:
        super().__init__(**options)
        one_of("attack.knowledge", knowledge, Knowledge)
        self.knowledge = knowledge

    def seen(self, round: Round) -> Tensor:
        """bool [N]: the honest nodes whose models the attackers know."""
        honest = ~round.byzantine & round.sane
        return honest if self.knowledge == "all" else honest & round.neighbours[round.byzantine].any(0)

    def on_attack(self, round: Round) -> None:
        if round.byzantine.any() and self.seen(round).any():  # who sees nobody sends its own model
            self.attack(round)


def one_message(round: Round) -> Tensor:
    """The route by which all attackers send the forged row 0 to everybody, for ``round.forge``."""
    return torch.where(round.byzantine, 0, -1).expand(round.num_nodes, -1)


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
        central: whether a server can apply the rule, which has no model of its own.
    """

    krum_like: bool = False
    central: bool = False

    def check(self, topology: Topology, byzantine: Tensor, seed: int, rounds: int) -> None:
        if topology.central and not self.central:
            raise UserError(
                f"aggregator is {type(self).__name__}, which compares with a node's own model, but a server has none; "
                "use a rule such as GAS, MultiKrum, Median or DFedAvg, or another topology."
            )

    def reach(self, round: Round) -> Tensor | None:
        """How far a message may be from each node's model to be accepted, [N], as attackers who know everything see it.

        None if the rule has no such threshold.
        """
        return None

    def public_sketch(self, dim: int) -> CountSketch | None:
        """The hash for models of d parameters that everybody can compute beforehand; None without sketches."""
        return None

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
        self,
        models: Tensor,
        neighbours: Tensor | None = None,
        index: int = 0,
        total: int = 1,
        seed: int = 0,
        start: Tensor | None = None,
        loss: Callable[[Tensor, int], float] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Applies the rule once to models [n, d], which stay as they are.

        Args:
            models: one vector per node.
            neighbours: bool [n, n], receiver by sender (default: everyone hears everyone).
            index: t, the round's number from 0.
            total: T, the number of rounds.
            seed: of the rule's random choices.
            start: [n, d], the models before local training, for rules that look at updates.
            loss: of a model [d] on a node's data, for rules that run models.

        Returns:
            The new models [n, d], and whom each node accepted, bool [n, n].
        """
        n = len(models)
        if neighbours is None:
            neighbours = ~torch.eye(n, dtype=torch.bool)
        rows = models.clone()
        nobody = torch.zeros(n, dtype=torch.bool)
        round = Round(rows, neighbours, nobody, index=index, total=total, seed=seed, start=start)
        round.loss = loss
        self.on_aggregate(round)
        assert round.accepted is not None
        return rows, round.accepted
