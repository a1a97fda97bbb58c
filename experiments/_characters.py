"""Handwritten characters: Omniglot from the folder HYPERGRAD_DATA, or glyphs drawn here, stroke by stroke."""

from typing import Literal, NamedTuple

import numpy as np

from experiments._data import folder


Name = Literal["glyphs", "omniglot"]

DRAWINGS = 20  # of each character, by as many hands


class Alphabet(NamedTuple):
    name: str
    images: np.ndarray  # float32 [characters, DRAWINGS, side, side], ink 1 on 0


def load(name: Name, side: int = 28) -> list[Alphabet]:
    """Omniglot: eight alphabets of 17 to 47 characters. Glyphs: eight alphabets of ten, always the same.

    side: of an image in pixels; it divides 28.
    """
    return _omniglot(side) if name == "omniglot" else _glyphs(side)


def _omniglot(side: int) -> list[Alphabet]:
    with np.load(folder() / "omniglot.npz", allow_pickle=False) as file:
        images, of, names = file["images"], file["alphabet"], file["alphabet_names"]
    return [
        Alphabet(str(name).replace("_", " "), _shrunk(images[of == i], side).reshape(-1, DRAWINGS, side, side))
        for i, name in enumerate(names)
    ]


def _glyphs(side: int, alphabets: int = 8, characters: int = 10) -> list[Alphabet]:
    """Each character is a few curved strokes; each drawing of it moves, turns and bends them a little.

    An alphabet has its own bend and its own number of strokes, as scripts do.
    """
    rng = np.random.default_rng(0)
    t = np.linspace(0, 1, 12)
    bernstein = np.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2], axis=1)  # a stroke is a quadratic Bezier curve
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, side)] * 2, indexing="ij"), axis=-1).reshape(-1, 1, 2)
    drawn = []
    for i in range(alphabets):
        bend, strokes = rng.uniform(0.1, 0.9), int(rng.integers(2, 5))
        ends = rng.choice([-0.6, 0.0, 0.6], (characters, 1, strokes, 2, 2))
        middle = ends.mean(axis=-2) + bend * rng.uniform(-0.8, 0.8, (characters, 1, strokes, 2))
        control = np.stack([ends[..., 0, :], middle, ends[..., 1, :]], axis=-2)
        control = control + 0.08 * rng.normal(size=(characters, DRAWINGS, *control.shape[2:]))
        turn = np.eye(2) + 0.12 * rng.normal(size=(characters, DRAWINGS, 1, 2, 2))
        shift = 0.1 * rng.normal(size=(characters, DRAWINGS, 1, 1, 2))
        points = (bernstein @ control @ turn + shift).reshape(characters, DRAWINGS, 1, -1, 2)
        images = [[_ink(grid, drawing) for drawing in character] for character in points]
        drawn.append(Alphabet(f"drawn {i + 1}", np.asarray(images, np.float32).reshape(characters, DRAWINGS, side, side)))
    return drawn


def _ink(grid: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Ink of a pen of finite width: full at the stroke, none 0.2 away."""
    distance = np.sqrt(((grid - points) ** 2).sum(axis=-1).min(axis=1))
    return np.clip(1.6 - distance / 0.125, 0, 1)


def _shrunk(images: np.ndarray, side: int) -> np.ndarray:
    """[n, 28, 28] in 0..255 -> float32 [n, side, side] in 0..1: means over square blocks of pixels."""
    block = 28 // side
    return images.reshape(-1, side, block, side, block).mean(axis=(2, 4), dtype=np.float32) / 255
