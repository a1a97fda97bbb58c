"""The numbers of README.md and docs/performance.md: this measures them, `experiments.benchmarks.report` writes them down.

    python -m experiments.benchmarks.performance [--parts mlp conv ...] [--torch-python PATH]

Each part writes its own record into results/performance, so that one can be redone alone. Every road is written plainly, and
rounds of all roads of a part are interleaved in one process. For figures to be believed, let nothing else run.

torch-python: a Python with torch, higher and torchopt, an environment of its own; without it their lines are left out, and
the record says so.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import tyro

from experiments import _plots, _record
from experiments.benchmarks import _performance_plots, integers, scaling, schedule_task, starting, torch_roads
from experiments.benchmarks._measure import Limits, measure
from experiments.benchmarks.hypergradient import line
from experiments.benchmarks.roads import roads_for
from experiments.benchmarks.workloads import WORKLOADS


@dataclasses.dataclass(frozen=True)
class Config:
    parts: tuple[str, ...] = ()  # all of them
    rounds: int = 5
    seconds: float = 15.0  # of one run: longer ones take fewer steps
    total: float = 15.0  # seconds of all runs of one opponent: those that are slow take part in fewer rounds
    bytes: float = 3e9  # the same for memory
    powers: tuple[int, ...] = (4, 6, 8, 10, 12)  # of two: the numbers of steps of the curves
    options: bool = False  # opponents compiled with our options too, in all parts; else in those of the dense networks
    torch_python: pathlib.Path | None = None
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/performance")

    @property
    def limits(self) -> Limits:
        return Limits(self.rounds, self.seconds, self.total, self.bytes)


Numbers = dict[str, Any]


def workload(name: str, config: Config) -> Numbers:
    """All roads on one model."""
    spec = WORKLOADS[name]
    task = spec.tiny() if config.tiny else spec.task()
    external = torch_roads.roads(config.torch_python) if name in torch_roads.WORKLOADS and config.torch_python else []
    try:
        rows = measure(task, [*roads_for(spec.loops, spec.options or config.options), *external], config.limits, show=_say)
    finally:
        for road in external:
            road.function.close()
    for row in rows:
        print(line(row))
    return {
        "title": spec.title,
        "steps": task.steps,
        "parameters": task.parameters,
        "roads": [dataclasses.asdict(row) for row in rows],
    }


def exact_layer(config: Config) -> Numbers:
    """In a process of its own, which has one core."""
    counts = ["100"] if config.tiny else ["20000", "50000", "1000000"]
    command = [sys.executable, "-m", "experiments.benchmarks.exact_layer", "--json", "--rounds", str(config.rounds)]
    done = subprocess.run([*command, "--parameters", *counts], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return {"nanoseconds": found}


def schedule(config: Config) -> Numbers:
    found = schedule_task.measure(1 if config.tiny else 50, config.tiny)
    print(found)
    return found


def start(config: Config) -> Numbers:
    """Compilation and import."""
    names = ["mlp"] if config.tiny else list(WORKLOADS)
    rounds = 1 if config.tiny else 3
    tasks = {name: WORKLOADS[name].tiny() if config.tiny else WORKLOADS[name].task() for name in names}
    seconds = {}
    for name, task in tasks.items():
        seconds[name] = starting.compile_seconds(task, rounds)
        print(name, {road: round(statistics.median(s), 2) for road, s in seconds[name].items()}, flush=True)
    imports = starting.importing(3 * rounds)
    print(f"import: {starting.beyond(imports):.2f} s beyond the dependencies")
    return {"rounds": rounds, "compiling": seconds, "imports": imports}


def curves(config: Config) -> Numbers:
    powers, rounds = ((2, 4), 1) if config.tiny else (config.powers, 3)
    found = scaling.scale(powers, rounds)
    return {"rounds": rounds, "sizes": scaling.SIZES, "batch": scaling.BATCH, "curves": found}


def python_integers(config: Config) -> Numbers:
    found = integers.measure(WORKLOADS["mlp"].tiny() if config.tiny else WORKLOADS["mlp"].task(), 4 if config.tiny else 32)
    print(found)
    return found


PARTS: dict[str, Callable[[Config], Numbers]] = {
    **{name: (lambda config, name=name: workload(name, config)) for name in WORKLOADS},
    "exact_layer": exact_layer,
    "schedule": schedule,
    "start": start,
    "curves": curves,
    "integers": python_integers,
}


def machine() -> dict[str, Any]:
    """What the figures depend on beside the versions that every record has."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = {x.partition(":")[2].strip() for x in lines if x.startswith("model name")}
    return {
        "processor": ", ".join(sorted(names)) or platform.processor(),
        "system": platform.platform(),
        "equinox": importlib.metadata.version("equinox"),
    }


def main(config: Config) -> None:
    for name in config.parts or tuple(PARTS):
        if name not in PARTS:
            raise SystemExit(f"no part is called {name!r}; there are {', '.join(PARTS)}")
    for name in config.parts or tuple(PARTS):
        print(f"\n{name}", flush=True)
        begin = time.perf_counter()
        numbers = {"machine": machine(), **PARTS[name](config)}
        pictures = _plots.save(config.out, _performance_plots.curves(numbers)) if name == "curves" else []
        seconds = time.perf_counter() - begin
        record = _record.write(config.out, name, config, numbers, seconds=seconds, pictures=pictures)
        _plots.announce(record, pictures, seconds)


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
