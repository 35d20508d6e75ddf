"""SketchGuard: screen by sketches, fetch whole models only from those accepted, and check what was fetched."""

from typing import Literal

import torch
from torch import Tensor

from callbacks.aggregators.threshold import ThresholdRule
from dfl_lightning.errors import UserError
from dfl_lightning.functional.sketch import CountSketch
from dfl_lightning.functional.weights import own_and_mean
from dfl_lightning.round import Round

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
        fallback: Literal["nearest", "own"] = "nearest",
        verification: Literal["each", "batched", "none"] = "each",
        hash_seed: int = 42,
    ) -> None:
        super().__init__(gamma, kappa, alpha, fallback)
        if sketch_size < 1:
            raise UserError(f"aggregator.sketch_size is {sketch_size}, but a sketch has at least 1 number.")
        self.sketch_size, self.verification, self.hash_seed = sketch_size, verification, hash_seed
        self.sketch: CountSketch | None = None

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
        own, announced = sketches[: round.num_nodes], sketches[round.announced]
        # Screening knows sketches alone: a broken model behind a sane sketch is found after the fetch.
        distances = torch.linalg.vector_norm(own[:, None] - announced, dim=2)
        fetched = self.screen(round, distances, torch.linalg.vector_norm(own, dim=1), round.links)
        round.count("sketches", round.links, self.sketch_size)
        round.count("models", fetched, round.num_parameters)
        verified = fetched & self.verify(round, sketches[round.sent] - announced, announced, fetched)
        accepted = verified & round.candidates
        self._report(round, fetched & ~verified)
        round.mix_(own_and_mean(accepted, self.alpha))
        return accepted

    def verify(self, round: Round, error: Tensor, announced: Tensor, fetched: Tensor) -> Tensor:
        """Which messages pass the verification, bool [N, N].

        Args:
            round: the round.
            error: [N, N, k], recomputed minus announced sketches.
            announced: [N, N, k].
            fetched: bool [N, N].
        """
        length = torch.linalg.vector_norm(announced, dim=2)
        each = torch.linalg.vector_norm(error, dim=2) <= TOLERANCE * length  # NaN: False
        if self.verification == "each":
            return each
        if self.verification == "none":
            return torch.ones_like(fetched)
        # Sketches are linear: the sketch of sum_j r_j w_j, which a node would compute once, minus sum_j r_j s_j is
        # sum_j r_j of the errors. The coefficients are drawn after the models have come.
        draw = torch.randn(fetched.shape, generator=round.generator("verification"), dtype=torch.float64) * fetched
        combined = (draw[:, :, None] * error).masked_fill(~fetched[:, :, None], 0).sum(1)
        allowed = TOLERANCE * (draw.abs() * length.masked_fill(~fetched, 0)).square().sum(1).sqrt()
        clean = torch.linalg.vector_norm(combined, dim=1) <= allowed
        return each | clean[:, None]

    def _report(self, round: Round, dropped: Tensor) -> None:
        round.metrics["screening/verification_failed"] = float(dropped.sum())
        for sender in dropped.any(0).nonzero()[:, 0].tolist():
            receivers = dropped[:, sender].nonzero()[:, 0].tolist()
            round.notes.append(
                f"Node {sender} sent a model that does not match its sketch; dropped by nodes {receivers}."
            )
