"""Callbacks of `hg.optimize`: functions of a `MetaStep` that stop the loop by returning True; and one of a single run.

One that remembers has a method `begin(history)` too, called before the first meta-step of each run with those that it goes
on from: `[]` if it starts anew, None if it keeps no checkpoint; and before that `begin_folder(path)`, with the folder of the
checkpoint, if there are both. `hg.restarts` calls `begin_start(i)` before start i, if
there is such a method.
"""

import json
import math
import os
import pathlib
import statistics
import sys
import time
from typing import IO, Any, BinaryIO

from hypergrad._processes import is_first
from hypergrad._safe_files import write_new


EXPLODING = 100.0  # of `MetaStep.growth`


class Progress:
    """A line per meta-step on standard error, or on `file`.

    With several seeds it has the signal to noise of the hypergradient, which is about 1 where all is noise. Where training
    explodes it says so, and what came to an end of its interval is named.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = file

    def begin(self, history: list[Any] | None) -> None:
        after = f"going on after meta-step {history[-1].step}, " if history else ""
        self._print(f"{after}compiling: up to a minute for large models")

    def __call__(self, done: Any) -> None:
        line = f"meta-step {done.step:4d}   value {done.value:.6g}"
        if done.value_error == done.value_error:  # more than one seed
            line += f" +- {done.value_error:.2g}"
        if done.monitor == done.monitor:
            line += f"   monitor {done.monitor:.6g}"
        line += f"   |gradient| {done.gradient_norm:.3g}"
        if done.signal_to_noise == done.signal_to_noise:
            line += f", {done.signal_to_noise:.1f} times its noise"
        line += f"   {done.seconds:.2f} s"
        if done.failed_seeds:
            line += f"   {done.failed_seeds} failed"
        if done.clipped_seeds:
            line += f"   {done.clipped_seeds} clipped"
        if done.growth >= EXPLODING:
            line += f"   training amplifies {done.growth:.2g} times"
        self._print("   ".join((line, *done.at_bounds)))

    def _print(self, line: str) -> None:
        print(line, file=self.file or sys.stderr, flush=True)


class Steps:
    """How far one run is, with steps a second, on standard error or on `file`.

    `hg.Reversible(driver="host", progress=Steps())`: a line for the way out and one for the way back, written over about
    twice a second.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = file

    def __call__(self, direction: str, done: int, steps: int) -> None:
        now = time.perf_counter()
        if done == 0:
            self.begin = now
            return
        line = f"{direction:7s} {done}/{steps} steps   {done / max(now - self.begin, 1e-9):.1f} steps/s"
        print(f"\r{line}", end="\n" if done == steps else "", file=self.file or sys.stderr, flush=True)


class StopOnGrowth:
    """Stop where hypergradients have grown for `patience` meta-steps in a row, none of them the best.

    Grown is |gradient| above `factor` times its median so far, or `MetaStep.growth` above `factor` times 100, where training
    counts as exploding, and what it was at the first meta-step. A hypergradient that grows while the value no longer falls
    is about to turn chaotic (thesis, section 6.4). `hg.optimize` has one of these unless it is given another, or
    stop_on_growth=False; where one stops it, `Result.hypers` are the best.
    """

    def __init__(self, factor: float = 10.0, patience: int = 3) -> None:
        if not factor > 1 or not patience >= 1:
            raise ValueError(f"StopOnGrowth needs factor > 1 and patience >= 1; got {factor!r} and {patience!r}.")
        self.factor, self.patience = factor, patience
        self.begin(None)

    def begin(self, history: list[Any] | None) -> None:
        self.norms: list[float] = []
        self.lowest, self.grown, self.usual_growth = float("inf"), 0, EXPLODING
        for done in history or ():
            self(done)

    @property
    def stopped(self) -> bool:
        """Whether the last meta-step was one too many."""
        return self.grown >= self.patience

    def __call__(self, done: Any) -> bool:
        if math.isnan(done.value):  # all seeds failed, and the hypers stayed
            return self.stopped
        usual = (statistics.median(self.norms) if self.norms else 0) or math.inf
        if done.step == 0 and done.growth > EXPLODING:
            self.usual_growth = done.growth
        long = not done.gradient_norm <= self.factor * usual  # NaN is long
        grown = (long or done.growth > self.factor * self.usual_growth) and done.judged >= self.lowest
        self.grown, self.lowest = self.grown + 1 if grown else 0, min(self.lowest, done.judged)
        if not long:
            self.norms.append(done.gradient_norm)
        return self.stopped


