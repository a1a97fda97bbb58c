"""Beyond the thesis: rules of curvature with rate and damping from a grid, as BackPACK's paper has them, and learned.

    python -m experiments.curvature_optimizers [--problems "logreg" "2c2d" ..] [--seeds 3] [--tiny]

The rules of BackPACK's Equation 4 (momentum and averages of 2^-16), by a sampled diagonal (DiagonalGGNMC) and by Kronecker
factors (KFAC), on its test problems in the small; momentum 0.9 and Adam beside them. The paper searches the rate in 1e-4 ..
1 and the damping in 1e-4 .. 10, by decades: 30 trainings of one seed, the best by the validation loss at the end. Here the
rate and the damping, each a curve through five knots, also follow their hypergradient from the middle of that grid, rate
1e-2 and damping 3e-2, for 7 meta-steps. A hypergradient counts as four trainings, so that both have as many gradients. What
is compared is the test loss of trainings that no choice has seen, one for each seed.

On digits the diagonal rule gains by it on the second problem; on the first the gain is within what seeds scatter by. The
Kronecker rule does not: on the first both ways end alike, and on the second learning lowers the training loss most of all,
and not the test loss.

Without data the problems are logistic regression and the 2C2D network on scikit-learn's digits; from the folder
HYPERGRAD_DATA, "logreg, MNIST", "2c2d, Fashion-MNIST" and "3c3d, CIFAR-10" (3,000 images to train on), the networks at a
tenth of the width.
"""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array

import hypergrad as hg
from experiments import _curvature_plots, _plots, _record
from experiments._curvature_tasks import Problem, problem
from experiments._record import Row


@dataclasses.dataclass(frozen=True)
class Config:
    problems: tuple[str, ...] = ("logreg", "2c2d")
    rules: tuple[str, ...] = ("DiagonalGGNMC", "KFAC", "momentum", "Adam")
    seeds: int = 3
    steps: int = 150
    meta_steps: int = 7
    meta_learning_rate: float = 0.5  # of logarithms
    knots: int = 5
    tiny: bool = False  # a run of seconds, for the tests
    out: pathlib.Path = pathlib.Path("results/curvature_optimizers")

    def shrunk(self) -> "Config":
        small = {"seeds": 1, "steps": 5, "meta_steps": 1, "knots": 2}
        return dataclasses.replace(self, problems=("logreg",), rules=("DiagonalGGNMC",), **small)


RATES, DAMPINGS = 10.0 ** np.arange(-4, 1), 10.0 ** np.arange(-4, 2)
MIDDLE = {"rate": 1e-2, "damping": 10**-1.5}
LEAST = 2.0**-16  # the momentum and the average of a rule that has neither

Point = dict[str, Any]  # natural values: "rate" [steps], and "damping" [steps] where the rule has one


class Rule(NamedTuple):
    make: Callable[[Point], Any]
    grid: list[dict[str, float]]


_BOTH = [{"rate": a, "damping": d} for a, d in itertools.product(RATES, DAMPINGS)]
_LINE = [{"rate": a} for a in np.geomspace(1e-4, 1, 30)]
RULES = {
    "DiagonalGGNMC": Rule(lambda h: hg.DiagonalGGNMC(hg.PerStep(h["rate"]), hg.PerStep(h["damping"]), LEAST, LEAST), _BOTH),
    "KFAC": Rule(lambda h: hg.KFAC(hg.PerStep(h["rate"]), hg.PerStep(h["damping"]), LEAST, LEAST), _BOTH),
    "momentum": Rule(lambda h: hg.HeavyBall(hg.PerStep(h["rate"]), 0.9), _LINE),
    "Adam": Rule(lambda h: hg.Adam(hg.PerStep(h["rate"])), _LINE),
}


