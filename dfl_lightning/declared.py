"""Rules that must be told how many of the models that they see may be Byzantine."""

from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.errors import UserError, one_of
from dfl_lightning.phases import Aggregator
from dfl_lightning.round import Round
from dfl_lightning.topology import Topology

Sampled = Literal["sampled"]
OnInvalid = Literal["error", "clamp", "own"]


def shares(fraction: float, counts: Tensor) -> Tensor:
    """ceil(fraction * count) of every count, with care for rounding, as :func:`dfl_lightning.phases.share`.

    >>> shares(0.3, torch.tensor([10, 11, 0]))
    tensor([3, 4, 0])
    """
    return (fraction * counts.double() - 1e-9).ceil().long().clamp(min=0)


class DeclaredRule(Aggregator):
    """Base of rules with a declared number f of Byzantine models: a share of each node's neighbours.

    A node with n models (its own and those that came) must assume f = ceil(byzantine_fraction * neighbours) Byzantine
    ones, less those that were rejected since they are not finite.

    Args:
        byzantine_fraction: share of a node's neighbours (of the sampled clients on a server) that must be assumed to be
            Byzantine (default: the share of all that really is); ``sampled``: on a server, the true number among the
            clients of the round, which nobody could know, as the GAS authors' code has it.
        on_invalid: what a node does whose n and f the rule does not allow. ``error``: the run is refused before
            training if there is such a node; ``clamp``: f is lowered to the most that n allows; ``own``: it keeps its
            own model. Where only a message that is missing causes it, ``error`` clamps; who has too few models even
            for f = 0 keeps its own. The share of honest nodes that were affected is logged as ``screening/invalid``.

    Attributes:
        needs: the rule's condition on n and f, for messages.
    """

    needs: str

    def __init__(
        self,
        byzantine_fraction: float | Sampled | None = None,
        on_invalid: OnInvalid = "error",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of("aggregator.on_invalid", on_invalid, OnInvalid)
        share = 0.0 if byzantine_fraction in (None, "sampled") else byzantine_fraction
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise UserError(
                f"aggregator.byzantine_fraction is {byzantine_fraction}, but it is a share of the neighbours, at least "
                "0 and below 1; null takes the true one."
            )
        self.byzantine_fraction, self.on_invalid = byzantine_fraction, on_invalid

    @abstractmethod
    def capacity(self, models: Tensor) -> Tensor:
        """The largest f that the rule allows for numbers n of models, long; negative where not even 0 is allowed."""

    def _fraction(self, true_share: float, sampled_share: float) -> float:
        if self.byzantine_fraction is None:
            return true_share
        return sampled_share if self.byzantine_fraction == "sampled" else float(self.byzantine_fraction)

    def declared(self, round: Round, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """How many Byzantine models each node assumes, long [N], and whether the rule can be applied there, bool [N].

        Args:
            round: the round.
            candidates: bool [N, N], whose messages can be used.
        """
        fraction = self._fraction(round.byzantine_share, float(round.byzantine.double().mean()))
        expected, came = round.links.sum(1) + round.central, candidates.sum(1) + round.central
        declared = (shares(fraction, expected) - (expected - came)).clamp(min=0)
        most = self.capacity(candidates.sum(1) + 1)
        invalid = (declared > most) & (round.links.any(1))
        round.metrics["screening/invalid"] = float(invalid[round.observers].double().mean())
        usable = most >= 0
        if self.on_invalid == "own":
            usable &= ~invalid
        return torch.minimum(declared, most.clamp(min=0)), usable

    def check(self, topology: Topology, byzantine: Tensor, seed: int, rounds: int) -> None:
        super().check(topology, byzantine, seed, rounds)
        if self.on_invalid != "error":
            return
        for index in range(rounds if topology.varies or topology.central else 1):
            neighbours = topology.drawn(seed, index).sum(1)
            sampled = byzantine[topology.sampled(seed, index)]
            fraction = self._fraction(float(byzantine.double().mean()), float(sampled.double().mean()))
            declared = shares(fraction, neighbours + topology.central)
            invalid = (declared > self.capacity(neighbours + 1)) & (neighbours > 0)
            if invalid.any():
                node = int(invalid.nonzero()[0])
                who, more = f"node {node} (with its own)", "nodes more neighbours"
                if topology.central:
                    who, more = "the server", "it more clients"
                raise UserError(
                    f"{type(self).__name__} needs {self.needs}, but in round {index + 1} {who} has n = "
                    f"{int(neighbours[node]) + 1} models and must assume f = {int(declared[node])} Byzantine ones; set "
                    f"aggregator.on_invalid to clamp or own, lower aggregator.byzantine_fraction, or give {more}."
                )
