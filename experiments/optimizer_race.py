"""Beyond the thesis: how far does each optimizer get with constants, and how far when all that it has is learned?

    python -m experiments.optimizer_race [--tasks digits mnist cifar10 characters] [--seeds 3] [--tiny]

Each optimizer's constants are found by random search, 16 trials. From the best of them on, its learning rates, one for each
step, its decays of averages, its weight decay and (of Shampoo) the exponent of the preconditioner follow their
hypergradients for 12 meta-steps; beside that, the search goes on for 32 more trials ("searched on"). Which of the two takes
longer depends on the network: the table has the ratio. A trial, as a meta-step, is three trainings at once. The mixture
takes steps of momentum, Adam and Muon, each of one size, and learns how much of each it takes at each step.

All is done again for each seed. What is compared is the loss on test data of three trainings that no choice has seen.
What is finished lies in the folder laps, and is not done again by the next call.
"""

import dataclasses
import functools
import json
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
from experiments import _optimizer_race_plots, _plots, _record
from experiments._race_rules import CONTESTANTS, PARTS, RATES, Contestant, Point, drawn, learnable, scheduled
from experiments._race_tasks import TASKS, Task
from experiments._record import Row


@dataclasses.dataclass(frozen=True)
class Config:
    tasks: tuple[str, ...] = ("digits",)
    rules: tuple[str, ...] = tuple(CONTESTANTS)
    seeds: int = 3
    steps: int = 200
    trials: int = 16
    more_trials: int = 32
    trainings: int = 3  # of a trial and of a meta-step
    meta_steps: int = 12
    meta_learning_rate: float = 0.1
    tiny: bool = False  # a run of seconds, for the tests
    out: pathlib.Path = pathlib.Path("results/optimizer_race")

    def shrunk(self) -> "Config":
        small = {"seeds": 1, "steps": 6, "trials": 2, "more_trials": 2, "trainings": 2, "meta_steps": 1}
        return dataclasses.replace(self, tasks=("digits",), rules=("mixture",), **small)


class Lap(NamedTuple):
    """One optimizer on one task, with one seed."""

    losses: dict[str, np.ndarray]  # "searched", "searched on", "learned" -> [validation, test]
    seconds: dict[str, float]  # "search", "more search", "learning"; of the first seed with compilation
    hypers: Any  # learned, in natural units


WAYS = ("searched", "searched on", "learned")


class Race:
    """One optimizer on one task."""

    def __init__(self, config: Config, task: Task, contestant: Contestant) -> None:
        self.config, self.task, self.contestant = config, task, contestant
        self.judge = jax.jit(self._judged_all)

    def train_fn(self, point: Point, key: Array) -> Any:
        return self.trained(point, key, True).params

    def trained(self, point: Point, key: Array, throw: bool) -> hg.Trained:
        first, second = jax.random.split(key)
        optimizer = self.contestant.make(point, self.task.labels)
        batches, steps = self.task.batches(second, self.config.steps), self.config.steps
        return hg.train(self.task.loss, self.task.init(first), optimizer, batches, steps=steps, throw=throw)

    def _judged_all(self, points: Point, keys: Array) -> Array:
        """[points, 2]; eight at a time, for the memory that images take."""
        return jax.lax.map(lambda point: self._judged(point, keys), points, batch_size=8)

    def _judged(self, point: Point, keys: Array) -> Array:
        """[validation, test], means over trainings; infinite where one fails."""

        def one(key: Array) -> Array:
            params = self.trained(point, key, False).params
            return jnp.stack([self.task.validation(params), self.task.test(params)])

        losses = jax.vmap(one)(keys).mean(axis=0)
        return jnp.where(jnp.isfinite(losses), losses, jnp.inf)

    def run(self, seed: int) -> Lap:
        c, key = self.config, jax.random.key(1000 + seed)
        rng = np.random.default_rng(seed)
        keys = [jax.random.split(jax.random.fold_in(key, i), c.trainings) for i in range(2)]
        points = scheduled_all(drawn(self.contestant, c.trials + c.more_trials, rng), c.steps)
        clock, losses = [time.perf_counter()], []
        for part in (slice(c.trials), slice(c.trials, None)):
            losses.append(np.asarray(self.judge(jax.tree.map(lambda x, part=part: x[part], points), keys[0]))[:, 0])
            clock.append(time.perf_counter())
        first = _row(points, int(np.argmin(losses[0])))
        longer = _row(points, int(np.argmin(np.concatenate(losses))))
        result = self.learned(first, jax.random.fold_in(key, 2))
        clock.append(time.perf_counter())
        found = hg.natural(result.best.hypers)
        stack = lambda *x: jnp.stack(x)  # noqa: E731
        final = np.asarray(self.judge(jax.tree.map(stack, first, longer, found), keys[1]))
        seconds = dict(zip(("search", "more search", "learning"), np.diff(clock).tolist(), strict=True))
        return Lap(dict(zip(WAYS, final, strict=True)), seconds, jax.device_get(found))

    def learned(self, point: Point, key: Array) -> hg.Result:
        c = self.config
        return hg.optimize(
            self.train_fn, self.task.validation, learnable(point), meta_steps=c.meta_steps, key=key,
            seeds_per_step=c.trainings, meta_optimizer=optax.adam(c.meta_learning_rate), stop_on_growth=False,
        )  # fmt: skip

    def certificate(self, point: Point) -> hg.Certificate:
        first, second = jax.random.split(jax.random.key(0))
        optimizer, steps = self.contestant.make(point, self.task.labels), self.config.steps
        return hg.check_reversal(
            self.task.loss, self.task.init(first), optimizer, self.task.batches(second, steps), steps=steps
        )


