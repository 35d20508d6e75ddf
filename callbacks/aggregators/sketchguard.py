"""SketchGuard: screen by sketches, fetch whole models only from those accepted, and check what was fetched."""

from typing import Any, Literal

import torch
from torch import Tensor

from callbacks.aggregators.threshold import Fallback, ThresholdRule
from dfl_lightning.errors import UserError, one_of
from dfl_lightning.functional.sketch import CountSketch
from dfl_lightning.functional.weights import own_and_mean
from dfl_lightning.round import Round

Verification = Literal["each", "batched", "none"]
TOLERANCE = 1e-5  # a recomputed sketch may differ so much, relative to the announced one, by rounding alone


class SketchGuard(ThresholdRule):
    """BALANCE's threshold on Count Sketches of k numbers; only accepted models travel (SketchGuard, Alg. 1).

    Every node sends its sketch to its neighbours; a neighbour within gamma exp(-kappa t/T) times the norm of the own
    sketch is accepted; its model is fetched, its sketch recomputed, and it is dropped if that is not the one it had
    announced. The mean of the rest is mixed with the own model. A node receives k |N_i| + d |S_i| parameters.

    Args:
        sketch_size: k, the numbers in a sketch.
        gamma: width of the threshold at the first round, in norms of the own sketch.
        kappa: how fast it narrows; 0 keeps it.
        alpha: weight of the own model.
        fallback: who accepts nobody takes the ``nearest`` neighbour, or keeps its ``own`` model.
        verification: ``each``: one recomputed sketch per fetched model; ``batched``: one of a random combination of
            them all, and one by one only where that is off; ``none``.
        hash_seed: of the hash that all nodes share.
    """

    def __init__(
        self,
        sketch_size: int = 1000,
        gamma: float = 2.0,
        kappa: float = 1.0,
        alpha: float = 0.5,
        fallback: Fallback = "nearest",
        verification: Verification = "each",
        hash_seed: int = 42,
    ) -> None:
        super().__init__(gamma, kappa, alpha, fallback)
        one_of("aggregator.verification", verification, Verification)
        if not 1 <= sketch_size < 2**30:
            raise UserError(f"aggregator.sketch_size is {sketch_size}, but a sketch has from 1 to 2^30 - 1 numbers.")
        if not 0 <= hash_seed < 2**63:
            raise UserError(f"aggregator.hash_seed is {hash_seed}, but a seed is from 0 to 2^63 - 1.")
        self.sketch_size, self.verification, self.hash_seed = sketch_size, verification, hash_seed
        self.sketch: CountSketch | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.sketch_size > (dim := pl_module.replicas.num_parameters):
            raise UserError(
                f"aggregator.sketch_size is {self.sketch_size}, but the whole model has {dim} parameters; use fewer."
            )

    def _sketches(self, round: Round) -> Tensor:
        """Sketches [N + F, k] of all rows, float64."""
        dim = round.num_parameters
        if self.sketch is None or len(self.sketch.slots) != dim:
            self.sketch = CountSketch(dim, self.sketch_size, self.hash_seed)
        sketch = self.sketch.to(round.device)
        return round.reduce(
            lambda block: torch.cat([sketch(block.own, block.columns), sketch(block.forged, block.columns)])
        ).cpu()

    def aggregate(self, round: Round) -> Tensor:
        sketches = self._sketches(round)
        own, norms = sketches[: round.num_nodes], torch.linalg.vector_norm(sketches, dim=1)
        # Not by a matrix product, which cancels where models are close.
        distances = torch.cdist(own, sketches, compute_mode="donot_use_mm_for_euclid_dist").gather(1, round.announced)
        # Screening knows sketches alone: a broken model behind a sane sketch is found after the fetch.
        fetched = self.screen(round, distances, norms[: round.num_nodes], round.links)
        round.count("sketches", round.links, self.sketch_size)
        round.count("models", fetched, round.num_parameters)
        verified = self.verify(round, sketches, norms, fetched)
        accepted = verified & round.candidates
        self._report(round, fetched & ~verified)
        round.mix_(own_and_mean(accepted, self.alpha))
        return accepted

    def verify(self, round: Round, sketches: Tensor, norms: Tensor, fetched: Tensor) -> Tensor:
        """Which of the fetched messages pass the verification, bool [N, N].

        Every row is sketched once, by one kernel: a message can only be off where it is not the row that was announced.

        Args:
            round: the round.
            sketches: [N + F, k] of all rows.
            norms: [N + F] of the sketches.
            fetched: bool [N, N].
        """
        if self.verification == "none":
            return fetched
        receivers, senders = (fetched & (round.sent != round.announced)).nonzero(as_tuple=True)
        announced = round.announced[receivers, senders]
        errors = sketches[round.sent[receivers, senders]] - sketches[announced]
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
        weighted = draw[receivers, senders, None] * errors
        difference = errors.new_zeros(round.num_nodes, self.sketch_size).index_add_(0, receivers, weighted)
        scale = (draw * norms[round.announced]).masked_fill(~fetched, 0).square().sum(1).sqrt()
        return ~(torch.linalg.vector_norm(difference, dim=1) <= TOLERANCE * scale)

    def _report(self, round: Round, dropped: Tensor) -> None:
        round.metrics["screening/verification_failed"] = float(dropped.sum())
        for sender in dropped.any(0).nonzero()[:, 0].tolist():
            receivers = dropped[:, sender].nonzero()[:, 0].tolist()
            round.notes.append(
                f"Node {sender} sent a model that does not match its sketch; dropped by nodes {receivers}."
            )
