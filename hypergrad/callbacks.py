"""Callbacks of `hg.optimize`: functions of a `MetaStep` that stop the loop by returning True."""

import json
import pathlib
import sys
from typing import IO, Any


class Progress:
    """A line per meta-step on standard error, or on `file`."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = file

    def __call__(self, done: Any) -> None:
        line = f"meta-step {done.step:4d}   value {done.value:.6g}   |gradient| {done.gradient_norm:.3g}"
        print(f"{line}   {done.seconds:.2f} s", file=self.file or sys.stderr, flush=True)


class StopOnGrowth:
    """Stop once |gradient| exceeds `factor` times its smallest value so far for `patience` meta-steps in a row.

    A hypergradient that grows while the value no longer falls is about to turn chaotic (thesis, section 6.4).
    """

    def __init__(self, factor: float = 10.0, patience: int = 3) -> None:
        if not factor > 1 or patience < 1:
            raise ValueError(f"StopOnGrowth needs factor > 1 and patience >= 1; got {factor!r} and {patience!r}.")
        self.factor, self.patience = factor, patience
        self.smallest, self.grown = float("inf"), 0

    def __call__(self, done: Any) -> bool:
        self.smallest = min(self.smallest, done.gradient_norm)  # a NaN norm leaves it, and counts as grown
        self.grown = 0 if done.gradient_norm <= self.factor * self.smallest else self.grown + 1
        return self.grown >= self.patience


class JsonLines:
    """One JSON object per meta-step, appended to `path`: step, value, gradient_norm, seconds, bits, status."""

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = pathlib.Path(path)

    def __call__(self, done: Any) -> None:
        record = {
            "step": done.step,
            "value": done.value,
            "gradient_norm": done.gradient_norm,
            "seconds": done.seconds,
            "bits_per_parameter_step": done.bits_per_parameter_step,
            "status": int(done.status.code) if done.status is not None else None,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
