"""Stand-ins for CelebA: drawn faces, smiling or not, with a style per person."""

from dataclasses import dataclass

import numpy as np

from datamodules.dealing import UserData, UserSplit, hold_out
from dfl_lightning.seeding import derive_seed

SIZE = 84
SCALE = 2  # drawn larger and scaled down, which smooths the edges

Colour = tuple[int, int, int]


@dataclass
class Person:
    """How one person looks; lengths are relative to the picture's width."""

    skin: np.ndarray  # float [3], as the other colours
    hair: np.ndarray
    eyes: np.ndarray
    lips: np.ndarray
    shirt: np.ndarray
    backdrop: np.ndarray
    face: tuple[float, float]  # half width, half height
    hair_length: float  # how far down the hair falls at the sides
    fringe: float  # how far down it falls on the forehead
    eye_distance: float
    eye_size: float
    brow: float  # thickness
    nose: float  # length
    mouth_width: float
    cheerfulness: float  # how much of a smile the mouth shows at rest
    smiles: float  # the share of pictures with a smile
    glasses: bool


def render_faces(num_users: int, samples: int, seed: int) -> UserData:
    """Draws ``num_users`` people with ``samples`` pictures each on average, uint8 [total, 3, 84, 84]."""
    images, labels, rows = [], [], {}
    total = 0
    for k in range(num_users):
        random = np.random.default_rng(derive_seed(seed, "person", k))
        person = _person(random)
        smiling = random.random(round(samples * random.uniform(0.6, 1.4))) < person.smiles
        images.append(np.stack([_draw(person, bool(smile), random) for smile in smiling]))
        labels.append(smiling.astype(np.int64))
        rows[f"person_{k:04d}"] = np.arange(total, total + len(smiling), dtype=np.int64)
        total += len(smiling)
    return hold_out(UserSplit(np.concatenate(images), np.concatenate(labels), rows), seed)


def _person(random: np.random.Generator) -> Person:
    tone = random.uniform(0, 1)
    skin = np.array([246, 213, 190]) * (1 - tone) + np.array([112, 72, 50]) * tone + random.normal(0, 6, 3)
    hairs = np.array([[30, 24, 22], [70, 44, 28], [120, 78, 44], [205, 168, 104], [150, 60, 34], [150, 148, 145]])
    return Person(
        skin=skin,
        hair=hairs[random.integers(len(hairs))] * random.uniform(0.8, 1.2),
        eyes=np.array([[70, 46, 30], [64, 96, 140], [84, 112, 70]])[random.integers(3)] + random.normal(0, 10, 3),
        lips=skin * 0.4 + np.array([150, 35, 45]) * random.uniform(0.3, 0.45),
        shirt=random.uniform(20, 235) + random.normal(0, 30, 3),
        backdrop=random.uniform(50, 200) + random.normal(0, 25, 3),
        face=(random.uniform(0.21, 0.26), random.uniform(0.28, 0.33)),
        hair_length=random.choice([0.0, 0.1, 0.35, 0.45]) + random.uniform(-0.03, 0.03),
        fringe=random.uniform(0.04, 0.14),
        eye_distance=random.uniform(0.09, 0.115),
        eye_size=random.uniform(0.028, 0.038),
        brow=random.uniform(0.008, 0.02),
        nose=random.uniform(0.08, 0.13),
        mouth_width=random.uniform(0.085, 0.115),
        cheerfulness=random.normal(0, 0.14),
        smiles=random.beta(3, 3),
        glasses=random.random() < 0.15,
    )


class _Canvas:
    """Draws shapes given in coordinates of the head: x to the right, y down, 0 between the eyes and mouth."""

    def __init__(self, backdrop: np.ndarray, centre: tuple[float, float], zoom: float, tilt: float) -> None:
        from PIL import Image, ImageDraw

        self.picture = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), _colour(backdrop))
        self.pen = ImageDraw.Draw(self.picture)
        self.centre, self.zoom = np.array(centre), zoom
        self.turn = np.array([[np.cos(tilt), -np.sin(tilt)], [np.sin(tilt), np.cos(tilt)]])

    def shape(self, points: np.ndarray, colour: np.ndarray) -> None:
        self.pen.polygon(self._placed(points), fill=_colour(colour))

    def line(self, points: np.ndarray, colour: np.ndarray, thickness: float) -> None:
        width = max(1, round(thickness * self.zoom * SIZE * SCALE))
        self.pen.line(self._placed(points), fill=_colour(colour), width=width, joint="curve")

    def oval(self, x: float, y: float, half_width: float, half_height: float, colour: np.ndarray) -> None:
        self.shape(_arc(x, y, half_width, half_height, 0, 360), colour)

    def _placed(self, points: np.ndarray) -> list[tuple[float, float]]:
        placed = (points * self.zoom) @ self.turn.T + self.centre
        return [(x, y) for x, y in (placed * SIZE * SCALE).tolist()]


