"""Memory and time of a hypergradient against the number of steps, from 2^6 to 2^17, by every road.

    python -m experiments.benchmarks.long_curves [--powers 6 8 10 12 14 17] [--mebibytes 2] [--out results/long_curves]

The small network of `scaling`, a learning rate per step, momentum 0.9. Memory is XLA's temporaries of the program of all
steps. Time is that of a step, both ways, one round by turns; a run that would take longer than 20 seconds, or more than
3 GB, is timed on half as many steps, a quarter, and so on.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import hypergrad as hg
from experiments import _plots
from experiments._plots import COLOURS, DASHES, GREY
from experiments.benchmarks import roads, scaling
from experiments.benchmarks._measure import Limits, measure
from experiments.benchmarks.roads import Road


OTHERS = ("unroll", "remat", "sqrt-remat", "equinox, default", "replay tree, 4-ary")


def chosen(budget: int) -> dict[str, Road]:
    """{label: road}, plain training first."""
    by_name = {road.name: road for road in roads.ROADS}
    hybrid = functools.partial(roads.reversed_by, hg.Reversible(memory_budget=budget, isolate=False))
    return {
        "plain training": by_name["plain training, scan"],
        "hg.Reversible()": by_name["hg.Reversible, as hg.optimize compiles"],
        f'memory_budget="{budget / 2**20:g}MiB"': Road("in a budget", hybrid, "ours", options=hg.compiler_options),
        **{name: by_name[name] for name in OTHERS},
    }


def curves(powers: Sequence[int], budget: int) -> dict[str, list[tuple[int, float, float]]]:
    """{label: (steps, microseconds a step, bytes)}"""
    found: dict[str, list[tuple[int, float, float]]] = {}
    labels = chosen(budget)
    limits = Limits(1, seconds=20, total=20, bytes=3e9)
    for power in powers:
        task = scaling.network(2**power)
        for label, row in zip(labels, measure(task, list(labels.values()), limits, tolerance=1.0), strict=True):
            point = task.steps, 1e6 * min(row.seconds) / row.steps, float(row.bytes or 0)
            found.setdefault(label, []).append(point)
            print(f"2^{power:<3} {label:28}{point[1]:10.1f} us a step {point[2] / 2**20:10.2f} MiB", flush=True)
    return found


def picture(found: dict[str, list[tuple[int, float, float]]]) -> Any:
    figure, (memory, time) = _plots.panels(2, size=(5.2, 3.8))
    for i, (label, points) in enumerate(found.items()):
        steps, microseconds, size = zip(*points, strict=True)
        style = {
            "color": GREY if i == 0 else (*COLOURS, "black")[i - 1],
            "linestyle": DASHES[i % len(DASHES)],
            "marker": ".",
        }
        if i:
            memory.plot(steps, [x / 2**20 for x in size], **style)
        time.plot(steps, microseconds, label=label, **style)
    for ax, what in ((memory, "XLA temporaries (MiB)"), (time, "time of a step, both ways (us)")):
        ax.set(xlabel="steps", ylabel=what, yscale="log")
        ax.set_xscale("log", base=2)
        _plots.plain_log(ax.yaxis)
    time.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--powers", type=int, nargs="+", default=[6, 8, 10, 12, 14, 17])
    parser.add_argument("--mebibytes", type=float, default=2)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results/long_curves"))
    options = parser.parse_args(arguments)
    found = curves(options.powers, int(options.mebibytes * 2**20))
    _plots.save(options.out, {"long_curves": (picture(found), "")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
