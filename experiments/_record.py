"""One small JSON record per experiment, its reading, and progress while it comes about.

Invariant: `experiments.report` needs nothing but the records, the pictures beside them, and the scripts' docstrings.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import hypergrad as hg


_PACKAGES = ("hypergrad-jax", "jax", "jaxlib", "numpy", "optax", "gmpy2")


class Row(NamedTuple):
    """A number of the thesis beside ours: a line of the table in docs/experiments.md."""

    figure: str  # "6.2"
    quantity: str  # what it is, with its unit
    thesis: float | str | None  # None: not in the thesis
    ours: float | str  # the mean over seeds
    spread: float | None = None  # the standard deviation over seeds; None: one number
    why: str = ""  # why the two differ

    def __str__(self) -> str:
        return f"{self.quantity:68}  {self.mean_and_spread:>18}" + (f"   thesis {shown(self.thesis)}" if self.thesis else "")

    @property
    def mean_and_spread(self) -> str:
        return shown(self.ours) + ("" if self.spread is None else f" ± {self.spread:.2g}")


def shown(x: float | str | None) -> str:
    """A number with four digits; what is a text as it is."""
    return "" if x is None else x if isinstance(x, str) else f"{x:,}" if isinstance(x, int) else f"{x:.4g}"


class Picture(NamedTuple):
    path: pathlib.Path
    caption: str


def write(
    folder: pathlib.Path,
    name: str,
    config: Any,
    numbers: dict[str, Any],
    *,
    seeds: Sequence[int] = (),
    seconds: float | None = None,
    certificate: Any = None,
    thesis: Sequence[Row] = (),
    pictures: Sequence[Picture] = (),
) -> pathlib.Path:
    """Write folder/name.json and return its path. certificate: an `hg.Certificate`, or {name: one}."""
    record = {
        "experiment": name,
        "config": dataclasses.asdict(config),
        "seeds": list(seeds),
        "versions": {p: importlib.metadata.version(p) for p in _PACKAGES} | {"python": platform.python_version()},
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "seconds": seconds,
        "numbers": numbers,
        "certificate": certificate,
        "thesis": [row._asdict() for row in thesis],
        "pictures": [{"file": picture.path.name, "caption": picture.caption} for picture in pictures],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(_plain(record), indent=1, allow_nan=False) + "\n")
    return path


def read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def mean_and_spread(values: Sequence[Any]) -> tuple[float, float | None]:
    """Over seeds: the mean and the standard deviation, None for one seed."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


class EveryTenth:
    """A callback of `hg.optimize`: ten lines of progress, however many meta-steps."""

    def __init__(self, meta_steps: int) -> None:
        self.every, self.last, self.print = max(1, meta_steps // 10), meta_steps - 1, hg.callbacks.Progress()

    def __call__(self, done: hg.MetaStep) -> None:
        if done.step % self.every == 0 or done.step == self.last:
            self.print(done)


def _plain(x: Any) -> Any:
    """What JSON can hold: arrays as lists, named tuples as objects, NaN and infinity as null."""
    if isinstance(x, (np.ndarray, np.generic, jax.Array)):
        return _plain(np.asarray(x).tolist())
    if isinstance(x, tuple) and hasattr(x, "_asdict"):
        return _plain(x._asdict())
    if isinstance(x, dict):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    return x if x is None or isinstance(x, (bool, int, str)) else str(x)
