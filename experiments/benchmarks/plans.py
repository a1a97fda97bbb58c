"""What `hg.plan` says beside what then happens: bytes and seconds of six workloads by three adjoints.

    python -m experiments.benchmarks.plans [--only NAME ...] [--rounds 3] [--tiny]

A learning rate per step is differentiated, of a loss of the trained parameters. Bytes are XLA's temporaries of the program
under jax.jit; seconds the median of its runs, after one that is not counted.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import hypergrad as hg
from experiments.benchmarks import roads
from experiments.benchmarks.workloads import Task, conv_task, mlp_task, transformer_task


ADJOINTS: dict[str, Any] = {"Reversible": hg.Reversible(), "Checkpointed": hg.Checkpointed(), "Unrolled": hg.Unrolled()}

TASKS: dict[str, tuple[Callable[[], Task], Callable[[], Task]]] = {  # as it is measured, and in miniature
    "small": (lambda: mlp_task(1024), lambda: mlp_task(6, (12, 5, 3), 4, 20)),
    "wide": (lambda: mlp_task(256, (784, 256, 256, 10), 500), lambda: mlp_task(6, (9, 7, 3), 4, 20)),
    "convolutions": (lambda: conv_task(64, (4, 8), 32), lambda: conv_task(4, (2, 2), 2, 8)),
    "transformer": (
        lambda: transformer_task(64, 64, 2, 4, 32, 64, 16),
        lambda: transformer_task(4, 4, 1, 2, 3, 5, 2, 6),
    ),
    "Adam": (lambda: mlp_task(1024, rule="adam"), lambda: mlp_task(6, (12, 5, 3), 4, 20, rule="adam")),
    "statistics": (lambda: mlp_task(1024), lambda: mlp_task(6, (12, 5, 3), 4, 20)),
}


def given(name: str, task: Task) -> dict[str, Any]:
    """Of `hg.train` and `hg.plan`, but for the optimizer."""
    loss, statistics = roads.three_arguments(task), None
    if name == "statistics":
        plain, width = loss, task.data[0].shape[1]
        statistics = hg.Statistics({"mean": jnp.zeros(width), "var": jnp.ones(width)}, 0.9)

        def loss(w: Any, theta: Any, batch: Any) -> Any:
            x, y = batch
            seen = {"mean": x.mean(axis=0), "var": x.var(axis=0)}
            return plain(w, theta, ((x - seen["mean"]) * jax.lax.rsqrt(seen["var"] + 1e-5), y)), seen

    return {
        "loss": loss, "params": task.params, "batches": task.batch, "steps": task.steps, "statistics": statistics,
    }  # fmt: skip


def compare(name: str, task: Task, adjoint: Any, rounds: int) -> tuple[float, float, str]:
    """(bytes planned over taken, seconds planned over taken, a line)"""
    arguments, rule = given(name, task), roads.OURS[task.rule]
    (road,) = hg.plan(**arguments, optimizer=rule(hg.PerStep(task.rates)), adjoint=adjoint).roads

    def value(rates: Array) -> Array:
        return task.validation(hg.train(**arguments, optimizer=rule(hg.PerStep(rates)), adjoint=adjoint).params)

    program = jax.jit(jax.grad(value)).lower(task.rates).compile()
    taken = program.memory_analysis().temp_size_in_bytes
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        jax.block_until_ready(program(task.rates))
        seconds.append(time.perf_counter() - begin)
    needed = statistics.median(seconds[1:])
    assert road.seconds is not None
    line = (
        f"{road.device / 2**20:9.2f} {taken / 2**20:9.2f} MiB {road.device / taken:5.2f}   "
        f"{road.seconds:8.3f} {needed:8.3f} s {road.seconds / needed:5.2f}"
    )
    return road.device / taken, road.seconds / needed, line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args(arguments)
    print(f"{'':30}planned, taken, ratio; of bytes, of seconds")
    for name in chosen.only:
        task = TASKS[name][chosen.tiny]()
        for road, adjoint in ADJOINTS.items():
            print(f"{name:14}{road:14}{compare(name, task, adjoint, chosen.rounds)[2]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
