"""Beyond the thesis: what is the schedule of AdamW?

    python -m experiments.adam_schedules [--data digits|mnist|fashion_mnist] [--seeds 3] [--tiny]

A small tanh network is trained for 100 steps by AdamW. A learning rate, a b1, a b2 and a weight decay for each step descend
the validation loss together; each meta-step sees a fresh initialization and fresh batches. Beside them AdamW at its best
constant learning rate and at the best peak of a cosine decay with warm-up, SGD at its best constant rate, and SGD with a
learning rate and a momentum learned for each step. Those that are learned start from the best constants.

A learning rate is chosen from a grid by its mean validation loss over several trainings; b1, b2, the weight decay and the
momentum of what is not learned keep their usual values. Each seed draws the trainings by which it chooses, and its
meta-steps. All are then judged on the same fresh initializations and batches, so where all seeds choose the same rate there
is no spread. Validation images are those that were descended on; test images are only looked at in the report.
"""

import dataclasses
import pathlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array

import hypergrad as hg
from experiments import _adam_schedules_plots, _data, _models, _plots, _record
from experiments._data import Data
from experiments._record import Row


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    seeds: int = 3
    steps: int = 100
    meta_steps: int = 60
    meta_learning_rate: float = 0.05
    batch_size: int = 50
    hidden: tuple[int, ...] = (32, 32)
    warm_up: float = 0.1  # of the steps, for the cosine schedule
    grid: int = 8  # learning rates tried for each baseline
    draws: int = 10  # trainings, per seed, that a learning rate of the grid is judged by
    report_seeds: int = 20  # initializations and batch orders that each report averages over
    tiny: bool = False  # a run of seconds, for the tests
    out: pathlib.Path = pathlib.Path("results/adam_schedules")

    def shrunk(self) -> "Config":
        return dataclasses.replace(self, seeds=1, steps=4, meta_steps=2, hidden=(), grid=2, draws=2, report_seeds=2)


Optimizer = Callable[[Any], Any]  # hypers in natural units -> optimizer


def adamw(hypers: Any) -> Any:
    return hg.AdamW(hypers["learning_rate"], hypers["b1"], hypers["b2"], 1e-8, hypers["weight_decay"])


def sgd(hypers: Any) -> Any:
    return hg.SGD(hypers["learning_rate"], hypers["momentum"])


RATES = {adamw: (1e-3, 0.1), sgd: (0.1, 5.0)}  # the ends of the grids
LEARNED = {adamw: "AdamW, learned", sgd: "SGD, learned"}


