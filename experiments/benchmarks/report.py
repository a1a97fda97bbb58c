"""Write the records of `experiments.benchmarks.performance` into the tables of docs/performance.md.

    python -m experiments.benchmarks.report [--results results/performance] [--docs docs]

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; all else on the page is written by hand and stays. What
has no record stays too.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import tyro

from experiments import _record
from experiments.benchmarks import performance, starting
from experiments.benchmarks.workloads import WORKLOADS
from experiments.report import copy_small


@dataclasses.dataclass(frozen=True)
class Config:
    results: pathlib.Path = pathlib.Path("results/performance")
    docs: pathlib.Path = pathlib.Path("docs")
    width: int = 900  # of a picture's copy, in pixels


Record = dict[str, Any]


def main(config: Config) -> pathlib.Path:
    page = config.docs / "performance.md"
    text = page.read_text()
    for name, (part, section) in SECTIONS.items():
        path = config.results / f"{part}.json"
        if path.exists():
            record = _record.read(path)
            text = filled(text, name, section(record))
            for picture in record["pictures"]:
                target = config.docs / "images" / f"performance-{picture['file']}"
                copy_small(config.results / picture["file"], target, config.width)
        print(f"{name:24}  {path if path.exists() else 'kept as it was'}")
    page.write_text(text)
    print(f"wrote {page}")
    return page


def filled(page: str, name: str, section: str) -> str:
    """The page with its place called `name` filled anew."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has no place called {name!r}: it needs one line {begin} and, after it, one line {end}")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{section}\n\n{end}{rest.split(end)[1]}"


def workload(record: Record) -> str:
    numbers = record["numbers"]
    header = ("", "x plain", "from", "to", "rounds", "MiB", "MiB, predicted", "gradients, predicted")
    rows = []
    for road in numbers["roads"]:
        steps = "" if road["steps"] == numbers["steps"] else f", timed on {road['steps']} steps"
        name = f"**{road['name']}**" if road["kind"] == "ours" else road["name"]
        rows.append(
            (
                name + steps, f"{statistics.median(road['ratios']):.2f}", f"{min(road['ratios']):.2f}",
                f"{max(road['ratios']):.2f}", len(road["ratios"]), _mebibytes(road["bytes"]),
                _mebibytes(road["predicted_bytes"]), _number(road["predicted_time"], ".2f"),
            )
        )  # fmt: skip
    plain = [road for road in numbers["roads"] if road["kind"] == "plain"]
    fastest = min(plain, key=lambda road: statistics.median(road["seconds"]) / road["steps"])
    step = 1e3 * statistics.median(fastest["seconds"]) / fastest["steps"]
    sentence = f"{numbers['parameters']:,} parameters. A step of plain training takes {step:.3g} ms ({fastest['name']})."
    return "\n\n".join([sentence, table(header, rows), provenance(record)])


def summary(record: Record) -> str:
    """Of one workload, a line of the table at the top: ours and the best of the others."""
    roads = record["numbers"]["roads"]
    ratio = lambda road: statistics.median(road["ratios"])  # noqa: E731
    ours = min((road for road in roads if road["kind"] == "ours"), key=ratio)
    quick = min((road for road in roads if road["kind"] == "opponent"), key=ratio)
    small = min((road for road in roads if road["kind"] == "opponent" and road["bytes"]), key=lambda road: road["bytes"])
    return (
        f"{ratio(ours):.2f} times plain training in {_mebibytes(ours['bytes'])} MiB ({ours['name']}); the fastest opponent "
        f"{ratio(quick):.2f} in {_mebibytes(quick['bytes'])} MiB ({quick['name']}), the smallest {ratio(small):.2f} in "
        f"{_mebibytes(small['bytes'])} MiB ({small['name']})."
    )


