"""Stand-ins for photographs of things: drawn shapes with textures, in random colours, places, sizes and positions."""

from collections.abc import Callable
from math import isqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from dfl_lightning.seeding import generator

FAITH = 0.6  # how near a thing's colour is to the usual colour of its class
NOISE = 0.08  # standard deviation, where white is 1
DRAWN_AT_ONCE = 128

# Above 0 inside the shape, at points (x, y) of its own coordinates, in which it fills about [-1, 1].
OUTLINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": lambda x, y: 0.9 - torch.hypot(x, y),
    "square": lambda x, y: 0.8 - torch.maximum(x.abs(), y.abs()),
    "triangle": lambda x, y: torch.minimum(0.6 - y, 0.5 * (y + 1.1) - 0.9 * x.abs()),
    "star": lambda x, y: 0.7 + 0.3 * torch.cos(5 * torch.atan2(y, x)) - torch.hypot(x, y),
    "ring": lambda x, y: 0.25 - (torch.hypot(x, y) - 0.7).abs(),
    "cross": lambda x, y: torch.minimum(0.9 - torch.maximum(x.abs(), y.abs()), 0.35 - torch.minimum(x.abs(), y.abs())),
    "crescent": lambda x, y: torch.minimum(0.95 - torch.hypot(x, y), torch.hypot(x - 0.5, y) - 0.7),
    "bar": lambda x, y: torch.minimum(0.95 - x.abs(), 0.4 - y.abs()),
    "hourglass": lambda x, y: torch.minimum(0.9 - y.abs(), 0.15 + 0.8 * y.abs() - x.abs()),
    "rhomb": lambda x, y: 0.55 - 0.9 * x.abs() - 0.55 * y.abs(),
}

# From -1 to 1, at the same points.
TEXTURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "striped": lambda x, y: torch.sin(9 * x),
    "checked": lambda x, y: 2 * torch.sin(7 * x) * torch.sin(7 * y),
    "shaded": lambda x, y: 1.4 * y,
    "plain": lambda x, y: torch.ones_like(x),
    "ringed": lambda x, y: torch.sin(11 * torch.hypot(x, y)),
    "spoked": lambda x, y: 1.5 * torch.sin(6 * torch.atan2(y, x)),
    "wavy": lambda x, y: torch.sin(9 * y + 2 * torch.sin(5 * x)),
    "dotted": lambda x, y: 2 * (torch.cos(10 * x) + torch.cos(10 * y)) - 1.5,
    "netted": lambda x, y: 1.5 - 4 * torch.maximum(torch.cos(8 * x), torch.cos(8 * y)).clamp(min=0),
    "halved": lambda x, y: 6 * x,
}


def shape_names(num_classes: int) -> list[str]:
    """What each class shows: every texture on every outline, so that neither alone tells the class."""
    textures = max(count for count in range(1, isqrt(num_classes) + 1) if num_classes % count == 0)
    return [
        f"{texture} {outline}"
        for outline in list(OUTLINES)[: num_classes // textures]
        for texture in list(TEXTURES)[:textures]
    ]


def draw_shapes(num_classes: int, samples: int, size: int, *seed: object) -> tuple[Tensor, Tensor]:
    """Draws as many images of every class, shuffled.

    Returns:
        uint8 [samples, 3, size, size] and labels int64 [samples].
    """
    labels = torch.arange(samples).remainder(num_classes)[torch.randperm(samples, generator=generator(*seed, "labels"))]
    images = torch.empty(samples, 3, size, size, dtype=torch.uint8)
    for label, name in enumerate(shape_names(num_classes)):
        texture, outline = name.split()
        random = generator(*seed, name)
        usual = torch.rand(3, 1, 1, generator=generator("colour", name))  # the same in training and testing
        for rows in (labels == label).nonzero().squeeze(1).split(DRAWN_AT_ONCE):
            images[rows] = _draw(OUTLINES[outline], TEXTURES[texture], usual, len(rows), size, random)
    return images, labels


def _draw(
    outline: Callable[[Tensor, Tensor], Tensor],
    texture: Callable[[Tensor, Tensor], Tensor],
    usual: Tensor,
    count: int,
    size: int,
    random: torch.Generator,
) -> Tensor:
    """Images of one class, uint8 [count, 3, size, size]."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=random)

    radius = uniform(0.5, 0.9, 1, 1)
    x, y = _own_coordinates(size, uniform(-0.2, 0.2, 2, 1, 1), radius, uniform(-0.5, 0.5, 1, 1))
    inside = (outline(x, y) * radius * size / 2 + 0.5).clamp(0, 1).unsqueeze(1)  # [count, 1, size, size], soft edges
    mix = texture(x, y).clamp(-1, 1).mul(0.5).add(0.5).unsqueeze(1)
    tint = torch.lerp(uniform(0, 1, 3, 1, 1), usual, FAITH)
    contrast = uniform(0.25, 0.6, 3, 1, 1)
    lighter, darker = tint + contrast / 2, tint - contrast / 2
    thing = darker + (lighter - darker) * mix
    image = torch.lerp(_backdrop(count, size, random), thing, inside)
    light = uniform(0.7, 1.2, 1, 1, 1)
    image = image * light + NOISE * torch.randn(image.shape, generator=random)
    return image.clamp(0, 1).mul(255).round().to(torch.uint8)


def _own_coordinates(size: int, centre: Tensor, radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Where each pixel lies in the coordinates of a shape that is moved, scaled and turned, twice [n, size, size]."""
    ticks = (torch.arange(size) + 0.5) * (2 / size) - 1
    x = (ticks - centre[:, 0]) / radius  # [n, 1, size]
    y = (ticks[:, None] - centre[:, 1]) / radius  # [n, size, 1]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def _backdrop(count: int, size: int, random: torch.Generator) -> Tensor:
    """Coloured clouds, [count, 3, size, size]."""
    clouds = torch.rand(count, 3, 1, 1, generator=random) + 0.15 * torch.randn(count, 3, 4, 4, generator=random)
    return F.interpolate(clouds, size=(size, size), mode="bicubic", align_corners=True)
