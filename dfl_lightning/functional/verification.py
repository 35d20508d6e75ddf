"""What one node does with fetched models: are they the ones whose sketches it was sent?"""

from typing import Literal

import torch
from torch import Tensor

from dfl_lightning.functional.sketch import CountSketch

Verification = Literal["each", "batched", "none"]
TOLERANCE = 1e-5  # a recomputed sketch may differ so much, relative to the announced one, by rounding alone


def verify(
    sketch: CountSketch, models: Tensor, announced: Tensor, how: Verification, generator: torch.Generator | None = None
) -> Tensor:
    """Which fetched models match the sketches that were announced for them (SketchGuard, Alg. 1).

    ``batched`` uses that sketches are linear: one sketch of a random combination of all models must be the same
    combination of the announced sketches; only if it is not, every model is sketched to name those that are off. The
    coefficients must be drawn once the models have come, so that no sender can aim at them.

    Args:
        sketch: the hash that all nodes share.
        models: [m, d].
        announced: sketches [m, k].
        how: ``each``, ``batched`` or ``none``.
        generator: draws the coefficients.

    Returns:
        bool [m].

    >>> sketch = CountSketch(dim=5, size=3)
    >>> models = torch.eye(5)[:2]
    >>> verify(sketch, models, sketch(models) + torch.tensor([[0.0], [0.1]]), "batched")
    tensor([ True, False])
    """
    if how == "none" or not len(models):
        return torch.ones(len(models), dtype=torch.bool)
    norms = torch.linalg.vector_norm(announced.double(), dim=1)
    if how == "batched":
        draw = torch.randn(len(models), generator=generator, dtype=torch.float64).to(models.device)
        draw = draw / norms.where(norms > 0, 1)  # so that a huge model cannot hide what is wrong with another
        difference = sketch((draw.to(models.dtype) @ models)[None])[0].double() - draw @ announced.double()
        if torch.linalg.vector_norm(difference) <= TOLERANCE * (draw * norms).square().sum().sqrt():
            return torch.ones(len(models), dtype=torch.bool)
    errors = torch.linalg.vector_norm(sketch(models).double() - announced.double(), dim=1)
    return errors <= TOLERANCE * norms  # NaN is off
