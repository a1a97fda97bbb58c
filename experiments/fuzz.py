"""Random training, differentiated along `hg.Reversible` and along `hg.Unrolled`: is there one that differs without a word?

    python -m experiments.fuzz [--minutes 15 | --cases N] [--first SEED] [--only SEED ...] [--part quick|full] [--log FILE]

A case is made of its number alone: a loss drawn from a grammar of JAX (`experiments/_grammar.py`), some of them with
derivative rules of their own, an optimizer with transformations and statistics, floats, batches, a mode, and what is
differentiated. `--only` runs one again and prints its loss. Several processes may share the numbers: `--first 0 --cases
1000` and `--first 1000 --cases 1000`. Those from 1000000 on draw the rules that came later; from 2000000 on they read rows
and steps of theta besides; from 3000000 on they draw of all rules and train with microbatches; from 4000000 on they draw
rules of matrices and partitions, too, go back by `hg.record` and other roads, go on from a state, and measure; from 5000000
on theta has a complex number; from 6000000 on there are rules and transformations of one's own, some of which round or bend
what passes through them, floats of 8 bits, parameters in 16, and more of JAX.

Three cases in four are compiled with few of XLA's optimizations; `--part quick` runs those alone, in two thirds of their
time since all of the process is compiled so, `--part full` the others. A difference is tried again as users compile, in a
process of its own, and only that counts. The last table counts what came of them; exit status 1 if one differs, or fails in
words that are not the library's.
"""

import argparse
import collections
import functools
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import hypergrad as hg
from experiments import _judge, _quick, _seeds
from experiments._case_roads import ADJOINTS
from experiments._cases import Drawn, draw
from experiments._judge import Verdict


KINDS = {
    "equal": "equal",
    "isolated": "equal, the gradients computed apart from their derivatives",
    "refused": "refused in words",
    "diverged": "diverged, both",
    "unclear": "too sensitive to rounding to say",
    "DIFFERENT": "DIFFERENT, silently",
    "CRASHED": "CRASHED",
}
TOLERANCES = {"": 1e-9, "32 bits": 1e-4, "16 bits": 0.05}  # relative, by the narrowest floats
ULPS = {"": 2.0**-52, "32 bits": 2.0**-23, "16 bits": 2.0**-8}
ROUNDINGS = 100.0  # what roads may differ by, in changes of the result by one rounding of every input
BLUR = 0.3  # where such a difference says nothing
FORGET = 25  # cases: compiled programs take maps of memory


class Done(NamedTuple):
    seed: int
    verdict: Verdict
    seconds: float
    drawn: Drawn

    def record(self) -> dict[str, Any]:
        error = None if math.isnan(self.verdict.error) else self.verdict.error
        return {
            "seed": self.seed, "kind": self.verdict.kind, "detail": self.verdict.detail, "error": error,
            "seconds": round(self.seconds, 2), "what": self.drawn.what, "marks": sorted(self.drawn.marks),
        }  # fmt: skip

    def __str__(self) -> str:
        error = "" if math.isnan(self.verdict.error) else f" {self.verdict.error:.1e}"
        return f"{self.seed}: {self.verdict.kind}{error} {self.verdict.detail} [{self.drawn.what}] {self.seconds:.1f} s"


def narrowest(drawn: Drawn) -> str:
    """A key of `TOLERANCES`."""
    return "16 bits" if "16 bits" in drawn.marks else "" if drawn.x64 and "32 bits" not in drawn.marks else "32 bits"


def judged(drawn: Drawn, careful: bool = False) -> Verdict:
    """careful: all is compiled as users do, the oracle too."""
    with jax.enable_x64(drawn.x64):
        case = drawn.make()
        compute, floats = _judge.oracle(case, quick=not careful), narrowest(drawn)
        mode = "eager" if drawn.mode in ADJOINTS else drawn.mode
        quick = drawn.quick and not careful and mode in ("jit", "vmap") and jax.default_backend() == "cpu"
        options = {"compiler_options": _quick.OPTIONS} if quick else {}
        asked = drawn.names, mode, TOLERANCES[floats], compute, ADJOINTS.get(drawn.mode)
        verdict = _judge.judge(case, *asked, **options)
        if verdict.kind != "DIFFERENT" or math.isnan(verdict.error):
            return verdict
        allowed = ROUNDINGS * sensitivity(case, compute, drawn.names, mode, ULPS[floats])
    if verdict.error > max(allowed, TOLERANCES[floats]):
        return verdict
    if allowed < BLUR:
        return verdict._replace(kind="equal", detail="within what roundings do")
    return verdict._replace(kind="unclear", detail="")


