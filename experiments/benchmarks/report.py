"""Write the records of `experiments.benchmarks.performance` into README.md, docs/performance.md and LOG.md.

    python -m experiments.benchmarks.report [--results results/performance]

Invariant: the tables of the README and of the page come from one record in one run, each method in its fastest form. They
stand between `<!-- begin NAME -->` and `<!-- end NAME -->`; all else is written by hand and stays, and so does what has no
record. Every form of every method goes to the end of the log, under the day of its record; nothing in the log changes.
"""

import dataclasses
import datetime
import functools
import pathlib
from collections.abc import Callable

import tyro

from experiments import _record
from experiments.benchmarks import _tables
from experiments.benchmarks.workloads import WORKLOADS
from experiments.report import copy_small


@dataclasses.dataclass(frozen=True)
class Config:
    results: pathlib.Path = pathlib.Path("results/performance")
    docs: pathlib.Path = pathlib.Path("docs")
    readme: pathlib.Path = pathlib.Path("README.md")
    log: pathlib.Path = pathlib.Path("experiments/benchmarks/LOG.md")
    width: int = 900  # of a picture's copy, in pixels


Section = Callable[[_tables.Record], str]

WORKLOAD_TABLES = ("mlp", "wide_mlp", "conv")

# Place in docs/performance.md -> (record, what is written there).
PAGE: dict[str, tuple[str, Section]] = {
    **{f"{name} summary": (name, _tables.summary) for name in WORKLOADS},
    **{name: (name, _tables.chosen) for name in WORKLOAD_TABLES},
    "curves": ("curves", _tables.pictures),
    "start": ("start", _tables.compiling),
    "schedule": ("schedule", functools.partial(_tables.schedule, where=_tables.machine)),
}
README: dict[str, tuple[str, Section]] = {"cost": ("mlp", _tables.cost)}
# Record -> its section of the log.
IN_FULL: dict[str, Section] = {
    **dict.fromkeys(WORKLOADS, _tables.workload),
    "exact_layer": _tables.exact_layer,
    "schedule": _tables.schedule,
    "start": _tables.start,
    "curves": _tables.curves,
    "integers": _tables.integers,
}


def main(config: Config) -> pathlib.Path:
    page = config.docs / "performance.md"
    for document, sections in ((page, PAGE), (config.readme, README)):
        text = document.read_text()
        for name, (part, section) in sections.items():
            path = config.results / f"{part}.json"
            if path.exists():
                text = filled(text, name, section(_record.read(path)))
            print(f"{document.name:16} {name:24} {path if path.exists() else 'kept as it was'}")
        document.write_text(text)
    for path in filter(pathlib.Path.exists, (config.results / f"{part}.json" for part in IN_FULL)):
        record, day = _record.read(path), datetime.date.fromtimestamp(path.stat().st_mtime)
        config.log.write_text(logged(config.log.read_text(), f"{day}: {path.stem}", IN_FULL[path.stem](record)))
        for picture in record["pictures"]:
            target = config.docs / "images" / f"performance-{picture['file']}"
            copy_small(config.results / picture["file"], target, config.width)
    return page


def logged(log: str, title: str, section: str) -> str:
    """The log with a section at its end, once."""
    return log if section in log else f"{log.rstrip()}\n\n## {title}\n\n{section}\n"


def filled(page: str, name: str, section: str) -> str:
    """The page with its place called `name` filled anew."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has no place called {name!r}: it needs one line {begin} and, after it, one line {end}")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{section}\n\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
