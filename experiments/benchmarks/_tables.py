"""The sentences and tables that a record of `experiments.benchmarks.performance` becomes.

Invariant: each is a function of one record alone, and what the README and the page say of a method is one road of it.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from experiments.benchmarks import performance, starting
from experiments.benchmarks.workloads import WORKLOADS


Record = dict[str, Any]

# The start of a road's name -> what a reader is told. The rest of the name is the form it was measured in.
METHODS = {
    "plain training": "plain training, no gradient",
    "exact training": "exact training, no gradient",
    "hg.Reversible": "**`hg.Reversible`**",
    "unroll": "unrolled, everything stored",
    "remat": "each step rematerialized",
    "sqrt-remat": "sqrt(T) states, rematerialized",
    "equinox, 8 states": "`equinox`, 8 checkpoints",
    "equinox, default": "`equinox`, its default",
    "replay tree, 4-ary": "4-ary replay tree",
    "torch: plain training": "torch, no gradient",
    "torch: higher": "torch, `higher`",
    "torch: torchopt": "torch, `torchopt`",
}
FROM_PYTHON = ("loop", "host")
IN_README = (
    "plain training", "exact training", "hg.Reversible", "unroll", "remat", "sqrt-remat", "equinox, 8 states",
    "torch: higher",
)  # fmt: skip


def method(road: Record) -> str:
    """The key of `METHODS` that a road belongs to."""
    name = road["name"]
    return max((key for key in METHODS if name == key or name.startswith(f"{key}, ")), key=len)


def label(road: Record) -> str:
    key = method(road)
    return METHODS[key] + ", from Python" * (road["name"].removeprefix(f"{key}, ") in FROM_PYTHON)


def fastest(roads: list[Record]) -> dict[str, Record]:
    """Of each method, the road that took least; in the order of the roads."""
    found: dict[str, Record] = {}
    for road in roads:
        key = method(road)
        if key not in found or _median(road) < _median(found[key]):
            found[key] = road
    return found


def chosen(record: Record) -> str:
    """The table of one workload: each method in its fastest form."""
    numbers = record["numbers"]
    rows = []
    for road in fastest(numbers["roads"]).values():
        name = label(road) + f", {road['steps']} steps" * (road["steps"] != numbers["steps"])
        low, high = min(road["ratios"]), max(road["ratios"])
        rows.append(
            (name, f"{_median(road):.2f}", f"{low:.2f}–{high:.2f}", _mebibytes(road["bytes"]),
             _mebibytes(road["predicted_bytes"]))
        )  # fmt: skip
    plain = min((road for road in numbers["roads"] if road["kind"] == "plain"), key=_seconds)
    sentence = f"{numbers['parameters']:,} parameters. A step of plain training takes {1e3 * _seconds(plain):.3g} ms."
    ours = [road for road in numbers["roads"] if road["name"] == "hg.Reversible, scan"]
    own = [f"Scanned in a `jit` without the options, `hg.Reversible` takes {_median(road):.2f}." for road in ours]
    header = ("", "time", "range", "MiB", "MiB, law")
    return "\n\n".join([" ".join([sentence, *own]), table(header, rows), measured(record)])


def cost(record: Record) -> str:
    """The README's table: rows and columns of `chosen`."""
    roads = fastest(record["numbers"]["roads"])
    rows = []
    for key in filter(roads.__contains__, IN_README):
        time, memory = f"{_median(roads[key]):.2f}", _mebibytes(roads[key]["bytes"])
        bold = "**" if key == "hg.Reversible" else ""
        rows.append((METHODS[key], f"{bold}{time}{bold}", f"{bold}{memory}{bold}"))
    return "\n\n".join([table(("", "time", "MiB"), rows), measured(record)])


def summary(record: Record) -> str:
    """Of one workload, a line at the top of the page: ours, and the best of the others."""
    roads = record["numbers"]["roads"]
    others = [road for road in roads if road["kind"] == "opponent"]
    ours = min((road for road in roads if road["kind"] == "ours"), key=_median)
    small = min(
        (road for road in others if road["bytes"]), key=lambda road: (round(road["bytes"] / 2**20, 1), _median(road))
    )

    shown = fastest(roads).values()

    def told(road: Record) -> str:
        name = label(road) + ", not in the form of the table" * (road not in shown)
        return f"{_median(road):.2f} in {_mebibytes(road['bytes'])} MiB ({name})"

    return (
        f"{_median(ours):.2f} times plain training in {_mebibytes(ours['bytes'])} MiB. The fastest other way takes "
        f"{told(min(others, key=_median))}, the smallest {told(small)}."
    )


