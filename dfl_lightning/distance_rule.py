"""Rules that need distances only, on whole models or on sketches of them: screening, fetch, checks, mixing."""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dfl_lightning.errors import UserError, one_of
from dfl_lightning.functional.sketch import CountSketch
from dfl_lightning.functional.verification import TOLERANCE, Verification
from dfl_lightning.phases import Aggregator
from dfl_lightning.round import Block, Round

DIGEST_BYTES = 32
MEASURED_PAIRS = 32  # fetched models whose true distance is computed, to report the sketches' error
CUBE = 2**22  # numbers in the distances of the neighbourhoods that are looked at together


class View:
    """What the nodes know of their neighbours' models before they choose: the models, or sketches of them.

    Args:
        round: the round.
        sketch: the hash; None if nodes see whole models.

    Attributes:
        rows: long [N, N], receiver by sender, the row that a sender's message shows; the own row on the diagonal.
        vectors: sketches [N + F, k] of all rows, float64; None if nodes see whole models.
        candidates: bool [N, N], whose message can be compared; its diagonal is False.
    """

    def __init__(self, round: Round, sketch: CountSketch | None = None) -> None:
        self.round, self.sketch = round, sketch
        self.vectors: Tensor | None = None
        self.rows = round.sent if sketch is None else round.announced
        if sketch is not None:
            self.vectors = round.reduce(
                lambda block: torch.cat([sketch(block.own, block.columns), sketch(block.forged, block.columns)])
            ).cpu()
            # A broken model behind a sane sketch is found after the fetch.
            self.candidates = round.links & self.vectors.isfinite().all(1)[self.rows]
        else:
            self.candidates = round.candidates

    def reduce(self, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum of fn(vectors [N + F, c]) over blocks of columns: of the models, or of their sketches."""
        if self.vectors is not None:
            return fn(self.vectors)
        return self.round.reduce(lambda block: fn(block.rows)).cpu()

    @cached_property
    def _squared_and_norms(self) -> tuple[Tensor, Tensor]:
        if self.vectors is None:
            return self.round.distances()
        return self._between_sketches(self.vectors).square(), self.vectors.square().sum(1)

    def _between_sketches(self, some: Tensor) -> Tensor:
        """Distances of some sketches to all; not by a matrix product, which cancels where models are close."""
        assert self.vectors is not None
        distances = torch.cdist(some, self.vectors, compute_mode="donot_use_mm_for_euclid_dist")
        return distances.nan_to_num(torch.inf, torch.inf)

    @property
    def squared(self) -> Tensor:
        """Squared distances [N + F, N + F] of all rows, float64, infinite where there is nothing to compare."""
        return self._squared_and_norms[0]

    @property
    def norms(self) -> Tensor:
        """Squared norms [N + F] of all rows, float64."""
        return self._squared_and_norms[1]

    @cached_property
    def to_messages(self) -> Tensor:
        """Distances [N, N] of each receiver's own model to the messages it gets."""
        n = self.round.num_nodes
        if self.vectors is None:
            return self.squared[:n].gather(1, self.rows).sqrt()
        return self._between_sketches(self.vectors[:n]).gather(1, self.rows)

    @cached_property
    def updates(self) -> Tensor:
        """How far each node's own model has moved in this round, [N]; needs ``needs_start``."""
        if self.sketch is None:
            return self.round.reduce(lambda block: _update(block).square().sum(1, dtype=torch.float64)).sqrt().cpu()
        sketch = self.sketch
        moved = self.round.reduce(lambda block: sketch(_update(block), block.columns))
        return torch.linalg.vector_norm(moved, dim=1).cpu()

    def neighbourhoods(self) -> Iterator[tuple[slice, Tensor]]:
        """Distances within each node's neighbourhood, some receivers at a time.

        Yields:
            Which receivers, and squared distances [N, N, receivers] of the messages that each of them gets.
        """
        n = self.round.num_nodes
        step = max(1, CUBE // n**2)
        for low in range(0, n, step):
            some = slice(low, min(low + step, n))
            rows = self.rows[some].T
            yield some, self.squared[rows[:, None], rows[None, :]]


def _update(block: Block) -> Tensor:
    assert block.start is not None
    return block.own - block.start


class DistanceRule(Aggregator):
    """Base of rules that choose by distances. A subclass writes :meth:`screen` and :meth:`weights`.

    With exact distances every node receives every neighbour's model. With sketches (``sketch_size``) it receives k
    numbers from each neighbour, chooses, fetches the chosen models, recomputes their sketches, drops those that are
    not what was announced, and mixes the rest: SketchGuard's order for any rule (SketchGuard, Alg. 1).

    Args:
        sketch_size: k, the numbers in a sketch; null for exact distances.
        epsilon: in place of ``sketch_size``: a squared distance may be off by this share of it ...
        delta: ... with at most this probability; k = ceil(2 / (epsilon^2 delta)).
        hash_seed: of the hash that all nodes share.
        verification: ``each``: one recomputed sketch per fetched model; ``batched``: one of a random combination of
            them all, and one by one only where that is off; ``none``.
        distance_check: also check the true distance of every fetched model, which costs no traffic.
        commit_reveal: publish a digest of every model first, and derive the round's hash from all digests, so that
            nobody can shape a model to the hash; who sends different digests to different neighbours is left out.
    """

    def __init__(
        self,
        sketch_size: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        hash_seed: int = 42,
        verification: Verification = "each",
        distance_check: bool = False,
        commit_reveal: bool = False,
    ) -> None:
        super().__init__()
        one_of("aggregator.verification", verification, Verification)
        if not 0 <= hash_seed < 2**63:
            raise UserError(f"aggregator.hash_seed is {hash_seed}, but a seed is from 0 to 2^63 - 1.")
        self.sketch_size = sketch_size if epsilon is delta is None else _size_for(sketch_size, epsilon, delta)
        if self.sketch_size is not None and not 1 <= self.sketch_size < 2**30:
            raise UserError(
                f"aggregator.sketch_size is {self.sketch_size}, but a sketch has from 1 to 2^30 - 1 numbers."
            )
        if self.sketch_size is None:
            for name, value in (("distance_check", distance_check), ("commit_reveal", commit_reveal)):
                if value:
                    raise UserError(
                        f"aggregator.{name} is true, but it protects sketches, and without aggregator.sketch_size "
                        "whole models are compared; set a sketch_size, or leave it out."
                    )
        self.epsilon, self.delta, self.hash_seed = epsilon, delta, hash_seed
        self.verification, self.distance_check, self.commit_reveal = verification, distance_check, commit_reveal
        self.sketch: CountSketch | None = None

    @abstractmethod
    def screen(self, round: Round, view: View) -> Tensor:
        """Whom each node takes, bool [N, N], among ``view.candidates``.

        The diagonal says whether the own model was chosen like another; rules that always mix it leave it False.
        """

    @abstractmethod
    def weights(self, round: Round, view: View, accepted: Tensor) -> Tensor:
        """The mixing matrix [N, N] for those that were accepted, bool [N, N] (the diagonal as ``screen`` left it)."""

    def judge(self, round: Round, view: View, accepted: Tensor) -> Tensor:
        """A last choice among the accepted models once they are there, bool [N, N]."""
        return accepted

    def within(self, round: Round, view: View, true: Tensor) -> Tensor:
        """Which true distances [N, N] agree with what was seen: for the distance check.

        A sketched squared distance has a relative standard deviation of sqrt(2 / k); five of them are allowed.
        """
        assert self.sketch_size is not None
        return true <= view.to_messages * (1 + 5 * math.sqrt(2 / self.sketch_size))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.sketch_size is not None and self.sketch_size > (dim := pl_module.replicas.num_parameters):
            raise UserError(
                f"aggregator.sketch_size is {self.sketch_size}, but the whole model has {dim} parameters; use fewer."
            )

    def public_sketch(self, dim: int) -> CountSketch | None:
        """The hash that everybody can compute beforehand; None if there are no sketches."""
        if self.sketch_size is None:
            return None
        if self.sketch is None or len(self.sketch.slots) != dim:
            self.sketch = CountSketch(dim, self.sketch_size, self.hash_seed)
        return self.sketch

    def aggregate(self, round: Round) -> Tensor:
        if self.sketch_size is None:
            view = View(round)
            accepted = self.screen(round, view)
            round.count("models", round.links, round.num_parameters)
        else:
            view, accepted = self._fetch(round)
        accepted = self.judge(round, view, accepted)
        round.mix_(self.weights(round, view, accepted))
        return accepted.clone().fill_diagonal_(False)

    # Sketches

    def _fetch(self, round: Round) -> tuple[View, Tensor]:
        """Screens by sketches, fetches, and drops what is not as announced."""
        committed, sketch = None, self.public_sketch(round.num_parameters)
        if self.commit_reveal:
            committed, sketch = self._commit(round)
        assert sketch is not None
        view = View(round, sketch.to(round.device))
        if committed is not None:
            view.candidates &= committed
        chosen = self.screen(round, view)
        own, fetched = chosen & torch.eye(len(chosen), dtype=torch.bool), chosen.clone().fill_diagonal_(False)
        round.count("sketches", round.links, sketch.size)
        round.count("models", fetched, round.num_parameters)
        kept = self._verify(round, view, fetched)
        self._report(round, fetched & ~kept, "verification_failed", "sent a model that does not match its sketch")
        kept &= round.candidates
        true, measured = self._true_distances(round, view, kept)
        if self.distance_check:
            near = kept & self.within(round, view, true)
            self._report(round, kept & ~near, "distance_check_failed", "is farther away than its sketch said")
            kept = near
        if measured.any():
            error = (view.to_messages[measured] - true[measured]).abs() / true[measured]
            round.metrics["screening/sketch_error"] = float(error.mean())
        return view, kept | own

    def _verify(self, round: Round, view: View, fetched: Tensor) -> Tensor:
        """Which of the fetched messages are what was announced, bool [N, N].

        Every row is sketched once, by one kernel: a message can only be off where it is not the row that was announced.
        """
        suspicious = fetched & (round.sent != round.announced)
        if self.commit_reveal:
            return fetched & ~suspicious  # the digests differ
        if self.verification == "none":
            return fetched
        assert view.vectors is not None
        receivers, senders = suspicious.nonzero(as_tuple=True)
        announced = round.announced[receivers, senders]
        norms = torch.linalg.vector_norm(view.vectors, dim=1)
        errors = view.vectors[round.sent[receivers, senders]] - view.vectors[announced]
        off = ~(torch.linalg.vector_norm(errors, dim=1) <= TOLERANCE * norms[announced])  # NaN is off
        if self.verification == "batched":
            off &= self._batch_is_off(round, errors, receivers, senders, norms, fetched)[receivers]
        verified = fetched.clone()
        verified[receivers[off], senders[off]] = False
        return verified

    def _batch_is_off(
        self, round: Round, errors: Tensor, receivers: Tensor, senders: Tensor, norms: Tensor, fetched: Tensor
    ) -> Tensor:
        """Whose one check of all fetched models fails, bool [N].

        A node draws coefficients r_j once the models have come, and compares the sketch of sum_j r_j w_j with sum_j r_j
        s_j. Sketches are linear, so the difference is the same sum of the single errors.
        """
        draw = torch.randn(fetched.shape, generator=round.generator("verification"), dtype=torch.float64) * fetched
        draw = draw / norms.where(norms > 0, 1)[round.announced]  # a huge model cannot hide what is wrong with another
        weighted = draw[receivers, senders, None] * errors
        difference = errors.new_zeros(round.num_nodes, errors.shape[1]).index_add_(0, receivers, weighted)
        scale = (draw * norms[round.announced]).masked_fill(~fetched, 0).square().sum(1).sqrt()
        return ~(torch.linalg.vector_norm(difference, dim=1) <= TOLERANCE * scale)

    def _true_distances(self, round: Round, view: View, kept: Tensor) -> tuple[Tensor, Tensor]:
        """True distances [N, N] to fetched messages, and for which of them they were computed, bool [N, N].

        All of them for the distance check; else a few of honest nodes, to know how well the sketches do.
        """
        if self.distance_check:
            squared, _ = round.distances()
            true = round.to_messages(squared)
            return true, kept & ~round.byzantine[:, None] & (true > 0)
        pairs = (kept & ~round.byzantine[:, None]).nonzero()
        pairs = pairs[torch.linspace(0, len(pairs) - 1, min(len(pairs), MEASURED_PAIRS)).long()]
        receivers, senders = pairs[:, 0], pairs[:, 1]
        true, measured = torch.zeros(kept.shape, dtype=torch.float64), torch.zeros_like(kept)
        if len(pairs):
            sent = round.sent[receivers, senders]
            honest = sent < round.num_nodes  # not by block.rows, which copies all of them

            def squares(block: Block) -> Tensor:
                messages = torch.empty_like(block.own[receivers])
                messages[honest] = block.own[sent[honest]]
                messages[~honest] = block.forged[sent[~honest] - round.num_nodes]
                return (block.own[receivers] - messages).square().sum(1, dtype=torch.float64)

            true[receivers, senders] = round.reduce(squares).sqrt().cpu()
            measured[receivers, senders] = true[receivers, senders] > 0
        return true, measured

    def _commit(self, round: Round) -> tuple[Tensor, CountSketch]:
        """The links of those who committed to one model, bool [N, N], and the hash that follows from all digests.

        Digests are flooded, so that every node learns all of them and sees who sent two. The simulation knows which
        row each message is; for the hash alone it takes a row's sum in place of its SHA-256.
        """
        links = round.links
        round.count("digests", links, DIGEST_BYTES * int(links.any(0).sum()) // round.itemsize)
        claimed = round.announced.masked_fill(~links, -1)
        highest = claimed.max(0).values
        equivocal = (links & (claimed != highest)).any(0)
        self._report(round, links & equivocal, "equivocators", "sent conflicting digests")
        sums = round.reduce(lambda block: block.rows.sum(1, dtype=torch.float64)).cpu()
        published = sums[highest[~equivocal & links.any(0)]].sort().values
        digest = hashlib.sha256(published.numpy().tobytes() + f"{self.hash_seed} {round.index}".encode()).digest()
        assert self.sketch_size is not None
        seed = int.from_bytes(digest[:7], "big")
        return links & ~equivocal, CountSketch(round.num_parameters, self.sketch_size, seed)

    @staticmethod
    def _report(round: Round, dropped: Tensor, key: str, what: str) -> None:
        round.metrics[f"screening/{key}"] = float(dropped.sum())
        for sender in dropped.any(0).nonzero()[:, 0].tolist():
            receivers = dropped[:, sender].nonzero()[:, 0].tolist()
            round.notes.append(f"Node {sender} {what}; dropped by nodes {receivers}.")


def _size_for(sketch_size: int | None, epsilon: float | None, delta: float | None) -> int:
    """k = ceil(2 / (epsilon^2 delta)), from the second moment of a Count Sketch's squared norm."""
    if sketch_size is not None or epsilon is None or delta is None:
        raise UserError(
            f"aggregator.sketch_size is {sketch_size}, epsilon {epsilon} and delta {delta}, but a sketch's size is "
            "given by sketch_size alone, or by epsilon and delta together."
        )
    if not (epsilon > 0 and 0 < delta < 1):
        raise UserError(
            f"aggregator.epsilon is {epsilon} and delta {delta}, but epsilon must be above 0 and delta between 0 and 1."
        )
    return math.ceil(2 / (epsilon**2 * delta))
