"""Runs of any length: time per step and memory against the number of steps, by every way to keep what a reversal needs.

    python -m experiments.benchmarks.long_runs [--steps 1024 16384 131072] [--network small] [--mebibytes 64] [--share 16]
        [--roads pure budget host disk]

A learning rate per step is differentiated, momentum 0.9. `share`: opponents are timed on so many times fewer steps, which
changes neither their states nor their time per step by more than the depth of a tree. Times are in units of plain training
of as many steps, by turns in one process. Bytes are XLA's temporaries, or what the process grew by where Python goes from
segment to segment: digits in host memory among them.
"""

import argparse
import atexit
import functools
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import hypergrad as hg
from experiments.benchmarks import opponents, roads, scaling
from experiments.benchmarks._measure import Limits, measure
from experiments.benchmarks.workloads import Task, mlp_task


NETWORKS = {"small": scaling.network, "784-64-64-10": mlp_task}
OURS = ["pure", "budget", "host", "disk"]


PLAIN = roads.Road("plain training", opponents.plain, "plain", options=hg.compiler_options)


def ours(budget: int) -> dict[str, roads.Road]:
    within = functools.partial(roads.reversed_by, hg.Reversible(memory_budget=budget, isolate=False))
    name, options = f"hg.Reversible(memory_budget={budget})", hg.compiler_options
    host, disk = hg.Reversible(buffer="host"), on_disk()
    return {
        "pure": roads.Road("hg.Reversible()", roads.optimized, "ours", options=options),
        "budget": roads.Road(name, within, "ours", options=options),
        "host": roads.Road('hg.Reversible(buffer="host")', functools.partial(stored, host), "ours", loop=True),
        "disk": roads.Road("buffer=hg.Disk(folder)", functools.partial(stored, disk), "ours", loop=True),
    }


def on_disk() -> hg.Reversible:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return hg.Reversible(buffer=hg.Disk(folder))


def stored(adjoint: hg.Reversible, task: Task) -> Any:
    return roads.host_reversible(task, adjoint)


def theirs(budget: int, task: Task) -> list[roads.Road]:
    """With as many states as fit into the budget."""
    states = max(budget // (8 * task.parameters), 2)
    equinox = functools.partial(opponents.equinox_checkpointed, checkpoints=states)
    arity = max(k for k in (2, 4, 8, 16, 32, 64) if k == 2 or sum(opponents.branches(task.steps, k)) <= states)
    tree = functools.partial(opponents.tree, arity=arity)
    return [
        roads.Road(f"equinox, {states} states", equinox, "opponent", options=hg.compiler_options),
        roads.Road(f"replay tree, {arity}-ary", tree, "opponent", options=hg.compiler_options),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1024, 16384, 131072])
    parser.add_argument("--network", choices=list(NETWORKS), default="small")
    parser.add_argument("--mebibytes", type=float, default=64, help="of the budget")
    parser.add_argument("--share", type=int, default=16)
    parser.add_argument("--roads", choices=OURS, nargs="+", default=OURS, help="of this library")
    parser.add_argument("--rounds", type=int, default=3, help="0: the first run of each is what counts")
    chosen = parser.parse_args(arguments)
    budget = int(chosen.mebibytes * 2**20)
    limits = Limits(chosen.rounds, seconds=1e4, total=1e4, bytes=1e11)
    for steps in chosen.steps:
        task = NETWORKS[chosen.network](steps)
        few = task._replace(steps=max(steps // chosen.share, 1))
        print(f"{steps} steps, {task.parameters} parameters", flush=True)
        of_ours = [road for name, road in ours(budget).items() if name in chosen.roads]
        for some, own in ((task, [PLAIN, *of_ours]), (few, [PLAIN, *theirs(budget, task)])):
            for row in measure(some, own, limits, tolerance=1.0):
                low, high = min(row.ratios), max(row.ratios)
                each = 1e6 * min(row.seconds) / row.steps
                print(
                    f"   {row.name:<44}{row.steps:8} steps {row.ratio:6.2f} ({low:.2f} to {high:.2f}) {each:8.1f} us a step"
                    f"{(row.bytes or 0) / 2**20:10.2f} MiB{'' if row.error is None else f'   error {row.error:.1e}'}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
