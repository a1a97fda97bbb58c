"""What it costs before the first number: compilation, beside the raw-JAX unroll's, and importing.

python -m experiments.benchmarks.starting [--rounds 3]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import jax

from experiments.benchmarks import roads
from experiments.benchmarks._measure import traced
from experiments.benchmarks.workloads import WORKLOADS, Task


COMPILED = ("hg.Reversible, scan", "hg.Reversible, as hg.optimize compiles", "unroll", "remat")
DEPENDENCIES = "import equinox, gmpy2, jax, jax.numpy, numpy, optax"


def compile_seconds(task: Task, rounds: int) -> dict[str, list[float]]:
    """Seconds to trace and compile a hypergradient from empty caches, {road: one per round}."""
    chosen = [road for road in roads.ROADS if road.name in COMPILED]
    seconds: dict[str, list[float]] = {road.name: [] for road in chosen}
    for _ in range(rounds):
        for road in chosen:
            jax.clear_caches()
            begin = time.perf_counter()
            traced(road, task)[0].lower().compile()
            seconds[road.name].append(time.perf_counter() - begin)
    return seconds


def importing(rounds: int) -> dict[str, list[float]]:
    """Seconds of a Python that imports the dependencies, and of one that imports hypergrad after them."""
    programs = {"dependencies": DEPENDENCIES, "dependencies and hypergrad": f"{DEPENDENCIES}\nimport hypergrad"}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(1 + rounds):  # the first reads the files
        for name, program in programs.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
            seconds[name].append(time.perf_counter() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def beyond(imports: dict[str, list[float]]) -> float:
    """Seconds that hypergrad's own modules take: between the fastest imports, since what else runs only adds to them."""
    without, whole = (min(seconds) for seconds in imports.values())
    return whole - without


def compile_ratio(seconds: dict[str, Sequence[float]]) -> float:
    """Ours to the unroll's, medians."""
    return statistics.median(seconds["hg.Reversible, scan"]) / statistics.median(seconds["unroll"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"import hypergrad, beyond its dependencies: {beyond(importing(rounds)):.2f} s")
    for name, workload in WORKLOADS.items():
        seconds = compile_seconds(workload.task(), rounds)
        times = ", ".join(f"{road} {statistics.median(s):.2f} s" for road, s in seconds.items())
        print(f"{name}: to compile: {times}; ours {compile_ratio(seconds):.2f} times the unroll's", flush=True)


if __name__ == "__main__":
    main()