class Experiment:
    """The functions that a user of the library writes, and the data they read."""

    def __init__(self, config: Config, data: Data) -> None:
        self.config, self.data = config, data
        self.x, self.y = (jnp.asarray(part) for part in data.train)
        self.sizes = (data.train.x.shape[1], *config.hidden, 10)
        self.report_keys = jax.random.split(jax.random.key(10_000), config.report_seeds)

    def loss(self, params: Any, _: Any, rows: Array) -> Array:
        return _models.cross_entropy(params, self.x[rows], self.y[rows])

    def draw(self, key: Array) -> tuple[Any, Array]:
        """(initial parameters, the rows of every batch), each from one call: random bits take long to compile."""
        init_key, batch_key = jax.random.split(key)
        shapes = jax.eval_shape(lambda: _models.init_mlp(jax.random.key(0), self.sizes, 1.0))
        leaves, tree = jax.tree.flatten(shapes)
        ends = np.cumsum([x.size for x in leaves])
        parts = jnp.split(0.1 * jax.random.normal(init_key, (int(ends[-1]),)), ends[:-1])
        params = jax.tree.unflatten(tree, [p.reshape(x.shape) for p, x in zip(parts, leaves, strict=True)])
        return params, jax.random.randint(batch_key, (self.config.steps, self.config.batch_size), 0, len(self.y))

    def trained(self, optimizer: Any, drawn: tuple[Any, Array], throw: bool = True) -> hg.Trained:
        params, rows = drawn
        return hg.train(self.loss, params, optimizer, hg.stacked(rows), throw=throw)

    def val_fn(self, params: Any) -> Array:
        return _models.cross_entropy(params, *self.data.validation)

    def per_step(self, value: Any) -> hg.PerStep:
        """One value per step and, by a leading axis, for each of several candidates or seeds."""
        value = jnp.asarray(value, jnp.float32)
        value = value[..., None] if value.ndim < 2 else value
        return hg.PerStep(jnp.broadcast_to(value, (*value.shape[:-1], self.config.steps)))

    def adamw_hypers(self, rate: Array) -> dict[str, Any]:
        same = lambda x: self.per_step(jnp.full(len(rate), x))  # noqa: E731
        return {
            "learning_rate": hg.positive(self.per_step(rate)),
            "b1": hg.unit_interval(same(0.9)),
            "b2": hg.unit_interval(same(0.999)),
            "weight_decay": hg.positive(same(1e-2)),
        }

    def sgd_hypers(self, rate: Array) -> dict[str, Any]:
        momentum = hg.unit_interval(self.per_step(jnp.full(len(rate), 0.9)))
        return {"learning_rate": hg.positive(self.per_step(rate)), "momentum": momentum}

    def cosine(self, peaks: np.ndarray) -> Array:
        """Cosine decay to a hundredth with linear warm-up, for each peak: [peaks, steps]."""
        steps = self.config.steps
        warm = max(1, round(self.config.warm_up * steps))
        schedule = optax.warmup_cosine_decay_schedule(0.1, 1.0, warm, steps, 0.01)
        return jnp.asarray(peaks, jnp.float32)[:, None] * jax.vmap(schedule)(jnp.arange(steps))

    def judged(self, make: Optimizer, candidates: Any, keys: Array) -> np.ndarray:
        """The mean validation loss of every candidate over each seed's draws, NaN if one diverges: [candidates, seeds]."""

        def value(hypers: Any, drawn: Any) -> Array:
            return self.val_fn(self.trained(make(hypers), drawn, throw=False).params)

        drawn = jax.jit(jax.vmap(self.draw))(jax.vmap(lambda key: jax.random.split(key, self.config.draws))(keys).ravel())
        # One candidate after the other, so that memory does not grow with the grid.
        every = jax.jit(lambda hypers, drawn: jax.lax.map(lambda h: jax.vmap(lambda d: value(h, d))(drawn), hypers))
        values = np.asarray(every(hg.natural(candidates), drawn))
        return values.reshape(-1, len(keys), self.config.draws).mean(axis=2)

    def learned(self, make: Optimizer, hypers: Any, key: Array) -> hg.Result:
        """One schedule per seed, all learned at once: their losses are summed, so that none sees another's gradient."""
        config = self.config

        def train_fn(hypers: Any, key: Array) -> Any:
            keys = jax.random.split(key, config.seeds)
            return jax.vmap(lambda h, drawn: self.trained(make(h), drawn).params)(hypers, jax.vmap(self.draw)(keys))

        def val_fn(params: Any) -> Array:
            return jnp.sum(jax.vmap(self.val_fn)(params))

        rule = optax.adam(optax.cosine_decay_schedule(config.meta_learning_rate, config.meta_steps, 0.1))
        return hg.optimize(train_fn, val_fn, hypers, meta_steps=config.meta_steps, meta_optimizer=rule, key=key)

    def report(self, make: Optimizer, hypers: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """For every row of `hypers`, means over fresh initializations and batches, and the mean learning curve."""
        parts = {"validation": self.data.validation, "test": self.data.test}
        judges = {"loss": _models.cross_entropy, "error": _models.error_rate}

        def one(hypers: Any, drawn: Any) -> Any:
            run = self.trained(make(hypers), drawn)
            return {f"{p}_{j}": f(run.params, *x) for p, x in parts.items() for j, f in judges.items()}, run.losses

        over_keys = jax.vmap(one, in_axes=(None, 0))
        drawn = jax.jit(jax.vmap(self.draw))(self.report_keys)
        numbers, curves = jax.jit(jax.vmap(over_keys, in_axes=(0, None)))(hg.natural(hypers), drawn)
        return {name: np.asarray(x).mean(axis=1) for name, x in numbers.items()}, np.asarray(curves).mean(axis=1)

    def certificate(self, make: Optimizer, hypers: Any) -> hg.Certificate:
        """Of a training at the hyperparameters of the first seed."""
        params, rows = self.draw(self.report_keys[0])
        first = jax.tree.map(lambda x: x[0], hypers)
        return hg.check_reversal(self.loss, params, make(hg.natural(first)), hg.stacked(rows))


def best_rows(candidates: Any, values: np.ndarray, among: range) -> Any:
    """For each seed, the candidate of least value in a range."""
    best = among.start + np.nanargmin(values[list(among)], axis=0)
    return jax.tree.map(lambda x: x[best], candidates)


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    config = config.shrunk() if config.tiny else config
    experiment = Experiment(config, _data.load(config.data, 0))
    grid_key, adam_key, sgd_key = jax.random.split(jax.random.key(0), 3)
    keys = jax.random.split(grid_key, config.seeds)
    rates, sgd_rates = (np.geomspace(*RATES[make], config.grid) for make in (adamw, sgd))
    every_constant = np.repeat(rates[:, None], config.steps, axis=1)
    candidates = experiment.adamw_hypers(jnp.concatenate([every_constant, experiment.cosine(rates)]))
    values = experiment.judged(adamw, candidates, keys)
    constant = best_rows(candidates, values, range(config.grid))
    cosine = best_rows(candidates, values, range(config.grid, 2 * config.grid))
    sgd_candidates = experiment.sgd_hypers(sgd_rates)
    sgd_constant = best_rows(sgd_candidates, experiment.judged(sgd, sgd_candidates, keys), range(config.grid))
    starts = {adamw: (constant, adam_key), sgd: (sgd_constant, sgd_key)}
    runs = {make: experiment.learned(make, *start) for make, start in starts.items()}
    compared = {
        adamw: {"AdamW, best constant": constant, "AdamW, cosine with warm-up": cosine},
        sgd: {"SGD, best constant": sgd_constant},
    }
    methods: dict[str, Any] = {}
    for make, run in runs.items():
        methods |= _judged(experiment, make, compared[make] | {LEARNED[make]: run.hypers})
        methods[LEARNED[make]]["values"] = [s.value / config.seeds for s in run.history]
    proofs = {LEARNED[make]: experiment.certificate(make, run.hypers) for make, run in runs.items()}
    return _told(config, methods, proofs, begin)


def _judged(experiment: Experiment, make: Optimizer, hypers: dict[str, Any]) -> dict[str, Any]:
    """{method: its report}, all in one program; hypers: {method: of all seeds}."""
    numbers, curves = experiment.report(make, jax.tree.map(lambda *x: jnp.concatenate(x), *hypers.values()))
    seeds, found = experiment.config.seeds, {}
    for i, (method, its) in enumerate(hypers.items()):
        part = slice(i * seeds, (i + 1) * seeds)
        found[method] = {
            "hypers": jax.tree.map(np.asarray, hg.natural(its)),
            "numbers": {k: x[part] for k, x in numbers.items()},
            "curves": curves[part],
        }
    return found


def _told(config: Config, methods: dict[str, Any], proofs: dict[str, hg.Certificate], begin: float) -> dict[str, Any]:
    """Print the rows, draw the pictures, write the record."""
    rows = _rows(config, methods)
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, _adam_schedules_plots.figures(methods))
    seconds = time.perf_counter() - begin
    numbers = {
        "table": {name: {k: x.tolist() for k, x in m["numbers"].items()} for name, m in methods.items()},
        "hypers": {name: {k: x.values.tolist() for k, x in m["hypers"].items()} for name, m in methods.items()},
    }
    record = _record.write(
        config.out, "adam_schedules", config, numbers,
        seeds=range(config.seeds), seconds=seconds, certificate=proofs, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return numbers | {"certificate": {name: proof._asdict() for name, proof in proofs.items()}}


def _rows(config: Config, methods: dict[str, Any]) -> list[Row]:
    learned = f"new: {config.meta_steps} meta-steps"
    grids = {
        name: f"new: best of {config.grid} rates from {low:g} to {high:g} by validation loss"
        for name, (low, high) in (("AdamW", RATES[adamw]), ("SGD", RATES[sgd]))
    }
    rows = []

    def add(quantity: str, values: np.ndarray, why: str) -> None:
        """values: one per seed; equal ones may differ by their rounding, which is no spread."""
        mean, spread = _record.mean_and_spread(values)
        rows.append(Row("new", quantity, None, mean, spread and (spread if spread > 1e-6 * mean else 0.0), why))

    def origin(name: str) -> str:
        return learned if name in LEARNED.values() else grids[name.split(",")[0]]

    for name, m in methods.items():
        add(f"highest learning rate: {name}", m["hypers"]["learning_rate"].values.max(axis=1), origin(name))
    for quantity, unit, scale in (("validation_loss", "", 1), ("test_loss", "", 1), ("test_error", ", %", 100)):
        table = {name: scale * m["numbers"][quantity] for name, m in methods.items()}
        told = quantity.replace("_", " ")
        for name, values in table.items():
            add(f"{told}{unit}: {name}", values, origin(name))
        for what, pick in (("lowest", min), ("highest", max)) if quantity != "test_error" else ():  # errors may be equal
            names = Counter(pick(table, key=lambda name, s=s, t=table: t[name][s]) for s in range(config.seeds))
            text = "; ".join(f"{name}: {n} of {config.seeds} seeds" for name, n in names.most_common())
            rows.append(Row("new", f"{what} {told}", None, text, why="new"))
    middle = max(0, config.steps // 2 - 5)
    parts = {"first": slice(None, 10), "middle": slice(middle, middle + 10), "last": slice(-10, None)}
    for field, schedule in methods["AdamW, learned"]["hypers"].items():
        values, label = _adam_schedules_plots.shown(field, schedule.values)
        for where, part in parts.items():
            add(f"{label}, AdamW, learned, {where} 10 steps", values[:, part].mean(axis=1), learned)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