class EarlyStopping:
    """Stop once `patience` meta-steps in a row have not lowered the best value by more than `tolerance`.

    It judges `monitor`, the value on a third split, if `hg.optimize` was given a `monitor_fn`; else the validation value.
    """

    def __init__(self, patience: int = 10, tolerance: float = 0.0) -> None:
        if not patience >= 1 or not tolerance >= 0:
            raise ValueError(f"EarlyStopping needs patience >= 1 and tolerance >= 0; got {patience!r} and {tolerance!r}.")
        self.patience, self.tolerance = patience, tolerance
        self.begin(None)

    def begin(self, history: list[Any] | None) -> None:
        self.lowest, self.waited = float("inf"), 0
        for done in history or ():
            self(done)

    @property
    def stopped(self) -> bool:
        """Whether it has waited long enough."""
        return self.waited >= self.patience

    def __call__(self, done: Any) -> bool:
        lower = done.judged < self.lowest - self.tolerance
        self.lowest, self.waited = (done.judged, 0) if lower else (self.lowest, self.waited + 1)
        return self.stopped


class JsonLines:
    """One JSON object per meta-step, appended to `path`: the numbers of a `MetaStep`, its status by its code, NaN as null.

    "gradients" has the norm of the hypergradient by hyperparameter, "hypers" what they are in natural units: a number, or of
    an array min, max, mean, first and last. The folder of `path` is made if absent.
    With a `checkpoint` the records in the file are that run's: they are written anew from the checkpoint where the run goes
    on from another point than they do. Lines that are no records stay, before them. Of `hg.restarts` it has all starts, one
    after the other. Of several processes the first writes.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = pathlib.Path(path).absolute()  # wherever the process goes
        self.others: list[str] = []  # lines of the starts before
        self.own: list[str] = []
        self.of_start = False  # whether the run that begins is one of several starts
        self.longer = False  # whether the file has records beyond `others` and `own`

    def begin_start(self, number: int) -> None:
        self.others, self.own, self.of_start = [*self.others, *self.own] if number else [], [], True

    def begin(self, history: list[Any] | None) -> None:
        if not self.of_start:
            self.others = []
        self.of_start, self.longer = False, False
        if history is not None:
            self.own = [self._line(done) for done in history]
        if not is_first():
            return
        try:  # before anything runs
            self._make_ready(goes_on=history is not None)
        except OSError as error:
            raise ValueError(f"JsonLines cannot write to {self.path}: {error}. Give the path of a file.") from error

    def __call__(self, done: Any) -> None:
        self.own.append(self._line(done))
        if not is_first():
            return
        if self.longer:
            self.longer = False
            self._write_anew()
            return
        with self.path.open("a+b") as file:
            file.write(b"\n" * _is_cut_off(file) + self.own[-1].encode())

    def _make_ready(self, goes_on: bool) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise IsADirectoryError("it is a folder")
        if not goes_on:
            self.path.open("a").close()
            return
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise OSError(f"with a `checkpoint` it is replaced, and it leads to {self.path.resolve()}")
        there, due = self._lines()[1], self._due()
        # What follows is cut off when the next meta-step is made again, and stays where none is.
        self.longer = there[: len(due)] == due and len(there) > len(due)
        if not self.longer:
            self._write_anew()

    def _due(self) -> list[bytes]:
        return [line.encode() for line in self.others + self.own]

    def _lines(self) -> tuple[list[bytes], list[bytes]]:
        """(lines that are no records, records) of the file."""
        content = self.path.read_bytes() if self.path.exists() else b""
        lines = (content if content.endswith(b"\n") or not content else content + b"\n").splitlines(keepends=True)
        foreign, records = list[bytes](), list[bytes]()
        for line in lines:
            (records if _is_record(line) else foreign).append(line)
        return foreign, records

    def _write_anew(self) -> None:
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        fresh.unlink(missing_ok=True)
        write_new(fresh, b"".join(self._lines()[0] + self._due()))
        os.replace(fresh, self.path)

    @staticmethod
    def _line(done: Any) -> str:
        return json.dumps(done.record()) + "\n"


def _is_cut_off(file: BinaryIO) -> bool:
    """Whether the last line of a file has no end, as of a process that was killed while it wrote."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _is_record(line: bytes) -> bool:
    """Of a MetaStep, or the beginning of one that was cut off while it was written."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith(b'{"step": ')
    return isinstance(found, dict) and {"step", "value", "gradient_norm", "gradients", "hypers"} <= found.keys()
