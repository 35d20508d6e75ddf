"""Stand-ins for FEMNIST: characters drawn from fonts that matplotlib ships, with a style per writer."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from datamodules.dealing import UserData, UserSplit, hold_out
from dfl_lightning.errors import UserError
from dfl_lightning.seeding import derive_seed, generator

# Fonts with all digits and letters, each with the range of pixels that pens add to its strokes at glyph size.
FONTS = {
    "DejaVuSans.ttf": (0, 1),
    "DejaVuSans-Oblique.ttf": (0, 1),
    "DejaVuSans-Bold.ttf": (0, 0),
    "DejaVuSansMono.ttf": (0, 1),
    "DejaVuSansMono-Oblique.ttf": (0, 1),
    "DejaVuSerif.ttf": (0, 0),
    "DejaVuSerif-Italic.ttf": (0, 0),
    "STIXGeneral.ttf": (0, 1),
    "STIXGeneralItalic.ttf": (0, 1),
    "cmr10.ttf": (0, 1),
    "cmss10.ttf": (0, 2),
    "cmti10.ttf": (0, 2),
    "cmtt10.ttf": (0, 1),
}
CANVAS = 96  # a glyph is drawn large, capitals CAPITAL pixels high, and scaled down with the sample's deformation
CAPITAL = 40
SIZE = 28
DRAWN = 2 * SIZE  # drawn larger and averaged, which smooths the edges
DIGIT_SHARE = 0.6  # people wrote more digits than letters


@dataclass
class Style:
    """How one writer writes; lengths are in pixels of the 28x28 image, angles in radians."""

    font: str
    pen: int  # pixels added to strokes at glyph size
    height: float  # of a capital
    width: float  # relative to the font's
    slant: float
    rotation: float
    offset: tuple[float, float]
    darkness: float
    unsteadiness: float  # how much two samples of the same character differ


def render_characters(num_users: int, samples: int, class_names: list[str], seed: int) -> UserData:
    """Draws ``num_users`` writers with ``samples`` images each on average, uint8 [total, 1, 28, 28], white paper."""
    images, labels, rows = [], [], {}
    total = 0
    for k in range(num_users):
        drawn, named = _write(class_names, samples, derive_seed(seed, "writer", k))
        images.append(drawn)
        labels.append(named)
        rows[f"writer_{k:04d}"] = np.arange(total, total + len(named), dtype=np.int64)
        total += len(named)
    return hold_out(UserSplit(np.concatenate(images), np.concatenate(labels), rows), seed)


def _write(class_names: list[str], samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    style = _style(random)
    labels = _labels(class_names, round(samples * random.uniform(0.6, 1.4)), random)
    glyphs = _glyphs(style, class_names)
    # Every writer bends each character in a way of their own, and every sample a little more.
    noise = generator(seed, "bends")
    habit = 0.05 * torch.randn(len(class_names), 2, 5, 5, generator=noise)
    bends = habit[labels] + style.unsteadiness * torch.randn(len(labels), 2, 5, 5, generator=noise)
    bends = F.interpolate(bends, size=(DRAWN, DRAWN), mode="bicubic", align_corners=True)
    grid = _grid(_transforms(style, len(labels), random)) + bends.permute(0, 2, 3, 1)
    ink = F.grid_sample(glyphs[labels], grid, align_corners=False)
    ink = F.avg_pool2d(ink, DRAWN // SIZE).mul(style.darkness).clamp(0, 1)  # [n, 1, 28, 28], 1 = ink
    return (255 * (1 - ink)).round().to(torch.uint8).numpy(), labels.numpy()


def _style(random: np.random.Generator) -> Style:
    font = str(random.choice(list(FONTS)))
    least, most = FONTS[font]
    return Style(
        font=font,
        pen=int(random.integers(least, most + 1)),
        height=random.uniform(8, 12),
        width=random.uniform(0.8, 1.2),
        slant=random.normal(0.1, 0.17),
        rotation=random.normal(0, 0.08),
        offset=(random.normal(0, 0.5), random.normal(0, 0.5)),
        darkness=random.uniform(1.1, 1.6),
        unsteadiness=random.uniform(0.02, 0.05),
    )


def _labels(class_names: list[str], count: int, random: np.random.Generator) -> Tensor:
    is_digit = np.array([name.isdigit() for name in class_names])
    share = np.where(is_digit, DIGIT_SHARE / is_digit.sum(), (1 - DIGIT_SHARE) / (~is_digit).sum())
    share *= random.gamma(3.0, size=len(share))
    return torch.from_numpy(random.choice(len(share), size=count, p=share / share.sum()))


def _transforms(style: Style, count: int, random: np.random.Generator) -> Tensor:
    """For each sample the map from the image's coordinates to the glyph's, float32 [count, 2, 3]."""
    height = style.height * random.normal(1, 0.07, count).clip(0.8, 1.2)
    width = height * style.width * random.normal(1, 0.05, count).clip(0.8, 1.2)
    slant = style.slant + random.normal(0, 0.05, count)
    angle = style.rotation + random.normal(0, 0.06, count)
    # Glyph pixels per image pixel, in coordinates that run from -1 to 1 over either canvas.
    scale_x, scale_y = (SIZE * CAPITAL / CANVAS / length for length in (width, height))
    turn = np.stack([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])  # [2, 2, count]
    shear = np.stack([[scale_x, slant * scale_x], [np.zeros(count), scale_y]])
    matrix = np.einsum("ijn,jkn->nik", shear, turn)
    shift = np.array(style.offset) + random.normal(0, 0.6, (count, 2))
    offset = np.einsum("nij,nj->ni", matrix, -2 * shift / SIZE)
    return torch.from_numpy(np.concatenate([matrix, offset[:, :, None]], axis=2)).float()


def _grid(transforms: Tensor) -> Tensor:
    """Where each drawn pixel lies on the glyph, [count, DRAWN, DRAWN, 2].

    F.affine_grid does the same, but multiplies so many tall and thin matrices that it takes seconds.
    """
    ticks = (torch.arange(DRAWN) + 0.5) * (2 / DRAWN) - 1
    y, x = torch.meshgrid(ticks, ticks, indexing="ij")
    matrix = transforms[:, None, None]  # [count, 1, 1, 2, 3]
    return matrix[..., 0] * x[..., None] + matrix[..., 1] * y[..., None] + matrix[..., 2]


def _glyphs(style: Style, class_names: list[str]) -> Tensor:
    """The writer's characters, each centred on its own, float32 [classes, 1, CANVAS, CANVAS], 1 = ink."""
    from PIL import Image, ImageDraw, ImageFont

    path = _font_folder() / style.font
    try:
        trial = ImageFont.truetype(path, 100)
        _, top, _, bottom = trial.getbbox("H")
        font = ImageFont.truetype(path, 100 * CAPITAL / (bottom - top))
    except OSError as error:
        raise UserError(
            f"The font {path} cannot be read, but characters are drawn with it; install matplotlib anew."
        ) from error
    glyphs = []
    for name in class_names:
        picture = Image.new("L", (CANVAS, CANVAS), 0)
        left, top, right, bottom = font.getbbox(name, stroke_width=style.pen)
        corner = ((CANVAS - left - right) / 2, (CANVAS - top - bottom) / 2)
        ImageDraw.Draw(picture).text(corner, name, fill=255, font=font, stroke_width=style.pen)
        glyphs.append(torch.from_numpy(np.array(picture)))
    return torch.stack(glyphs).unsqueeze(1).float() / 255


def _font_folder() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"
