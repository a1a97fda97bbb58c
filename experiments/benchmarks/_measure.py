"""Roads measured side by side: interleaved rounds in one process, medians, memory, and agreement of what they return."""

import ctypes
import dataclasses
import functools
import gc
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.benchmarks import laws
from experiments.benchmarks.roads import SAME, Road
from experiments.benchmarks.workloads import Task


@dataclasses.dataclass
class Measured:
    """One road on one task."""

    name: str
    kind: str
    steps: int  # that were run: fewer than the task's where memory did not allow all
    seconds: list[float] = dataclasses.field(default_factory=list)  # one per round
    ratios: list[float] = dataclasses.field(default_factory=list)  # to plain training in the same round, per step
    bytes: int | None = None  # XLA's temporaries for all steps; of a loop, what the process grew by at most
    compiling: float | None = None  # seconds
    error: float | None = None  # relative, to the first hypergradient of as many steps
    predicted_time: float | None = None  # in units of training, without the exact layer
    predicted_bytes: float | None = None

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


@dataclasses.dataclass(frozen=True)
class Limits:
    rounds: int = 5
    seconds: float = 15.0  # a run that would take more is made with half as many steps, or a quarter, and so on
    total: float = 15.0  # of all runs of one opponent: it sits out the rounds for which it has no such time left
    bytes: float = 3e9  # the same for a run that would need more


class Disagreement(AssertionError):
    """A road gave another hypergradient."""


def measure(
    task: Task, roads: Sequence[Road], limits: Limits, tolerance: float = 1e-2, show: Callable[[str], None] = lambda _: None
) -> list[Measured]:
    """All roads on one task. A first pass warms up and compares results; rounds follow, one run of each road in each."""
    sizes = laws.sizes(task)
    rows, runs, results = [], [], []
    unit: dict[bool, float] = {}  # seconds of plain training, as a loop and as a scan
    for road in roads:
        row, run = _prepared(road, task, limits, sizes, unit.get(road.loop, 0.0))
        seconds, result = _timed(run)
        if row.kind == "plain":
            unit[road.loop] = seconds
        if row.bytes is None:
            row.bytes = road.bytes() if road.bytes else resident_growth(run)
        for collected, x in ((rows, row), (runs, run), (results, (seconds, result))):
            collected.append(x)
        show(f"{row.name}: {seconds:.2f} s for {row.steps} steps, {row.compiling or 0:.1f} s to compile")
    compare(task, roads, rows, [result for _, result in results], tolerance)
    for _ in range(limits.rounds):
        for row, run, (once, _) in zip(rows, runs, results, strict=True):
            if row.kind in ("ours", "exact") or once <= min(unit.values()) or sum(row.seconds) + once <= limits.total:
                row.seconds.append(_timed(run)[0])
    for row, (once, _) in zip(rows, results, strict=True):
        row.seconds = row.seconds or [once]  # too slow to be run again
    reference = min((row for row in rows if row.kind == "plain"), key=lambda row: statistics.median(row.seconds) / row.steps)
    for row in rows:
        pairs = zip(row.seconds, reference.seconds, strict=False)
        row.ratios = [a / row.steps / (b / reference.steps) for a, b in pairs]
    return rows


def compare(task: Task, roads: Sequence[Road], rows: list[Measured], results: list[Any], tolerance: float) -> None:
    """Write the errors into `rows`, against the first hypergradient, recomputed for roads that ran fewer steps."""
    found = [(road, row, result) for road, row, result in zip(roads, rows, results, strict=True) if result.ndim]
    if not found:
        return
    road, first, reference = found[0]
    references = {first.steps: reference}
    for _, row, result in found:
        if row.steps not in references:
            references[row.steps] = _build(road, task._replace(steps=row.steps))[0]()
        reference = references[row.steps]
        row.error = float(jnp.linalg.norm(result - reference) / jnp.linalg.norm(reference))
        if not row.error < tolerance:
            raise Disagreement(f"{row.name} disagrees with {first.name}: relative error {row.error:.1e}")


def _prepared(
    road: Road, task: Task, limits: Limits, sizes: laws.Sizes, unit: float
) -> tuple[Measured, Callable[[], Array]]:
    """unit: seconds of plain training, 0 if not known yet."""
    row = Measured(road.name, road.kind, task.steps)
    if law := laws.LAWS.get(road.name.removesuffix(SAME)):
        row.predicted_time, row.predicted_bytes = law.time(sizes, task.steps), law.bytes(sizes, task.steps)
    excess = unit * (row.predicted_time or 1.0) / limits.seconds
    begin = time.perf_counter()
    if road.loop:
        row.steps = _halved(task.steps, max(excess, (row.predicted_bytes or 0.0) / limits.bytes))
        return row, _build(road, task._replace(steps=row.steps))[0]
    run, row.bytes = _build(road, task)
    row.compiling = time.perf_counter() - begin
    row.steps = _halved(task.steps, max(excess, row.bytes / limits.bytes))
    return row, run if row.steps == task.steps else _build(road, task._replace(steps=row.steps))[0]


def _halved(steps: int, excess: float) -> int:
    """steps / 2^k, the smallest k that makes up for `excess`."""
    return max(1, steps // 2 ** max(0, math.ceil(math.log2(max(excess, 1e-9)))))


def _build(road: Road, task: Task) -> tuple[Callable[[], Array], Any]:
    """(run, bytes of temporaries, if XLA knows them)."""
    if road.loop:
        function, rates = road.function(task), task.rates
        return lambda: jax.block_until_ready(function(rates)), None
    program, arguments = traced(road, task)
    compiled = program.lower().compile()
    return lambda: jax.block_until_ready(compiled(*arguments)), compiled.memory_analysis().temp_size_in_bytes


def traced(road: Road, task: Task) -> tuple[Any, tuple[Any, ...]]:
    """(a program to be lowered, its arguments): data and parameters are among these, as `hg.optimize` has it."""
    arguments = (task.params, task.data), task.rates
    jit = functools.partial(jax.jit, compiler_options=road.options())
    replaced = lambda arrays: task._replace(params=arrays[0], data=arrays[1])  # noqa: E731
    return jit(lambda arrays, rates: road.function(replaced(arrays), rates)).trace(*arguments), arguments


def _timed(run: Callable[[], Array]) -> tuple[float, Array]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def resident_growth(run: Callable[[], Any]) -> int:
    """By how many bytes the process grows at most while `run` runs, looked at every five milliseconds."""
    gc.collect()
    _trim()
    return grown(run, _resident, 0.005)


def grown(run: Callable[[], Any], size: Callable[[], int], every: float) -> int:
    """By how much `size()` grows at most while `run` runs, looked at every so many seconds."""
    before, most, done = size(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(every):
            most[0] = max(most[0], size())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(0, max(most[0], size()) - before)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _trim() -> None:
    """Give freed memory back, so that growth is growth."""
    ctypes.CDLL(None).malloc_trim(0)
