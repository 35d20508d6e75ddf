"""A model whose sketch is that of another one."""

from typing import Any

from torch import Tensor

from dfl_lightning.errors import UserError, finite
from dfl_lightning.functional.sketch import CountSketch
from dfl_lightning.phases import Attack
from dfl_lightning.round import Block, Round


class NullSpace(Attack):
    """Sends a model near ``factor`` times its own whose sketch is that of its own honest model.

    With the sketch matrix S, S S' is diagonal: it holds the sizes of the buckets. So of the wish v = m - w the attacker
    takes away S' (S S')^-1 S v and adds the rest to w: all but k of its d dimensions. Neither screening nor the
    verification of sketches can see it. Knows the hash, which is public unless ``commit_reveal`` derives it from
    digests; knows nothing about the others.

    Args:
        factor: the wish m, as a multiple of the own model.
        sketch_size: k of the hash to aim at, if the aggregator has none of its own.
        hash_seed: of that hash.
    """

    def __init__(self, factor: float = -5.0, sketch_size: int = 1000, hash_seed: int = 42, **options: Any) -> None:
        super().__init__(**options)
        finite("attack.factor", factor)
        if not sketch_size >= 1:
            raise UserError(f"attack.sketch_size is {sketch_size}, but a sketch has at least 1 number.")
        self.factor, self.sketch_size, self.hash_seed = factor, sketch_size, hash_seed
        self._guess: CountSketch | None = None

    def _hash(self, round: Round) -> CountSketch:
        public = round.aggregator.public_sketch(round.num_parameters) if round.aggregator is not None else None
        if public is not None:
            return public.to(round.device)
        if self._guess is None or len(self._guess.slots) != round.num_parameters:
            size = min(self.sketch_size, round.num_parameters)
            self._guess = CountSketch(round.num_parameters, size, self.hash_seed)
        return self._guess.to(round.device)

    def attack(self, round: Round) -> None:
        sketch = self._hash(round)

        def wish(block: Block) -> Tensor:
            return (self.factor - 1) * block.own[round.byzantine]

        sketched = round.reduce(lambda block: sketch(wish(block).double(), block.columns))
        projected = sketched.to(round.device) / sketch.counts().clamp(min=1)

        def hidden(block: Block) -> Tensor:
            seen = sketch.spread(projected, block.columns).to(block.own)
            return block.own[round.byzantine] + wish(block) - seen

        round.forge(round.byzantine, hidden)
