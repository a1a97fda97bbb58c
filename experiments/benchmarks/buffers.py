"""Kinds of buffer against the number of steps: time of a step, memory of the device, and what is stored elsewhere.

    python -m experiments.benchmarks.buffers [--steps 1024 16384 131072] [--network small] [--rounds 3]

A learning rate per step is differentiated, momentum 0.9. Each kind is called as it can be, compiled whole or from Python,
and timed by turns with those that are called alike. Device: bytes at once, beside rates, losses and the hypergradient.
Compiled whole, they are XLA's temporaries, less what goes to host memory where host and device are one; from Python all
arrays that there are, looked at every millisecond (what a program of 256 steps sets aside while it runs comes on top).
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
from experiments.benchmarks._measure import grown, traced
from experiments.benchmarks.long_runs import NETWORKS
from experiments.benchmarks.workloads import Task


MOMENTUM, FEW = 0.9, 8


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
    compiled = program.lower().compile()
    away = [(x.dtype, x.size * x.dtype.itemsize * times) for x, times in sent_to_host(program.jaxpr.jaxpr)]
    size = compiled.memory_analysis()
    device = size.temp_size_in_bytes - (0 if size.host_temp_size_in_bytes else sum(bytes for _, bytes in away))
    stored = sum(bytes for dtype, bytes in away if dtype == "uint16") if away else None
    return Row(f"{buffer}, compiled whole", lambda: jax.block_until_ready(compiled(*arguments)), device, stored)


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
    live = lambda: sum(x.nbytes for x in jax.live_arrays())  # noqa: E731
    device = grown(run, live, 0.001) - 2 * rates.nbytes  # losses and the hypergradient
    few = roads.host_reversible(task._replace(steps=FEW), adjoint)
    call = lambda: jax.block_until_ready(few(rates[:FEW]))  # noqa: E731
    call()
    return Row(f"{name}, from Python", run, device, stored, statistics.median(measured(call) for _ in range(9)))


def rows_of(task: Task, folder: str) -> list[list[Row]]:
    """Those that are compared with each other."""
    whole = [compiled_whole(task, buffer) for buffer in ("device", "host")]
    once = hg.Reversible(buffer=hg.Disk(folder, keep=True))
    stored = from_python(task, "disk", once, folder).stored
    pairs = {"host": hg.Reversible(buffer="host"), "disk": hg.Reversible(buffer=hg.Disk(folder))}
    rows = [from_python(task, name, adjoint) for name, adjoint in pairs.items()]
    return [whole, [row._replace(stored=stored) if row.name.startswith("disk") else row for row in rows]]


def timed(rows: list[Row], rounds: int) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for row, own in zip(rows, seconds, strict=True):
            own.append(measured(row.run))
    return seconds


def measured(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


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
    for steps in chosen.steps:
        task = NETWORKS[chosen.network](steps)
        theory = task.parameters * steps * math.log2(1 / MOMENTUM) / 8
        print(f"{steps} steps, {task.parameters} parameters", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for rows in rows_of(task, folder):
                for row, seconds in zip(rows, timed(rows, chosen.rounds), strict=True):
                    print("   " + shown(row, seconds, steps, theory), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
