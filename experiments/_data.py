"""Data: scikit-learn's digits, which ship inside the package, or npz files from the folder HYPERGRAD_DATA."""

import os
import pathlib
from typing import Literal, NamedTuple

import numpy as np


Name = Literal["digits", "mnist", "fashion_mnist"]


class Split(NamedTuple):
    """Images as rows, float32 [examples, pixels]; labels int32 [examples]."""

    x: np.ndarray
    y: np.ndarray


class Data(NamedTuple):
    train: Split
    validation: Split
    test: Split  # for reports only: nothing is ever chosen by it

    @property
    def side(self) -> int:
        return int(round(self.train.x.shape[1] ** 0.5))


def load(name: Name, seed: int | None, *, centred: bool = True) -> Data:
    """Digits 897 / 450 / 450, others 10,000 / 10,000 / their own 10,000 test images, pixels in 0..1.

    Shuffled by `seed` before it is cut; None: in the order of the file, as the thesis cuts it. centred: remove the mean
    image of the training part.
    """
    if name == "digits":
        from sklearn.datasets import load_digits  # slow to import, and not needed for the others

        digits = load_digits()
        x, y = digits.data / 16.0, digits.target
        parts = [(x[i], y[i]) for i in np.split(_order(len(x), seed), [897, 1347])]
    else:
        with np.load(folder() / f"{name}.npz", allow_pickle=False) as file:
            x, y = file["x_train"], file["y_train"]
            order = _order(len(x), seed)[:20_000]
            parts = [(x[i].reshape(-1, 784) / 255.0, y[i]) for i in np.split(order, 2)]
            parts.append((file["x_test"].reshape(-1, 784) / 255.0, file["y_test"]))
    mean = parts[0][0].mean(axis=0) if centred else 0.0
    return Data(*(Split((x - mean).astype(np.float32), y.astype(np.int32)) for x, y in parts))


def _order(size: int, seed: int | None) -> np.ndarray:
    return np.arange(size) if seed is None else np.random.default_rng(seed).permutation(size)


def folder() -> pathlib.Path:
    folder = os.environ.get("HYPERGRAD_DATA")
    if folder is None:
        raise SystemExit(
            "This data set is read from a folder of npz files: set HYPERGRAD_DATA to it, or take --data digits."
        )
    return pathlib.Path(folder)
