"""WFAgg: three filters, of which a model must pass two."""

from typing import Any, Literal

import torch
from torch import Tensor

from dfl_lightning.declared import DeclaredRule
from dfl_lightning.distance_rule import DistanceRule, View
from dfl_lightning.errors import UserError, one_of
from dfl_lightning.functional.coordinatewise import median
from dfl_lightning.functional.selection import ranks
from dfl_lightning.functional.sketch import CountSketch
from dfl_lightning.round import Round, equal_receivers

History = Literal["sketch", "exact"]
DISTANCE, COSINE, CHANGE = 0.4, 0.4, 0.2  # what passing each filter weighs


class WFAgg(DeclaredRule, DistanceRule):
    """Weights neighbours by three filters: distance, direction, and change over time. EXPERIMENTAL.

    After Cajaraville-Aboy et al. 2024 (arXiv 2409.17754), whose text was not at hand: the filters are as summaries
    describe them, their constants are this project's own, and no independent code was compared with.

    Distance and direction: the |N_i| - f - 1 models nearest to the coordinate-wise median of the neighbours' models,
    and those with the smallest angle to it. Change: squared length and direction of a sender's step since it was last
    heard lie within ``width`` deviations of their moving averages; before ``window`` steps everybody passes. Who passes
    two filters counts with the sum of their weights (0.4, 0.4, 0.2), and the weighted mean is mixed with the own model.

    With ``sketch_size``, medians, distances and angles are those of sketches.

    Args:
        alpha: weight of the own model.
        window: changes of a sender until this filter works, at least 2; also the length of its moving averages.
        width: how many deviations from its average a change may be.
        history: what is kept of the last message of each sender: a ``sketch``, or the ``exact`` model.
        history_size: k of these sketches, where whole models are compared.
    """

    needs = "n >= f + 3"

    def __init__(
        self,
        alpha: float = 0.5,
        window: int = 3,
        width: float = 2.0,
        history: History = "sketch",
        history_size: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of("aggregator.history", history, History)
        if not 0 <= alpha <= 1:
            raise UserError(f"aggregator.alpha is {alpha}, but it is the own model's weight, from 0 to 1.")
        if window < 2 or not width > 0 or history_size < 1:
            raise UserError(
                f"aggregator.window is {window}, width {width} and history_size {history_size}, but they must be at "
                "least 2, above 0 and at least 1."
            )
        if self.sketch_size is not None and (history == "exact" or self.commit_reveal):
            raise UserError(
                "aggregator.sketch_size is set, but nodes then know sketches alone, which aggregator.history=exact and "
                "a hash that commit_reveal changes every round do not fit; leave these two out."
            )
        self.alpha, self.window, self.width = alpha, window, width
        self.history, self.history_size = history, history_size
        self._own_sketch: CountSketch | None = None
        self.forget()

    def capacity(self, models: Tensor) -> Tensor:
        return models - 3

    # What is remembered of senders

    def forget(self) -> None:
        """Starts without a history."""
        self._memory: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.forget()  # a checkpoint is loaded after this

    def state_dict(self) -> dict[str, Any]:
        return dict(self._memory)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._memory = {name: value.clone() for name, value in state_dict.items()}

    # The filters

    def screen(self, round: Round, view: View) -> Tensor:
        candidates = view.candidates
        byzantine, usable = self.declared(round, candidates)
        candidates = candidates & usable[:, None]
        keep = (candidates.sum(1) - byzantine - 1)[:, None]
        distance, angle = self._to_median(view, candidates)
        near, aligned = _ranked(distance, candidates) < keep, _ranked(angle, candidates) < keep
        steady = self._steady(round, view, candidates)
        votes = DISTANCE * near.double() + COSINE * aligned.double() + CHANGE * steady.double()
        passed = near.long() + aligned.long() + steady.long()
        self._votes = votes.where((passed >= 2) & candidates, 0.0)
        return self._votes > 0

    def weights(self, round: Round, view: View, accepted: Tensor) -> Tensor:
        votes = self._votes.where(accepted, 0.0)
        total = votes.sum(1, keepdim=True)
        others = (1 - self.alpha) * votes / total.where(total > 0, 1.0)
        return others + (1 - others.sum(1)).diag()

    def _to_median(self, view: View, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distance and 1 - cosine of each message to the median of the receiver's messages, each [N, N]."""
        sets = list(equal_receivers(view.rows, candidates))
        if not sets:
            return torch.zeros(candidates.shape), torch.zeros(candidates.shape)

        def compare(vectors: Tensor) -> Tensor:  # [sets, rows, 4]
            found = vectors.new_zeros(len(sets), len(vectors), 4, dtype=torch.float64)
            for one, (rows, _) in zip(found, sets):
                some = vectors[rows].double()
                middle = median(some)
                one[rows, 0] = (some - middle).square().sum(1)
                one[rows, 1] = some @ middle
                one[rows, 2] = some.square().sum(1)
                one[rows, 3] = middle.square().sum()
            return found

        found = view.reduce(compare)
        pairs = torch.zeros(*candidates.shape, 4, dtype=torch.float64)
        for one, (_, receivers) in zip(found, sets):
            pairs[receivers] = one[view.rows[receivers]]
        distance, dot, own, middle = pairs.unbind(2)
        return distance, 1 - dot / (own * middle).sqrt().clamp(min=torch.finfo(torch.float64).tiny)

    def _steady(self, round: Round, view: View, candidates: Tensor) -> Tensor:
        """Whose change since it was last heard is as usual, bool [N, N]; remembers this round's messages."""
        pool, compare = self._current(round, view)
        last = self._memory.get("last", torch.full(candidates.shape, -1))
        usual = self._memory.get("usual", torch.zeros(*candidates.shape, 2, 2, dtype=torch.float64))
        heard = self._memory.get("heard", torch.zeros(candidates.shape, dtype=torch.long))
        steady = candidates.clone()
        known = candidates & (last >= 0)
        if known.any():
            squared, cosine = compare(self._memory["pool"])
            change = torch.stack([squared[last, view.rows], cosine[last, view.rows]], 2)
            mean, variance = usual.unbind(3)
            inside = ((change - mean).abs() <= self.width * variance.sqrt()).all(2)
            steady &= inside | ~known | (heard < self.window)
            rate = torch.where(heard == 0, 1.0, 2 / (self.window + 1))[:, :, None]
            moved = change - mean
            updated = torch.stack([mean + rate * moved, (1 - rate) * (variance + rate * moved.square())], 3)
            usual = usual.where(~known[:, :, None, None], updated)
            heard = heard + known
        old = self._memory.get("pool", pool[:0])
        last = torch.where(candidates, view.rows + len(old), last)
        kept, numbers = last[last >= 0].unique(return_inverse=True)
        last[last >= 0] = numbers
        self._memory = {"pool": torch.cat([old, pool])[kept], "last": last, "usual": usual, "heard": heard}
        return steady

    def _current(self, round: Round, view: View) -> tuple[Tensor, Any]:
        """This round's messages as they are remembered, [N + F, k or d], and a function that compares others with them.

        The function takes remembered messages [P, k or d] and gives squared distances and cosines, each [P, N + F].
        """
        vectors = view.vectors
        if vectors is None and self.history == "exact":
            rows = torch.empty(round.num_nodes + round.num_forged, round.num_parameters)

            def keep(block: Any) -> Tensor:
                rows[:, block.columns] = block.rows.to(rows)
                return torch.zeros(1)

            round.reduce(keep)
            vectors = rows
        elif vectors is None:
            if self._own_sketch is None or len(self._own_sketch.slots) != round.num_parameters:
                size = min(self.history_size, round.num_parameters)
                self._own_sketch = CountSketch(round.num_parameters, size, self.hash_seed)
            sketch = self._own_sketch.to(round.device)
            vectors = round.reduce(lambda block: sketch(block.rows, block.columns)).cpu()

        def compare(pool: Tensor) -> tuple[Tensor, Tensor]:
            distances = torch.cdist(pool, vectors, compute_mode="donot_use_mm_for_euclid_dist").double()
            lengths = torch.linalg.vector_norm(pool, dim=1)[:, None] * torch.linalg.vector_norm(vectors, dim=1)
            cosines = (pool @ vectors.T) / lengths.clamp(min=torch.finfo(torch.float32).tiny)
            return distances.square(), cosines.double()

        return vectors, compare


def _ranked(values: Tensor, members: Tensor) -> Tensor:
    return ranks(values.masked_fill(~members, torch.inf)).masked_fill(~members, len(values))