def exact_layer(record: Record) -> str:
    found = record["numbers"]["nanoseconds"]
    names = list(next(iter(found.values())))
    header = ("parameters", *names)
    rows = [(f"{int(count):,}", *(f"{times[name]:.2f}" for name in names)) for count, times in found.items()]
    return "\n\n".join([table(header, rows), provenance(record)])


def schedule(record: Record) -> str:
    found = record["numbers"]
    text = (
        f"{found['meta_steps']} meta-steps over {found['hyperparameters']:,} hyperparameters on {found['data']} took "
        f"{found['seconds']:.1f} s, the first of them, which compiles, {found['first']:.1f} s."
    )
    return "\n\n".join([text, provenance(record)])


def start(record: Record) -> str:
    numbers = record["numbers"]
    rows = [
        (WORKLOADS[name].title, *(f"{statistics.median(seconds[road]):.2f}" for road in seconds), _ratio(seconds))
        for name, seconds in numbers["compiling"].items()
    ]
    roads = list(next(iter(numbers["compiling"].values())))
    importing = starting.beyond(numbers["imports"])
    text = f"`import hypergrad` takes {importing:.2f} s beyond its dependencies."
    return "\n\n".join([table(("seconds to compile", *roads, "ours / unroll"), rows), text, provenance(record)])


def curves(record: Record) -> str:
    pictures = [f"![{p['caption']}](images/performance-{p['file']})\n\n*{p['caption']}.*" for p in record["pictures"]]
    found = record["numbers"]["curves"]
    last = lambda road, key: road[key][-1]  # noqa: E731
    rows = [
        (name, f"{road['steps'][-1]:,}", f"{1e3 * last(road, 'seconds'):,.0f}", _mebibytes(last(road, "bytes")),
         _mebibytes(last(road, "predicted_bytes")))
        for name, road in found.items()
    ]  # fmt: skip
    return "\n\n".join([*pictures, table(("", "steps", "ms", "MiB", "MiB, predicted"), rows), provenance(record)])


def integers(record: Record) -> str:
    found = record["numbers"]
    forward, backward = found["nanoseconds"]["forward"], found["nanoseconds"]["backward"]
    text = (
        f"One Python integer per parameter, on {found['steps']} steps of the first network: {found['ratio']:.1f} times "
        f"plain training. Beyond plain training that is {forward:.0f} ns per parameter and step on the way out and "
        f"{backward:.0f} on the way back, gradients recomputed and differentiated there included."
    )
    return "\n\n".join([text, provenance(record)])


# Place on the page -> (record, what is written there).
SECTIONS: dict[str, tuple[str, Callable[[Record], str]]] = {
    **{f"{name} summary": (name, summary) for name in WORKLOADS},
    **{name: (name, workload) for name in WORKLOADS},
    "exact_layer": ("exact_layer", exact_layer),
    "schedule": ("schedule", schedule),
    "start": ("start", start),
    "curves": ("curves", curves),
    "integers": ("integers", integers),
}


def table(header: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def provenance(record: Record) -> str:
    versions, numbers = record["versions"], record["numbers"]
    machine, rounds = numbers["machine"], numbers.get("rounds", record["config"]["rounds"])
    defaults = dataclasses.asdict(performance.Config())
    given = {name: record["config"].get(name, defaults[name]) for name in ("seconds", "total")}
    options = "".join(f" --{name} {value:g}" for name, value in given.items() if value != defaults[name])
    return (
        f"`python -m experiments.benchmarks.performance --parts {record['experiment']}{options}`, {rounds} rounds: "
        f"{machine['processor']}, {record['cores']} cores, Python {versions['python']}, jax {versions['jax']}, jaxlib "
        f"{versions['jaxlib']}, equinox {machine['equinox']}."
    )


def _ratio(seconds: dict[str, list[float]]) -> str:
    return f"{starting.compile_ratio(seconds):.2f}"


def _mebibytes(size: float | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f}" if size < 100 * 2**20 else f"{size / 2**20:,.0f}"


def _number(x: float | None, form: str) -> str:
    return "" if x is None else format(x, form)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
