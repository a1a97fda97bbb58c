"""Beyond the thesis: does a long horizon pay?

    python -m experiments.long_horizon [--data digits|mnist|fashion_mnist] [--seeds 3] [--tiny]

Training is 10,000 steps of SGD at momentum 0.98 on small batches with noise in their pixels, so that a rate that is good at
first keeps the loss from settling later. The learning rate is constant within each of twenty windows, and the windows are
learned by hypergradients of the validation loss, each through all 10,000 steps ("long"). Beside it the same windows are
learned on trainings of 1,000 steps, which cost a tenth, by ten times as many meta-steps ("short"), and then stretched; and
constants and straight lines to zero are tried on a grid, the best chosen by the validation loss. All are judged on 10,000
steps from fresh initializations, batches and noise: what is reported is the test loss.
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
from experiments import _config, _data, _models, _plots, _record
from experiments._plots import COLOURS, DASHES, GREY
from experiments._record import Row


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    steps: int | None = None
    part: int = 10  # the short horizon: so many times fewer steps
    windows: int = 20
    hidden: tuple[int, ...] | None = None
    batch_size: int = 10
    noise: float = 0.3  # standard deviation, of pixels in 0..1
    momentum: float = 0.98
    learning_rate: float = 0.1  # to begin with
    meta_steps: int | None = None  # of the long horizon
    meta_rate: float = 0.1  # of Adam, in logarithms of rates; a cosine takes it to a tenth
    grid: tuple[float, ...] | None = None  # of constants, and of where lines begin
    seeds: int | None = None
    judged_by: int | None = None  # fresh trainings
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/long_horizon")


PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "steps": 10_000, "hidden": (32,), "meta_steps": 40, "seeds": 3, "judged_by": 8,
        "grid": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0),
    },
    "tiny": {"steps": 200, "hidden": (4,), "meta_steps": 2, "seeds": 2, "judged_by": 2, "grid": (0.1, 0.3)},
}  # fmt: skip

BEST_CONSTANT, BEST_LINE, SHORT, LONG = "best constant", "best line to zero", "learned on the short", "learned on the long"


class Experiment:
    def __init__(self, config: Config, data: _data.Data) -> None:
        self.config, self.data = config, data
        self.sizes = (data.train.x.shape[1], *config.hidden, 10)
        self._judge = jax.jit(jax.vmap(self._judge_one, (None, 0)))

    def short(self) -> "Experiment":
        return Experiment(dataclasses.replace(self.config, steps=self.config.steps // self.config.part), self.data)

    @staticmethod
    def loss(params: Any, _: None, batch: Any) -> Array:
        return _models.cross_entropy(params, *batch)

    def noisy(self, key: Array) -> Callable[[Array], Any]:
        drawn = hg.minibatches(tuple(map(jnp.asarray, self.data.train)), self.config.batch_size, jax.random.fold_in(key, 0))

        def batch(t: Array) -> Any:
            x, y = drawn(t)
            return x + self.config.noise * jax.random.normal(jax.random.fold_in(key, t + 1), x.shape), y

        return batch

    def arguments(self, windows: Array, key: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        of_params, of_batches = jax.random.split(key)
        params = _models.init_mlp(of_params, self.sizes, 0.1)
        rates = hg.PerStep(jnp.repeat(windows, self.config.steps // self.config.windows))
        return (self.loss, params, hg.SGD(rates, self.config.momentum), self.noisy(of_batches)), {"steps": self.config.steps}

    def train_fn(self, hypers: Any, key: Array) -> Any:
        arguments, options = self.arguments(hypers["learning_rate"], jax.random.fold_in(key, hypers["seed"]))
        return hg.train(*arguments, **options).params

    def validation_loss(self, params: Any) -> Array:
        return _models.cross_entropy(params, *self.data.validation)

    def start(self, seed: int) -> dict[str, Any]:
        rates = jnp.full(self.config.windows, self.config.learning_rate)
        return {"learning_rate": hg.positive(rates), "seed": hg.fixed(jnp.int32(seed))}

    def learn(self, meta_steps: int) -> list[hg.Result]:
        """One per seed, in their order."""
        seeds = range(self.config.seeds)
        rule = optax.adam(optax.cosine_decay_schedule(self.config.meta_rate, meta_steps, 0.1), b1=0.8)
        results = hg.restarts(
            self.train_fn, self.validation_loss, [self.start(seed) for seed in seeds], meta_steps=meta_steps,
            meta_optimizer=rule, key=jax.random.key(1), callbacks=[_record.EveryTenth(meta_steps)],
        )  # fmt: skip
        return sorted(results, key=lambda result: int(hg.natural(result.hypers)["seed"]))

    def judge(self, windows: Any) -> dict[str, Any]:
        """{"validation", "test", "error": [fresh trainings]}, of which none was learned on."""
        keys = jax.random.split(jax.random.key(1_000), self.config.judged_by)
        return jax.tree.map(np.asarray, self._judge(jnp.asarray(windows, jnp.float32), keys))

    def _judge_one(self, windows: Array, key: Array) -> dict[str, Array]:
        arguments, options = self.arguments(windows, key)
        params = hg.train(*arguments, **options).params
        validation, test = (_models.cross_entropy(params, *split) for split in (self.data.validation, self.data.test))
        return {"validation": validation, "test": test, "error": _models.error_rate(params, *self.data.test)}

    def best_of(self, shape: Any, seed: int) -> Any:
        """The windows whose validation loss is least, of trainings of that seed."""
        keys = jax.random.split(jax.random.key(2_000 + seed), self.config.judged_by)
        tried = [np.asarray(rate * shape, np.float32) for rate in self.config.grid]
        return min(tried, key=lambda windows: float(self._judge(windows, keys)["validation"].mean()))


@dataclasses.dataclass
class Found:
    """What a method came to: a row a seed."""

    windows: list[Any]
    judged: list[dict[str, Any]]
    taken: list[int]  # meta-steps, or trainings of a grid
    seconds: float  # a seed

    def mean(self, split: str) -> list[float]:
        return [float(np.mean(judged[split])) for judged in self.judged]


def compare(experiment: Experiment) -> dict[str, Found]:
    config, shorter = experiment.config, experiment.short()
    ends = np.linspace(1, 0, config.windows + 1)
    line, seeds = (ends[1:] + ends[:-1]) / 2, range(config.seeds)
    tried = len(config.grid) * config.judged_by

    def learned(results: list[hg.Result]) -> list[tuple[Any, int]]:
        return [(np.asarray(hg.natural(r.hypers)["learning_rate"]), len(r.history)) for r in results]

    methods: dict[str, Callable[[], list[tuple[Any, int]]]] = {
        BEST_CONSTANT: lambda: [(experiment.best_of(np.ones(config.windows), seed), tried) for seed in seeds],
        BEST_LINE: lambda: [(experiment.best_of(line, seed), tried) for seed in seeds],
        SHORT: lambda: learned(shorter.learn(config.meta_steps * config.part)),
        LONG: lambda: learned(experiment.learn(config.meta_steps)),
    }
    found = {}
    for name, method in methods.items():
        print(f"{name}:", flush=True)
        begin = time.perf_counter()
        windows, taken = zip(*method(), strict=True)
        seconds = (time.perf_counter() - begin) / config.seeds
        found[name] = Found(list(windows), [experiment.judge(w) for w in windows], list(taken), seconds)
        print(f"   test loss {np.mean(found[name].mean('test')):.4f}, {seconds:.0f} s a seed", flush=True)
    return found


def main(config: Config) -> dict[str, Any]:
    begin, config = time.perf_counter(), _config.filled(config, PRESETS)
    experiment = Experiment(config, _data.load(config.data, 0))
    found = compare(experiment)
    arguments, options = experiment.arguments(jnp.asarray(found[LONG].windows[0]), jax.random.key(3))
    proof = hg.check_reversal(*arguments, **options)
    rows = _rows(config, found)
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, {"schedules": (_picture(config, found), "Schedules, and what they come to")})
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "long_horizon", config, {"found": {name: dataclasses.asdict(x) for name, x in found.items()}},
        seeds=list(range(config.seeds)), seconds=seconds, certificate=proof, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return {"found": found, "certificate": proof._asdict()}


def _rows(config: Config, found: dict[str, Found]) -> list[Row]:
    rows = []
    for split, unit in (("test", "test loss (nats)"), ("error", "test error, %"), ("validation", "validation loss (nats)")):
        for name, x in found.items():
            mean, spread = _record.mean_and_spread(np.asarray(x.mean(split)) * (100 if split == "error" else 1))
            rows.append(Row("new", f"{unit} after {config.steps:,} steps, {name}", None, mean, spread, "new"))
    for name in (SHORT, LONG):
        taken = ", ".join(map(str, found[name].taken))
        why = "it stops where hypergradients grow too large for too long" if name == SHORT else "new"
        rows.append(Row("new", f"meta-steps of each seed, {name}", None, taken, None, why))
    rows += [Row("new", f"seconds a seed, {name}", None, x.seconds, None, "new") for name, x in found.items()]
    return rows


def _picture(config: Config, found: dict[str, Found]) -> Any:
    figure, (schedules, losses) = _plots.panels(2)
    edges = np.linspace(0, config.steps, config.windows + 1)
    for (name, x), colour, dashes in zip(found.items(), (GREY, COLOURS[1], COLOURS[2], COLOURS[0]), DASHES, strict=False):
        for i, windows in enumerate(x.windows):
            label = name if i == 0 else None
            schedules.stairs(windows, edges, baseline=None, color=colour, linestyle=dashes, label=label)
    schedules.set(yscale="log", xlabel="step", ylabel="learning rate")
    _plots.plain_log(schedules.yaxis)
    schedules.legend(fontsize=7)
    _plots.bars(losses, {name: x.mean("test") for name, x in found.items()}, grey=(BEST_CONSTANT, BEST_LINE))
    losses.set_xlabel("test loss (nats)")
    return figure


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
