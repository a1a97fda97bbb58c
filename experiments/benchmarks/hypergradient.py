"""Time and memory of one hypergradient, hg.Reversible beside its opponents in raw JAX, interleaved in one process.

    python -m experiments.benchmarks.hypergradient [--workload mlp] [--optimizer sgd|adam|muon|shampoo] [--rounds 5]

One part of `experiments.benchmarks.performance`, on the terminal. Times are medians, as multiples of plain float32 training
in the same round; memory is XLA's temporaries, or what the process grew by where Python runs the loop.
"""

import argparse
import statistics

import jax

from experiments.benchmarks import roads
from experiments.benchmarks._measure import Limits, Measured, measure
from experiments.benchmarks.workloads import RATES, WORKLOADS


def line(row: Measured) -> str:
    memory = "" if row.bytes is None else f"{row.bytes / 2**20:9.1f}"
    spread = f"({min(row.ratios):.2f} to {max(row.ratios):.2f}, {len(row.ratios)} rounds)"
    times = f"{row.ratio:8.2f} {statistics.median(row.seconds):9.3f}"
    return f"{row.name:46s} {row.steps:6d} {times} {memory:>9s} {row.compiling or 0:8.1f}  {spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="mlp")
    parser.add_argument("--optimizer", choices=list(roads.OURS), default="sgd")
    parser.add_argument("--steps", type=int, help="instead of the workload's own number")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of one run; longer ones take fewer steps")
    parser.add_argument(
        "--total", type=float, default=15.0, help="seconds of all runs of one opponent; slow ones sit out rounds"
    )
    parser.add_argument("--only", nargs="*", choices=[road.name for road in roads.ROADS], help="beside plain training")
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    task = workload.task()._replace(rule=arguments.optimizer, learning_rate=RATES[arguments.optimizer])
    if arguments.steps:
        task = task._replace(steps=arguments.steps)
    chosen = roads.roads_for(workload.loops, workload.options)
    if arguments.only:
        chosen = [road for road in roads.ROADS if road.kind == "plain" or road.name in arguments.only]
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {workload.title}, {arguments.optimizer}, {task.steps}")
    print(f"{'':46s} {'steps':>6s} {'x plain':>8s} {'seconds':>9s} {'MiB':>9s} {'compile':>8s}")
    for row in measure(task, chosen, Limits(arguments.rounds, arguments.seconds, arguments.total)):
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
