"""Text: modules of Python's standard library, as indices of characters."""

import pathlib
import sysconfig
from typing import NamedTuple

import numpy as np


MODULES = ("argparse", "ast", "configparser", "dataclasses", "doctest", "inspect", "pathlib", "statistics", "textwrap")
LEAST = 20  # times that a character must occur; others are one


class Text(NamedTuple):
    alphabet: str  # the first stands for all that are rare
    train: np.ndarray  # int32 [characters]
    validation: np.ndarray


def load() -> Text:
    """The first nine tenths of each module, and the last tenth."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{name}.py" for name in MODULES]
    texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]  # some became packages
    characters, counts = np.unique(list("".join(texts)), return_counts=True)
    alphabet = "\0" + "".join(characters[counts >= LEAST])
    number = {c: i for i, c in enumerate(alphabet)}
    rows = [np.array([number.get(c, 0) for c in text], np.int32) for text in texts]
    parts = [np.split(row, [9 * len(row) // 10]) for row in rows]
    return Text(alphabet, *(np.concatenate(part) for part in zip(*parts, strict=True)))