class Race:
    """One rule on one problem."""

    def __init__(self, config: Config, problem: Problem, rule: Rule) -> None:
        self.config, self.problem, self.rule = config, problem, rule
        self.judge = jax.jit(lambda points, key: jax.lax.map(lambda point: self._judged(point, key), points))

    def trained(self, point: Point, key: Array, throw: bool = True) -> hg.Trained:
        first, second = jax.random.split(key)
        init, batches = self.problem.init(first), self.problem.batches(second)
        return hg.train(
            self.problem.loss, init, self.rule.make(point), batches, steps=self.config.steps, throw=throw
        )  # fmt: skip

    def _judged(self, point: Point, key: Array) -> Array:
        """[validation, test loss, *losses along training]; infinite where training fails."""
        run = self.trained(point, key, throw=False)
        found = [self.problem.judged(run.params, part) for part in ("validation", "test")]
        found = jnp.concatenate([jnp.stack(found), run.losses])
        return jnp.where(jnp.isfinite(found), found, jnp.inf)

    def constant(self, point: dict[str, float]) -> Point:
        return {name: jnp.full(self.config.steps, value) for name, value in point.items()}

    def searched(self, key: Array) -> Point:
        """The best of the grid, by the validation loss of one training each."""
        points = [self.constant(point) for point in self.rule.grid]
        losses = self.judge(jax.tree.map(lambda *x: jnp.stack(x), *points), key)[:, 0]
        return points[int(np.argmin(losses))]

    def learned(self, key: Array) -> Point:
        """From the middle of the grid, by hypergradients."""
        c, names = self.config, list(self.rule.grid[0])
        start = {name: hg.positive(hg.knots(jnp.full(c.knots, MIDDLE[name]), c.steps)) for name in names}
        curves = lambda h: {name: x.values for name, x in h.items()}  # noqa: E731
        result = hg.optimize(
            lambda h, key: self.trained(curves(h), key).params, lambda params: self.problem.judged(params, "validation"),
            start, meta_steps=c.meta_steps, key=key, stop_on_growth=False, skip_nonfinite=True,
            meta_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(c.meta_learning_rate)),
        )  # fmt: skip
        return curves(hg.natural(result.best.hypers))


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    config = config.shrunk() if config.tiny else config
    numbers: dict[str, Any] = {}
    proofs: dict[str, hg.Certificate] = {}
    for name in config.problems:
        numbers[name] = {}
        for rule in config.rules:
            race = Race(config, problem(name), RULES[rule])
            ways = (
                {"grid": race.searched, "learned": race.learned}
                if "damping" in race.rule.grid[0]
                else {"grid": race.searched}
            )
            found: dict[str, Any] = {way: {"test": [], "curves": [], "points": []} for way in ways}
            for seed, (way, choose) in itertools.product(range(config.seeds), ways.items()):
                point = choose(jax.random.key(seed))
                judged = np.asarray(race.judge(jax.tree.map(lambda x: x[None], point), jax.random.key(1000 + seed)))[0]
                found[way]["test"].append(float(judged[1]))
                found[way]["curves"].append(judged[2:].tolist())
                found[way]["points"].append({k: np.asarray(x).tolist() for k, x in point.items()})
                print(f"{name:20} {rule:14} seed {seed} {way:8} test loss {judged[1]:.4f}", flush=True)
            numbers[name][rule] = found
            last = {k: jnp.asarray(x) for k, x in found[list(ways)[-1]]["points"][-1].items()}
            start, batches = problem(name).init(jax.random.key(0)), problem(name).batches(jax.random.key(1))
            proofs[f"{name}, {rule}"] = hg.check_reversal(
                problem(name).loss, start, RULES[rule].make(last), batches, steps=config.steps
            )
    rows = [
        Row("new", f"{name}, {rule}, {way}: test loss", None, *_record.mean_and_spread(found["test"]), why="new")
        for name, of in numbers.items() for rule, ways in of.items() for way, found in ways.items()
    ]  # fmt: skip
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, _curvature_plots.figures(numbers))
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "curvature_optimizers", config, numbers,
        seeds=range(config.seeds), seconds=seconds, certificate=proofs, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return numbers | {"certificate": {name: proof._asdict() for name, proof in proofs.items()}}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
