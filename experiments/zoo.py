"""Every loss of the zoo has one hypergradient, whatever the mode and the rule: that of `hg.Unrolled`.

    python -m experiments.zoo [--together | --only NAME ...] [--modes eager jit vmap ...] [--rules sgd adam clipped] [...]

The zoo is in `tests/adversarial`: losses as people write them, many with derivative rules of their own. Each is trained for
a few steps and differentiated in its initial parameters, theta and the rate, or in some of them by turns: eagerly, in
programs of one and of several lanes, by microbatches (the mean of two batches, each one part), along the other ways to
run, and by several pulls through one run, as `jax.jacrev` makes them. In float64 the two roads agree to 1e-9, leaf by leaf;
in float32 the result is finite, and near that of float64 where the loss is smooth. The oracle is judged too, once for each
loss: beside differences of the run where those make sense, and beside SGD written down plainly with `lax.scan`. Exit status
1 if one differs, is refused or crashes.

With `--together` up to five losses are one program, of their sum, in float64 alone, and each rule is tried in one of the
modes, by turns: an hour where everything takes a day.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import hypergrad as hg
from experiments import _judge
from experiments._judge import Verdict
from experiments._together import MOMENTUM, STEPS, Together, groups, zoo


FLOAT32 = 1e-3  # how near float32 has to be to float64, where the loss is smooth
PLAIN = 1e-6  # how near training without a grid is

RULES: dict[str, Callable[[Any], Any]] = {  # of the rates: one for each loss that is trained
    "sgd": lambda rates: hg.SGD(rates, MOMENTUM),
    "adam": lambda rates: hg.Adam(jax.tree.map(lambda a: a / 10, rates)),
    "clipped": lambda rates: hg.clip_by_global_norm(hg.HeavyBall(jax.tree.map(lambda a: a / 10, rates), MOMENTUM), 0.5),
}
SMOOTH = {  # for differences: Adam's first steps are signs, which cross zero within any distance
    **RULES,
    "adam": lambda rates: hg.Adam(jax.tree.map(lambda a: a / 3, rates), eps=0.1),
}
MICROBATCHES = "microbatches"
WAYS = {  # other ways to run what Python calls
    "host": hg.Reversible(driver="host"),
    "stored": hg.Reversible(buffer="host"),
    "isolated": hg.Reversible(isolate=True),
}
PULLS = "pulls"
MODES = (*_judge.MODES, MICROBATCHES)
ASKED = (("params", "theta", "rate"), ("theta",), ("rate",), ("theta", "rate"))  # what is differentiated, by turns
VARIED = (("key",), ("rate",))  # what differs between lanes, by turns


class Row(NamedTuple):
    """One case of the table."""

    name: str
    what: str
    verdict: Verdict
    seconds: float

    def __str__(self) -> str:
        error = "" if self.verdict.error != self.verdict.error else f" {self.verdict.error:.1e}"
        return f"{self.name:28s} {self.what:34s} {self.seconds:6.1f} s  {self.verdict.kind}{error} {self.verdict.detail}"


def of_the_oracle(entry: zoo.Entry, steps: int = STEPS) -> list[tuple[str, Verdict]]:
    """`hg.Unrolled` beside plain SGD, and beside differences of SGD, Adam and clipped runs."""
    with jax.enable_x64(True):
        together = Together([entry], jnp.float64)
        case = together.case(RULES["sgd"], steps)
        truth = _judge.oracle(case)(*case.lane(0))
        plain = jax.jit(jax.value_and_grad(together.plainly(steps)))(*case.lane(0))
        rows = [("plain SGD", _judge.compare([truth], [plain], max(PLAIN, entry.tolerance)))]
        for name, rule in SMOOTH.items() if entry.smooth else ():
            case = together.case(rule, steps)
            claimed, difference = _judge.slope(case, _judge.oracle(case)(*case.lane(0))[1])
            error = abs(claimed - difference) / (abs(difference) + 1e-3)
            rows.append((f"differences of {name}", Verdict("equal" if error < 1e-6 else "DIFFERENT", "", error)))
        return rows


def in_float64(entries: Sequence[zoo.Entry], rule: str, modes: Sequence[str], turn: int, steps: int = STEPS) -> list[Any]:
    """[(what was asked, verdict)], one for each mode; turn: which of `ASKED` and `VARIED` comes first."""
    rows = []
    with jax.enable_x64(True):
        together = Together(entries, jnp.float64)
        expected: dict[bool, Any] = {}
        for i, mode in enumerate(modes):
            names, varied = ASKED[(turn + i) % len(ASKED)], VARIED[(turn + i) % len(VARIED)]
            if mode == "vmap" and not set(varied) & {"key", *names}:
                varied = ("key",)
            cut = mode == MICROBATCHES
            case = together.case(RULES[rule], steps, varied, cut)
            if cut not in expected:
                expected[cut] = _judge.oracle(case)
            tolerance = max(entry.tolerance for entry in entries)
            asked = f"float64 {rule} {mode}, in {' '.join(names)}"
            ask = case, names, called(mode), tolerance, expected[cut], WAYS.get(mode)
            rows.append((asked, lambda ask=ask: _judge.judge(*ask)))
        return [(asked, compute()) for asked, compute in rows]


def called(mode: str) -> str:
    """How: one of `_judge.MODES`."""
    return "jit" if mode == MICROBATCHES else "eager" if mode in WAYS else mode


def in_float32(entry: zoo.Entry, rule: str, modes: Sequence[str], turn: int, steps: int = STEPS) -> list[Any]:
    """Finite; and near the derivative of float64 where the loss is smooth, or as near as a change by one ulp leaves it."""
    with jax.enable_x64(True):
        case = Together([entry], jnp.float64).case(RULES[rule], steps)
        compute = _judge.oracle(case)
        truths = {varied: [compute(*case._replace(varied=varied).lane(i)) for i in range(_judge.LANES)] for varied in VARIED}
        h, key = case.lane(0)
        nudged = compute(jax.tree.map(lambda x: x * (1 + 2.0**-23), h), key)
        truths, nudged = jax.tree.map(jax.device_get, (truths, nudged))
    sensitivity = max(error for _, error in _judge.distances(nudged[1], truths[VARIED[0]][0][1]))
    tolerance = max(FLOAT32, 30 * sensitivity, entry.tolerance) if entry.smooth else float("inf")
    rows = []
    together = Together([entry], jnp.float32)
    for i, mode in enumerate(mode for mode in modes if mode != MICROBATCHES):
        names, varied = ASKED[(turn + i) % len(ASKED)], VARIED[(turn + i) % len(VARIED)]
        case = together.case(RULES[rule], steps, varied)
        ask = case.asking(*names), called(mode), WAYS.get(mode)
        found, verdict, said = _judge.attempt(lambda: _judge.reversed_gradients(*ask))  # noqa: B023
        if verdict is None:
            truth = [(value, {k: gradient[k] for k in names}) for value, gradient in truths[varied][: len(found)]]
            verdict = _judge.compare(found, truth, tolerance, said)
        rows.append((f"float32 {rule} {mode}, in {' '.join(names)}", verdict))
    return rows


def rows_of(entry: zoo.Entry, arguments: argparse.Namespace, number: int) -> Any:
    """The table of one loss, row by row."""
    pieces: list[Callable[[], list[Any]]] = [lambda: of_the_oracle(entry, arguments.steps)] if arguments.oracle else []
    functions = {"float64": lambda *a: in_float64([entry], *a), "float32": lambda *a: in_float32(entry, *a)}
    for (i, rule), dtype in itertools.product(enumerate(arguments.rules), arguments.dtypes):
        ask = functions[dtype], rule, arguments.modes, number + i, arguments.steps
        pieces.append(lambda ask=ask: ask[0](*ask[1:]))
    for piece in pieces:
        begin = time.perf_counter()
        found, failure, _ = _judge.attempt(piece)
        found = found if failure is None else [("everything", failure)]
        for what, verdict in found:
            yield Row(entry.name, what, verdict, (time.perf_counter() - begin) / len(found))


def rows_together(group: list[zoo.Entry], arguments: argparse.Namespace, number: int) -> Any:
    """The table of some losses that are trained as one: each rule in a mode, by turns."""
    name = " ".join(entry.name for entry in group)
    for i, rule in enumerate(arguments.rules):
        begin, turn = time.perf_counter(), number + i
        ask = group, rule, [arguments.modes[turn % len(arguments.modes)]], turn, arguments.steps
        found, failure, _ = _judge.attempt(lambda: in_float64(*ask))  # noqa: B023
        for what, verdict in found if failure is None else [("everything", failure)]:
            yield Row(name, what, verdict, time.perf_counter() - begin)


def main(arguments: argparse.Namespace) -> int:
    known, rows, losses = zoo.entries(), [], 0
    if arguments.together:
        tables = [(len(group), rows_together(group, arguments, i)) for i, group in enumerate(groups())]
    else:
        tables = [(1, rows_of(known[name], arguments, i)) for i, name in enumerate(arguments.only or known)]
    for count, table in tables:
        losses += count
        for row in table:
            rows.append(row)
            print(row, flush=True)
        jax.clear_caches()  # each program takes some of the maps of memory that a process may have
    print(f"\njax {jax.__version__}: {len(rows)} cases of {losses} losses")
    for kind in sorted({row.verdict.kind for row in rows}):
        print(f"{sum(row.verdict.kind == kind for row in rows):6d} {kind}")
    bad = [row for row in rows if not row.verdict.fine]
    print("\n".join(str(row) for row in bad))
    return 1 if bad else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="*", metavar="NAME", choices=list(zoo.entries()), help="these losses; else all")
    which.add_argument("--together", action="store_true", help="up to five losses as one, each rule in one mode")
    parser.add_argument("--modes", nargs="+", choices=(*MODES, *WAYS, PULLS), default=MODES)
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--dtypes", nargs="+", choices=("float64", "float32"), default=("float64", "float32"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--no-oracle", dest="oracle", action="store_false", help="do not judge hg.Unrolled itself")
    return parser


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
