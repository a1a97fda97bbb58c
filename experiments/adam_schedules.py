"""What is the schedule of AdamW? Learning rate, b1, b2 and weight decay, one of each per step, learned by hypergradient.

    python -m experiments.adam_schedules [--data digits|mnist|fashion_mnist] [--seeds 3] [--tiny]

Against the best constant AdamW, the best cosine decay with warm-up (both from a grid, chosen by validation loss) and SGD
with a learned schedule of learning rate and momentum. Everything is repeated for each seed, which draws the initial
parameters, the batches and the keys of the meta-steps. Test images are only looked at in the report.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array

import hypergrad as hg
from experiments import _adam_schedules_plots, _data, _models, _record
from experiments._data import Data


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
    report_seeds: int = 20  # initializations and batch orders that each report averages over
    tiny: bool = False  # a run of seconds, for the tests
    out: pathlib.Path = pathlib.Path("results/adam_schedules")

    def shrunk(self) -> "Config":
        return dataclasses.replace(self, seeds=1, steps=4, meta_steps=2, hidden=(), grid=2, report_seeds=2)


Optimizer = Callable[[Any], Any]  # hypers in natural units -> optimizer


def adamw(hypers: Any) -> Any:
    return hg.AdamW(hypers["learning_rate"], hypers["b1"], hypers["b2"], 1e-8, hypers["weight_decay"])


def sgd(hypers: Any) -> Any:
    return hg.SGD(hypers["learning_rate"], hypers["momentum"])


class Experiment:
    """The functions that a user of the library writes, and the data they read."""

    def __init__(self, config: Config, data: Data) -> None:
        self.config, self.data = config, data
        self.x, self.y = (jnp.asarray(part) for part in data.train)
        self.sizes = (data.train.x.shape[1], *config.hidden, 10)

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
        """The validation loss of every candidate for each seed, all trained at once: [candidates, seeds]."""

        def value(hypers: Any, drawn: Any) -> Array:
            return self.val_fn(self.trained(make(hypers), drawn, throw=False).params)  # NaN where it diverges

        over_seeds = jax.vmap(value, in_axes=(None, 0))
        drawn = jax.jit(jax.vmap(self.draw))(keys)
        return np.asarray(jax.jit(jax.vmap(over_seeds, in_axes=(0, None)))(hg.natural(candidates), drawn))

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
        keys = jax.random.split(jax.random.key(10_000), self.config.report_seeds)
        parts = {"validation": self.data.validation, "test": self.data.test}
        judges = {"loss": _models.cross_entropy, "error": _models.error_rate}

        def one(hypers: Any, drawn: Any) -> Any:
            run = self.trained(make(hypers), drawn)
            return {f"{p}_{j}": f(run.params, *x) for p, x in parts.items() for j, f in judges.items()}, run.losses

        over_keys = jax.vmap(one, in_axes=(None, 0))
        drawn = jax.jit(jax.vmap(self.draw))(keys)
        numbers, curves = jax.jit(jax.vmap(over_keys, in_axes=(0, None)))(hg.natural(hypers), drawn)
        return {name: np.asarray(x).mean(axis=1) for name, x in numbers.items()}, np.asarray(curves).mean(axis=1)


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
    rates, sgd_rates = np.geomspace(1e-3, 0.1, config.grid), np.geomspace(0.1, 5, config.grid)
    every_constant = np.repeat(rates[:, None], config.steps, axis=1)
    candidates = experiment.adamw_hypers(jnp.concatenate([every_constant, experiment.cosine(rates)]))
    values = experiment.judged(adamw, candidates, keys)
    constant = best_rows(candidates, values, range(config.grid))
    cosine = best_rows(candidates, values, range(config.grid, 2 * config.grid))
    sgd_constants = experiment.sgd_hypers(sgd_rates)
    sgd_start = best_rows(sgd_constants, experiment.judged(sgd, sgd_constants, keys), range(config.grid))
    adamw_run, sgd_run = experiment.learned(adamw, constant, adam_key), experiment.learned(sgd, sgd_start, sgd_key)
    adamw_rows = jax.tree.map(lambda *x: jnp.concatenate(x), constant, cosine, adamw_run.hypers)
    names = ["AdamW, best constant", "AdamW, cosine with warm-up", "AdamW, learned"]
    methods = {}
    for name, make, hypers in ((names, adamw, adamw_rows), (["SGD, learned"], sgd, sgd_run.hypers)):
        numbers, curves = experiment.report(make, hypers)
        for i, method in enumerate(name):
            part = slice(i * config.seeds, (i + 1) * config.seeds)
            methods[method] = {
                "hypers": jax.tree.map(lambda x, part=part: np.asarray(x[part]), hg.natural(hypers)),
                "numbers": {k: x[part] for k, x in numbers.items()},
                "curves": curves[part],
            }
    for method, run in (("AdamW, learned", adamw_run), ("SGD, learned", sgd_run)):
        methods[method]["values"] = [s.value / config.seeds for s in run.history]
    return _told(config, methods, begin)


def _told(config: Config, methods: dict[str, Any], begin: float) -> dict[str, Any]:
    """Print the table, draw the pictures, write the record."""
    columns = ("validation_loss", "test_loss", "test_error")
    print(f"{'mean (standard deviation) over seeds':38s}" + "".join(f"{c.replace('_', ' '):>18s}" for c in columns))
    for name, rows in methods.items():
        shown = [f"{np.mean(rows['numbers'][c]):.4f} ({np.std(rows['numbers'][c]):.4f})" for c in columns]
        print(f"{name:38s}" + "".join(f"{x:>18s}" for x in shown))
    config.out.mkdir(parents=True, exist_ok=True)
    pictures = _adam_schedules_plots.draw(config.out, methods)
    seconds = time.perf_counter() - begin
    table = {name: {k: x.tolist() for k, x in rows["numbers"].items()} for name, rows in methods.items()}
    numbers = {"table": table, "seconds": seconds}
    record = _record.write(config.out, "adam_schedules", config, numbers)
    print(f"{seconds:.1f} s; wrote {record} and {', '.join(p.name for p in pictures)}")
    return numbers


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
