"""Count Sketch: a model of d parameters in k numbers, such that distances survive."""

from typing import Self

import torch
from torch import Tensor


class CountSketch:
    """One hash and one sign function over d coordinates, shared by all nodes (SketchGuard, eq. 4).

    ``CS(w)[b]`` is the sum over the coordinates l with h(l) = b of s(l) w_l. It is linear, and the squared distance of
    two sketches is an unbiased estimate of the squared distance of the vectors.

    Bucket and sign of a coordinate are kept as one number in [0, 2k): below k the sign is +1, else -1. One table of
    int32, and no product with the signs.

    Args:
        dim: d, the number of coordinates.
        size: k, the number of buckets.
        seed: of the hash; everyone who uses the same gets comparable sketches. Drawn on the CPU, so that all devices
            agree.
    """

    def __init__(self, dim: int, size: int, seed: int = 42) -> None:
        self.size = size
        self.slots = torch.randint(2 * size, (dim,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))

    @classmethod
    def from_tables(cls, buckets: Tensor, signs: Tensor, size: int) -> Self:
        """The sketch of a given hash (long [d], values below ``size``) and given signs ([d], +1 or -1)."""
        sketch = cls(0, size)
        sketch.slots = (buckets + size * (signs < 0)).int()
        return sketch

    def to(self, device: torch.device) -> Self:
        """Moves the table, in place."""
        self.slots = self.slots.to(device)
        return self

    def __call__(self, rows: Tensor, columns: slice = slice(None)) -> Tensor:
        """Sketches rows [m, c], which hold the given columns of the vectors. Returns [m, k], to be summed over blocks.

        >>> sketch = CountSketch.from_tables(torch.tensor([0, 1, 0]), torch.tensor([1, 1, -1]), 2)
        >>> sketch(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[-2.,  2.]])
        """
        slots = self.slots[columns].long().expand(len(rows), -1)
        sums = rows.new_zeros(len(rows), 2 * self.size).scatter_add_(1, slots, rows)
        return sums[:, : self.size] - sums[:, self.size :]

    def counts(self) -> Tensor:
        """How many coordinates each bucket holds, [k]; the diagonal of S S', where S is the sketch as a matrix."""
        return (self.slots % self.size).bincount(minlength=self.size)

    def spread(self, sketches: Tensor, columns: slice = slice(None)) -> Tensor:
        """The transposed sketch: every coordinate gets its bucket's number with its sign; [m, k] -> [m, c].

        >>> CountSketch.from_tables(torch.tensor([0, 1, 0]), torch.tensor([1, 1, -1]), 2).spread(torch.tensor([[5, 7]]))
        tensor([[ 5,  7, -5]])
        """
        slots = self.slots[columns].long()
        return torch.cat([sketches, -sketches], 1)[:, slots]