def carefully(drawn: Drawn) -> Verdict:
    """The case once more, in a process that compiles as users do: with few optimizations XLA gives some wrong gradients."""
    with tempfile.NamedTemporaryFile("r") as log:
        command = [sys.executable, "-m", "experiments.fuzz", "--careful", "--only", str(drawn.seed), "--log", log.name]
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        subprocess.run(command, env=environment, capture_output=True, check=False)
        found = json.loads(log.read() or "{}")
    if not found:
        return Verdict("CRASHED", "in a process of its own")
    detail = found["detail"] if found["kind"] == "DIFFERENT" else "by XLA's full compilation, and not by its quick one"
    return Verdict(found["kind"], detail, math.nan if found["error"] is None else found["error"])


def sensitivity(case: _judge.Case, compute: Any, names: tuple[str, ...], mode: str, ulp: float) -> float:
    """By how much the derivative along the oracle changes where every number is rounded otherwise: what goes in, and what
    it computes on the way, outside of `jit`: a branch may hang on a sum of data that is zero but for roundings."""
    worst = 0.0
    outside = lambda h, key: jax.value_and_grad(case.value)(h, key, hg.Unrolled())  # noqa: E731
    for h, key in _judge.asked(case, mode):
        value, gradient = compute(h, key)
        up, down = (jax.tree.map(functools.partial(rounded_otherwise, sign * ulp), h) for sign in (1, -1))
        for moved, other in (compute(up, key), compute(down, key), outside(h, key)):
            pair = {k: other[k] for k in names}, {k: gradient[k] for k in names}
            of_value = abs(float(moved) - float(value)) / (abs(float(value)) + 1e-6)
            worst = max(worst, of_value, *(error for _, error in _judge.distances(*pair)))
    return worst


def rounded_otherwise(ulp: float, x: Any) -> Any:
    return x * (1 + ulp * jnp.cos(jnp.arange(x.size) + 1.0).reshape(x.shape)).astype(x.dtype)


def run(drawn: Drawn, careful: bool = False) -> Done:
    begin = time.perf_counter()
    quick = drawn.quick and not careful
    jax.config.update("jax_disable_most_optimizations", quick)  # all that is not jitted here has no other switch
    verdict, failure, _ = _judge.attempt(lambda: judged(drawn, careful))
    jax.config.update("jax_disable_most_optimizations", False)
    return Done(drawn.seed, failure or verdict, time.perf_counter() - begin, drawn)


def cases(arguments: argparse.Namespace) -> Iterator[Drawn]:
    for drawn in map(draw, _seeds.seeds(arguments)):
        if arguments.only or arguments.part is None or drawn.quick == (arguments.part == "quick"):
            yield drawn


def table(done: list[Done]) -> str:
    counts = collections.Counter(d.verdict.kind for d in done)
    lines = [f"{len(done)} cases, {sum(d.seconds for d in done) / max(len(done), 1):.1f} s each, jax {jax.__version__}"]
    lines += [f"{counts[k]:6d} {100 * counts[k] / max(len(done), 1):6.2f}%  {words}" for k, words in KINDS.items()]
    reasons = collections.Counter((d.verdict.kind, d.verdict.detail) for d in done if d.verdict.kind == "refused")
    lines += [f"{n:6d} {100 * n / len(done):6.2f}%    refused: {detail}" for (_, detail), n in reasons.most_common()]
    return "\n".join([*lines, *(str(d) for d in done if d.verdict.kind.isupper())])


def main(arguments: argparse.Namespace) -> int:
    if arguments.part == "quick":
        _quick.whole_process()
    forget_context = _quick.lower_in_one_context()
    gc.set_threshold(100_000, 50, 100)  # tracing makes many objects that live for a while: a tenth of the time
    done: list[Done] = []
    log = open(arguments.log, "a") if arguments.log else None  # noqa: SIM115
    for i, drawn in enumerate(cases(arguments)):
        result = run(drawn, arguments.careful)
        if result.verdict.kind == "DIFFERENT" and not arguments.careful:
            result = result._replace(verdict=carefully(drawn))
        done.append(result._replace(drawn=result.drawn._replace(make=None)))
        if arguments.only:
            print(f"{result.drawn.source}\n{result.drawn.what}")
        if arguments.only or arguments.verbose or result.verdict.kind.isupper():
            print(result, flush=True)
        if log is not None:
            print(json.dumps(result.record()), file=log, flush=True)
        if (i + 1) % FORGET == 0:
            jax.clear_caches()
            forget_context()
            kinds = collections.Counter(d.verdict.kind for d in done)
            print(f"seed {drawn.seed}: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}", flush=True)
    if log is not None:
        log.close()
    print(table(done))
    return int(any(d.verdict.kind.isupper() for d in done))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _seeds.add_arguments(parser, 15.0)
    parser.add_argument("--part", choices=["quick", "full"], help="only the cases that are compiled so")
    parser.add_argument("--careful", action="store_true", help="compile everything as users do, the oracle too")
    parser.add_argument("--log", metavar="FILE", help="a line of JSON for each case is added to it")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    return parser


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