def scheduled_all(points: Point, steps: int) -> Point:
    return jax.vmap(functools.partial(scheduled, steps=steps))(points)


def _row(points: Point, i: int) -> Point:
    return jax.tree.map(lambda x: x[i], points)


def _finished(path: pathlib.Path, run: Callable[[], Lap]) -> Lap:
    """The lap that is in the file, or else is run and put there."""
    if not path.exists():
        lap = run()
        values = {name: np.asarray(getattr(x, "values", x)).tolist() for name, x in lap.hypers.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        losses = {way: x.tolist() for way, x in lap.losses.items()}
        path.write_text(json.dumps({"losses": losses, "seconds": lap.seconds, "hypers": values}))
    found = json.loads(path.read_text())
    hypers = {name: hg.PerStep(jnp.asarray(x)) if name in RATES else jnp.asarray(x) for name, x in found["hypers"].items()}
    return Lap({way: np.asarray(x) for way, x in found["losses"].items()}, found["seconds"], hypers)


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    config = config.shrunk() if config.tiny else config
    before = sum(sum(json.loads(path.read_text())["seconds"].values()) for path in (config.out / "laps").glob("*.json"))
    laps: dict[str, dict[str, list[Lap]]] = {}
    proofs: dict[str, hg.Certificate] = {}
    for name in config.tasks:
        task, laps[name] = TASKS[name](), {}
        for rule in config.rules:
            race = Race(config, task, CONTESTANTS[rule])
            laps[name][rule] = []
            for seed in range(config.seeds):
                lap = _finished(config.out / "laps" / f"{name}, {rule}, {seed}.json", lambda: race.run(seed))  # noqa: B023
                laps[name][rule].append(lap)
                shown = ", ".join(f"{way} {losses[1]:.4f}" for way, losses in lap.losses.items())
                times = ", ".join(f"{what} {s:.1f} s" for what, s in lap.seconds.items())
                print(f"{name:10} {rule:12} seed {seed}: test loss {shown}; {times}", flush=True)
            proofs[f"{name}, {rule}"] = race.certificate(laps[name][rule][-1].hypers)
    rows = [row for name in config.tasks for rule in config.rules for row in _rows(name, rule, laps[name][rule])]
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, _optimizer_race_plots.figures(laps, PARTS))
    numbers = {
        name: {rule: [{"losses": lap.losses, "seconds": lap.seconds} for lap in own] for rule, own in of.items()}
        for name, of in laps.items()
    }
    seconds = before + time.perf_counter() - begin
    record = _record.write(
        config.out, "optimizer_race", config, numbers,
        seeds=range(config.seeds), seconds=seconds, certificate=proofs, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return numbers | {"certificate": {name: proof._asdict() for name, proof in proofs.items()}}


def _rows(task: str, rule: str, laps: list[Lap]) -> list[Row]:
    of: Callable[[str], list[Any]] = lambda way: [lap.losses[way][1] for lap in laps]  # noqa: E731
    losses = [
        Row("new", f"{task}, {rule}, {way}: test loss", None, *_record.mean_and_spread(of(way)), why="new") for way in WAYS
    ]
    warm = laps[1:] or laps  # the first compiles
    ratio = float(np.mean([lap.seconds["learning"] / lap.seconds["more search"] for lap in warm]))
    return [*losses, Row("new", f"{task}, {rule}: seconds of learning over those of more search", None, ratio, why="new")]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