def _draw(person: Person, smiling: bool, random: np.random.Generator) -> np.ndarray:
    """One picture, uint8 [3, 84, 84]."""
    canvas = _Canvas(
        person.backdrop + random.normal(0, 12),
        centre=(0.5 + random.normal(0, 0.01), 0.5 + random.normal(0, 0.01)),  # CelebA's faces are aligned
        zoom=random.normal(1.25, 0.03),
        tilt=random.normal(0, 0.04),
    )
    _draw_head(canvas, person)
    _draw_eyes(canvas, person, smiling, gaze=random.normal(0, 0.008), opening=random.uniform(0.75, 1.1))
    _draw_mouth(canvas, person, smiling, random)
    pixels = np.asarray(canvas.picture.reduce(SCALE), dtype=np.float64)
    light = random.normal(1, 0.07) * (1 + random.normal(0, 0.08) * np.linspace(-1, 1, SIZE))  # from one side
    pixels = pixels * light[None, :, None] + random.normal(0, 5, pixels.shape)
    return pixels.clip(0, 255).astype(np.uint8).transpose(2, 0, 1)


def _draw_head(canvas: _Canvas, person: Person) -> None:
    width, height = person.face
    shade = person.skin * 0.85
    canvas.oval(0, -0.03, width * 1.18, height * 1.12, person.hair)
    if person.hair_length > 0.05:
        side = width * 1.18
        sides = [[-side, -0.05], [side, -0.05], [side * 1.05, person.hair_length], [-side * 1.05, person.hair_length]]
        canvas.shape(np.array(sides), person.hair)
    canvas.oval(0, 0.62, 0.42, 0.24, person.shirt)
    canvas.shape(np.array([[-0.1, 0.2], [0.1, 0.2], [0.12, 0.45], [-0.12, 0.45]]), shade)
    for side in (-1, 1):
        canvas.oval(side * width, 0.02, 0.035, 0.06, shade)
    canvas.oval(0, 0.03, width, height, person.skin)
    forehead = _arc(0, 0.03, width * 1.02, height * 1.02, 200, 340)
    forehead = np.concatenate([forehead, [[width * 0.5, person.fringe - 0.25], [-width * 0.3, person.fringe - 0.22]]])
    canvas.shape(forehead, person.hair)
    canvas.line(np.array([[0.005, -0.01], [0.022, person.nose - 0.01], [-0.015, person.nose]]), shade * 0.9, 0.012)


def _draw_eyes(canvas: _Canvas, person: Person, smiling: bool, gaze: float, opening: float) -> None:
    size = person.eye_size
    half = size * 0.6 * opening * (0.85 if smiling else 1)
    for side in (-1, 1):
        x = side * person.eye_distance
        canvas.oval(x, -0.05, size, half, np.array([244, 242, 238]))
        canvas.oval(x + gaze, -0.05, half * 0.8, half * 0.9, person.eyes)
        canvas.oval(x + gaze, -0.05, half * 0.4, half * 0.45, np.array([12, 10, 10]))
        canvas.line(_arc(x, -0.05, size, half, 180, 360), person.skin * 0.45, 0.008)
        canvas.line(_arc(x, -0.08, size * 1.35, 0.035, 205, 335), person.hair * 0.8, person.brow)
        if person.glasses:
            canvas.line(_arc(x, -0.045, 0.07, 0.055, 0, 360), np.array([35, 32, 32]), 0.01)
    if person.glasses:
        bridge = person.eye_distance - 0.07
        canvas.line(np.array([[-bridge, -0.05], [bridge, -0.05]]), np.array([35, 32, 32]), 0.01)


def _draw_mouth(canvas: _Canvas, person: Person, smiling: bool, random: np.random.Generator) -> None:
    """A smile bends the mouth, widens it and often shows teeth; mouths without one may be open too, as in speech."""
    bend = person.cheerfulness + (random.uniform(0.2, 1.0) if smiling else random.normal(-0.05, 0.17))
    gap = random.uniform(0.01, 0.045) if random.random() < (0.6 if smiling else 0.3) else 0.0
    width = person.mouth_width * (1 + 0.2 * max(bend, 0)) * random.normal(1, 0.05)
    u = np.linspace(-1, 1, 17)
    upper = np.stack([width * u, 0.19 + 0.09 * bend * (0.5 - u**2)], axis=1)
    lower = upper + np.stack([np.zeros(17), gap * (1 - u**2)], axis=1)
    mouth = np.concatenate([upper, lower[::-1]])
    if gap:
        canvas.shape(mouth, np.array([240, 236, 228]) if smiling else np.array([70, 22, 26]))
    canvas.line(upper, person.lips, 0.018)
    canvas.line(lower, person.lips, 0.024)


def _arc(x: float, y: float, half_width: float, half_height: float, start: float, end: float) -> np.ndarray:
    """Points [24, 2] of an ellipse, from one angle to another in degrees, clockwise from the right."""
    angle = np.radians(np.linspace(start, end, 24))
    return np.stack([x + half_width * np.cos(angle), y + half_height * np.sin(angle)], axis=1)


def _colour(rgb: np.ndarray) -> Colour:
    red, green, blue = (int(value) for value in np.clip(rgb, 0, 255))
    return red, green, blue
