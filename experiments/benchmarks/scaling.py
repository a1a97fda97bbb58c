"""Time and memory against the number of steps, every road, with what the laws predict.

    python -m experiments.benchmarks.scaling [--powers 4 6 8 10 12]

A small network, so that many steps fit. Memory is XLA's temporaries; time is the median of interleaved runs, one number of
steps after the other.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.benchmarks import laws, roads
from experiments.benchmarks._measure import Limits, measure
from experiments.benchmarks.workloads import Task, mlp_task


SIZES, BATCH, EXAMPLES = (64, 64, 32, 10), 64, 256


def network(steps: int) -> Task:
    return mlp_task(steps, SIZES, BATCH, EXAMPLES)


def scale(powers: Sequence[int], rounds: int) -> dict[str, Any]:
    """{road: {"kind", "steps", "seconds", "bytes", "predicted_time", "predicted_bytes"}}, lists over numbers of steps.

    predicted_time: in gradient evaluations over the run.
    """
    found: dict[str, Any] = {}
    chosen = [road for road in roads.roads_for(False) if not road.loop and road.options() is None]
    for power in powers:
        task = network(2**power)
        sizes = laws.sizes(task)
        for row in measure(task, chosen, Limits(rounds, seconds=1e3, total=1e3, bytes=1e10)):
            law = laws.LAWS[row.name]
            values = {
                "steps": task.steps,
                "seconds": statistics.median(row.seconds),
                "bytes": row.bytes,
                "predicted_time": law.time(sizes, task.steps) * task.steps,
                "predicted_bytes": law.bytes(sizes, task.steps),
            }
            road = found.setdefault(row.name, {"kind": row.kind} | {key: [] for key in values})
            for key, value in values.items():
                road[key].append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--powers", type=int, nargs="+", default=[4, 6, 8, 10, 12], help="of two: the numbers of steps")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for name, road in scale(arguments.powers, arguments.rounds).items():
        print(name)
        for steps, seconds, size, expected in zip(
            road["steps"], road["seconds"], road["bytes"], road["predicted_bytes"], strict=True
        ):
            print(f"{steps:8d} steps {1e3 * seconds:9.2f} ms {size / 2**20:9.3f} MiB, predicted {expected / 2**20:9.3f}")


if __name__ == "__main__":
    main()