def workload(record: Record) -> str:
    """All roads on one model."""
    numbers = record["numbers"]
    header = ("", "x plain", "from", "to", "rounds", "MiB", "MiB, predicted", "gradients, predicted")
    rows = []
    for road in numbers["roads"]:
        steps = "" if road["steps"] == numbers["steps"] else f", timed on {road['steps']} steps"
        name = f"**{road['name']}**" if road["kind"] == "ours" else road["name"]
        rows.append(
            (
                name + steps, f"{_median(road):.2f}", f"{min(road['ratios']):.2f}",
                f"{max(road['ratios']):.2f}", len(road["ratios"]), _mebibytes(road["bytes"]),
                _mebibytes(road["predicted_bytes"]), _number(road["predicted_time"], ".2f"),
            )
        )  # fmt: skip
    plain = [road for road in numbers["roads"] if road["kind"] == "plain"]
    first = min(plain, key=_seconds)
    step = f"A step of plain training takes {1e3 * _seconds(first):.3g} ms ({first['name']})."
    sentence = f"{numbers['parameters']:,} parameters. {step}"
    return "\n\n".join([sentence, table(header, rows), provenance(record)])


def exact_layer(record: Record) -> str:
    found = record["numbers"]["nanoseconds"]
    names = list(next(iter(found.values())))
    header = ("parameters", *names)
    rows = [(f"{int(count):,}", *(f"{times[name]:.2f}" for name in names)) for count, times in found.items()]
    return "\n\n".join([table(header, rows), provenance(record)])


def schedule(record: Record, where: Callable[[Record], str] | None = None) -> str:
    """where: what says where it was measured; None: `provenance`."""
    found = record["numbers"]
    text = (
        f"{found['meta_steps']} meta-steps over {found['hyperparameters']:,} hyperparameters on {found['data']} took "
        f"{found['seconds']:.1f} s, the first of them, which compiles, {found['first']:.1f} s."
    )
    return "\n\n".join([text, (where or provenance)(record)])


def compiling(record: Record) -> str:
    """One sentence of what `start` has in full."""
    numbers = record["numbers"]
    seconds = [statistics.median(s["hg.Reversible, as hg.optimize compiles"]) for s in numbers["compiling"].values()]
    ratios = [starting.compile_ratio(s) for s in numbers["compiling"].values()]
    text = (
        f"To trace and compile one hypergradient takes {min(seconds):.1f} to {max(seconds):.1f} s for the models above, "
        f"{min(ratios):.2f} to {max(ratios):.2f} times what the unroll takes. `import hypergrad` takes "
        f"{starting.beyond(numbers['imports']):.2f} s beyond its dependencies."
    )
    return "\n\n".join([text, measured(record)])


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


def pictures(record: Record) -> str:
    shown = [f"![{p['file']}](images/performance-{p['file']})\n\n*{p['caption']}.*" for p in record["pictures"]]
    return "\n\n".join([*shown, measured(record)])


def curves(record: Record) -> str:
    found = record["numbers"]["curves"]
    last = lambda road, key: road[key][-1]  # noqa: E731
    rows = [
        (name, f"{road['steps'][-1]:,}", f"{1e3 * last(road, 'seconds'):,.0f}", _mebibytes(last(road, "bytes")),
         _mebibytes(last(road, "predicted_bytes")))
        for name, road in found.items()
    ]  # fmt: skip
    return "\n\n".join([table(("", "steps", "ms", "MiB", "MiB, predicted"), rows), provenance(record)])


def integers(record: Record) -> str:
    found = record["numbers"]
    forward, backward = found["nanoseconds"]["forward"], found["nanoseconds"]["backward"]
    text = (
        f"One Python integer per parameter, on {found['steps']} steps of the first network: {found['ratio']:.1f} times "
        f"plain training. Beyond plain training that is {forward:.0f} ns per parameter and step forward and "
        f"{backward:.0f} in reverse, gradients recomputed and differentiated there included."
    )
    return "\n\n".join([text, provenance(record)])


def table(header: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def measured(record: Record) -> str:
    """How and where, in short; `provenance` is for the log."""
    return f"Medians of up to {_rounds(record)} rounds; {machine(record)}"


def machine(record: Record) -> str:
    return f"{record['numbers']['machine']['processor']}, {record['cores']} cores, jax {record['versions']['jax']}."


def provenance(record: Record) -> str:
    versions, numbers = record["versions"], record["numbers"]
    where, rounds = numbers["machine"], _rounds(record)
    defaults = dataclasses.asdict(performance.Config())
    given = {name: record["config"].get(name, defaults[name]) for name in ("seconds", "total")}
    options = "".join(f" --{name} {value:g}" for name, value in given.items() if value != defaults[name])
    return (
        f"`python -m experiments.benchmarks.performance --parts {record['experiment']}{options}`, {rounds} rounds: "
        f"{where['processor']}, {record['cores']} cores, Python {versions['python']}, jax {versions['jax']}, jaxlib "
        f"{versions['jaxlib']}, equinox {where['equinox']}."
    )


def _rounds(record: Record) -> int:
    return record["numbers"].get("rounds", record["config"]["rounds"])


def _median(road: Record) -> float:
    """Time in units of plain training."""
    return statistics.median(road["ratios"])


def _seconds(road: Record) -> float:
    return statistics.median(road["seconds"]) / road["steps"]


def _ratio(seconds: dict[str, Sequence[float]]) -> str:
    return f"{starting.compile_ratio(seconds):.2f}"


def _mebibytes(size: float | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f}" if size < 100 * 2**20 else f"{size / 2**20:,.0f}"


def _number(x: float | None, form: str) -> str:
    return "" if x is None else format(x, form)
