"""Kinds of buffer against the number of steps: time of a step, memory of the device, and what is stored elsewhere.

    python -m experiments.benchmarks.buffers [--steps 1024 16384 131072] [--network small] [--rounds 3]

A learning rate per step is differentiated, momentum 0.9. Each kind is called as it can be, compiled whole or from Python,
and timed by turns with the same of other numbers of steps. Device: bytes at once, beside rates, losses and the
hypergradient, and copies of these. Compiled whole, of all arrays that XLA sets aside and that are in use at the same time,
less the words that have gone to host memory; from Python of all arrays that there are, looked at every millisecond (what a
program of 256 steps sets aside while it runs comes on top).
A call from Python traces the loss anew, however many steps follow: what one of 8 steps takes is told beside.
Stored: bytes of lost digits over parameters x steps x log2(1/momentum); up to 16 bits of a parameter wait in its integers.
"""

import argparse
import functools
import math
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

import hypergrad as hg
from experiments.benchmarks import roads
from experiments.benchmarks._live import live_at_most
from experiments.benchmarks._measure import grown, traced
from experiments.benchmarks.long_runs import NETWORKS
from experiments.benchmarks.workloads import Task


MOMENTUM, FEW = 0.9, 8
LEAST = 20.0  # seconds that each kind runs in a round, of any number of steps: a machine has faster and slower seconds


class Row(NamedTuple):
    name: str
    run: Callable[[], Any]
    device: int
    stored: int | None
    call: float = 0.0  # seconds of a call of few steps


def compiled_whole(task: Task, buffer: str) -> Row:
    adjoint = hg.Reversible(driver="scan", isolate=False, buffer=buffer)
    road = roads.Road(buffer, functools.partial(roads.reversed_by, adjoint), "ours", options=hg.compiler_options)
    program, arguments = traced(road, task)
    lowered = program.lower()
    compiled = lowered.compile()
    away = list(sent_to_host(program.jaxpr.jaxpr))
    lasting = [(x.dtype.name, (times, *x.shape)) for x, times in away if times > 1]
    words = {_written("u16", shape) for dtype, shape in lasting if dtype == "uint16"}
    by_step = {(task.steps,), *(shape for dtype, shape in lasting if dtype == "float32")}
    a_number_each = {_written("f32", shape) for one in by_step for shape in (one, (math.prod(one),))}
    device = live_at_most(lowered, lambda shape: shape not in words | a_number_each)
    stored = sum(x.size * x.dtype.itemsize * times for x, times in away if x.dtype == "uint16") if away else None
    return Row(f"{buffer}, compiled whole", lambda: jax.block_until_ready(compiled(*arguments)), device, stored)


def _written(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def sent_to_host(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """What a program puts into host memory, and how often."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            yield from ((x.aval, times) for x in equation.outvars if x.aval.memory_space == jax.memory.Space.Host)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from sent_to_host(inner.jaxpr, times * equation.params.get("length", 1))


def from_python(task: Task, name: str, adjoint: hg.Reversible, folder: str = "") -> Row:
    function, rates = roads.host_reversible(task, adjoint), task.rates
    run = lambda: jax.block_until_ready(function(rates))  # noqa: E731
    run()  # compiles
    stored = sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*.words")) if folder else None
    live = lambda: sum(x.nbytes for x in jax.live_arrays() if x.shape != rates.shape)  # noqa: E731
    device = grown(run, live, 0.001)
    few = roads.host_reversible(task._replace(steps=FEW), adjoint)
    call = lambda: jax.block_until_ready(few(rates[:FEW]))  # noqa: E731
    call()
    return Row(f"{name}, from Python", run, device, stored, statistics.median(measured(call) for _ in range(9)))


def rows_of(task: Task, folder: str) -> list[Row]:
    whole = [compiled_whole(task, buffer) for buffer in ("device", "host")]
    stored = from_python(task, "disk", hg.Reversible(buffer=hg.Disk(folder, keep=True)), folder).stored
    host = from_python(task, "host", hg.Reversible(buffer="host"))
    disk = from_python(task, "disk", hg.Reversible(buffer=hg.Disk(folder)))
    return [*whole, host, disk._replace(stored=stored)]


def timed(rows: list[list[Row]], rounds: int) -> list[list[list[float]]]:
    """Seconds of each of the rows of each number of steps, in every round; alike are next to each other."""
    seconds: list[list[list[float]]] = [[[] for _ in own] for own in rows]
    for _ in range(rounds):
        for kind in range(len(rows[0])):
            for own, taken in zip(rows, seconds, strict=True):
                taken[kind].append(measured(own[kind].run, LEAST))
    return seconds


def measured(run: Callable[[], Any], least: float = 0.0) -> float:
    """Seconds of a run, the mean of as many as take that long together."""
    begin, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - begin < least:
        run()
        runs += 1
    return (time.perf_counter() - begin) / runs


def shown(row: Row, seconds: list[float], steps: int, theory: float) -> str:
    each = [1e6 * x / steps for x in (statistics.median(seconds), min(seconds), max(seconds))]
    beside = f", {each[0] - 1e6 * row.call / steps:.1f} beside {1e3 * row.call:.0f} ms a call" if row.call else ""
    stored = "" if row.stored is None else f", {row.stored / theory:.4f} of theory stored"
    times = f"{row.name:<24}{each[0]:7.1f} ({each[1]:.1f} to {each[2]:.1f}) us a step{beside}"
    return f"{times}, {row.device / 2**10:.1f} KiB of the device{stored}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1024, 16384, 131072])
    parser.add_argument("--network", choices=list(NETWORKS), default="small")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    tasks = [NETWORKS[chosen.network](steps) for steps in chosen.steps]
    with tempfile.TemporaryDirectory() as folder:
        rows = [rows_of(task, f"{folder}/{task.steps}") for task in tasks]
        seconds = timed(rows, chosen.rounds)
    for task, own, taken in zip(tasks, rows, seconds, strict=True):
        theory = task.parameters * task.steps * math.log2(1 / MOMENTUM) / 8
        print(f"{task.steps} steps, {task.parameters} parameters")
        for row, one in zip(own, taken, strict=True):
            print("   " + shown(row, one, task.steps, theory))
    print(
        "a step beside a call, most over least of all numbers of steps: of their medians, of ratios to neighbours, of lowest"
    )
    for kind, row in enumerate(rows[0]):
        each = [
            [(x - own[kind].call) / task.steps for x in taken[kind]]
            for task, own, taken in zip(tasks, rows, seconds, strict=True)
        ]
        print(f"   {row.name:<24}" + " ".join(f"{x:7.3f}" for x in spreads(each)))
    return 0


def spreads(each: list[list[float]]) -> tuple[float, float, float]:
    """Most over least of all numbers of steps: of the medians over rounds, of the medians of what each takes in those of the
    first in the same round, and of the lowest. each: seconds of a step, by number of steps, in every round."""
    neighbours = [statistics.median(a / b for a, b in zip(own, each[0], strict=True)) for own in each]
    found = ([statistics.median(own) for own in each], neighbours, [min(own) for own in each])
    medians, ratios, lowest = (max(x) / min(x) for x in found)
    return medians, ratios, lowest


if __name__ == "__main__":
    sys.exit(main())
