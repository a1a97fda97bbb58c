"""Figures 6.2, 6.3 and 6.5: 1,608 hyperparameters of a network's training at once.

    python -m experiments.learning_rate_schedules [--data digits|mnist] [--seeds 5] [--meta-steps 50]

A tanh network with four weight layers is trained for 100 steps. A learning rate and a momentum for each step, layer and kind
of parameter, and an initial scale for each layer and kind, are learned together by descending the loss on all training
images; each meta-step sees a fresh initialization and fresh batches. The thesis shows one such run. Here are several, judged
on initializations and batches that none of them saw, and on test images.

Two rules descend. The original's meta-optimizer is called Adam but keeps no momentum after its first step: it divides by the
root of the mean square, with a boosted start, and remembers a hundred meta-steps, so a large first hypergradient slows down
all that follow. `thesis` is that rule. `annealed` is the true Adam with shorter memories, a longer step to begin with and a
shorter one at the end.
"""

import dataclasses
import pathlib
import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array

import hypergrad as hg
from experiments import _config, _data, _learning_rate_schedules_plots, _models, _plots, _record
from experiments._data import Data


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    seeds: int | None = None  # 5 meta-optimizations
    report_seeds: int | None = None  # 5 fresh initializations and batch orders that judge each of them
    first_seed: int = 10  # the annealed rule was chosen on seeds 0 and 3
    meta_steps: int | None = None  # 50
    rules: tuple[Literal["thesis", "annealed"], ...] | None = None  # both
    thesis_rate: float = 0.04
    annealed_rate: float = 0.1
    steps: int | None = None  # 100
    batch_size: int = 200
    hidden: tuple[int, ...] | None = None  # 50-50-50
    log_learning_rate: float = -1.0
    log_init_scale: float = -3.0
    momentum: float = 0.5
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/learning_rate_schedules")


PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "seeds": 5, "report_seeds": 5, "meta_steps": 50, "rules": ("thesis", "annealed"),
        "steps": 100, "hidden": (50, 50, 50),
    },
    "tiny": {"seeds": 1, "report_seeds": 1, "meta_steps": 1, "rules": ("thesis",), "steps": 3, "hidden": ()},
}  # fmt: skip


class Report(NamedTuple):
    """Of trainings with several sets of hyperparameters: arrays [sets, report_seeds, ...]."""

    losses: Any  # at each step, on its batch
    train: Any
    validation: Any
    test: Any
    test_error: Any

    def means(self) -> dict[str, Any]:
        """Over the fresh initializations, a list over sets of hyperparameters each."""
        return {name: np.mean(x, axis=1) for name, x in self._asdict().items()}


class Experiment:
    def __init__(self, config: Config, data: Data) -> None:
        self.config, self.data = config, data
        self.sizes = (data.train.x.shape[1], *config.hidden, 10)
        shapes = jax.eval_shape(lambda: _models.init_mlp(jax.random.key(0), self.sizes, 1.0))
        self.spread = lambda value: jax.tree.map(lambda _: value, shapes)  # one value for each layer and kind
        self._measure = jax.jit(self._measure_all)

    @staticmethod
    def loss(params: Any, theta: None, batch: Any) -> Array:
        return _models.cross_entropy(params, *batch)

    def arguments(self, hypers: Any, key: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        init_key, batch_key = jax.random.split(jax.random.fold_in(key, hypers["seed"]))
        params = _models.init_mlp(init_key, self.sizes, hypers["init_scale"])
        sgd = hg.SGD(hypers["learning_rate"], hypers["momentum"])
        batches = hg.minibatches(tuple(self.data.train), self.config.batch_size, batch_key, replacement=True)
        return (self.loss, params, sgd, batches), {"steps": self.config.steps}

    def train_fn(self, hypers: Any, key: Array) -> Any:
        arguments, options = self.arguments(hypers, key)
        return hg.train(*arguments, **options).params

    def train_loss(self, params: Any) -> Array:
        return _models.cross_entropy(params, *self.data.train)

    def validation_loss(self, params: Any) -> Array:
        return _models.cross_entropy(params, *self.data.validation)

    def hypers(self, learning_rate: float, momentum: float, init_scale: float, seed: int = 0) -> dict[str, Any]:
        """Constants, in natural units and with their domains; the seed travels along, not learned."""
        steps = self.config.steps
        return {
            "learning_rate": hg.positive(self.spread(hg.PerStep(jnp.full(steps, learning_rate)))),
            "momentum": hg.unit_interval(self.spread(hg.PerStep(jnp.full(steps, momentum)))),
            "init_scale": hg.positive(self.spread(jnp.float32(init_scale))),
            "seed": hg.fixed(jnp.int32(seed)),
        }

    def start(self, seed: int = 0) -> dict[str, Any]:
        config = self.config
        return self.hypers(np.exp(config.log_learning_rate), config.momentum, np.exp(config.log_init_scale), seed)

    def report(self, several: list[Any]) -> Report:
        """Fresh initializations and batches for each of `several` hyperparameters."""
        keys = jax.random.split(jax.random.key(1_000), self.config.report_seeds)
        return jax.tree.map(lambda *x: np.stack(x), *(self._measure(hypers, keys) for hypers in several))

    def _measure_all(self, hypers: Any, keys: Array) -> Report:
        def measure(key: Array) -> Report:
            arguments, options = self.arguments(hg.natural(hypers), key)
            run = hg.train(*arguments, **options)
            losses = [_models.cross_entropy(run.params, *split) for split in self.data]
            return Report(run.losses, *losses, _models.error_rate(run.params, *self.data.test))

        return jax.lax.map(measure, keys)


def thesis_rule(rate: float) -> optax.GradientTransformation:
    """h <- h - c_i rate g / (sqrt(mean of g^2) + 1e-4), c_0 = 1, c_i = 1 / (1 - 0.9^(i+1)): what the original calls Adam."""
    boost = lambda i: -rate * jnp.where(i == 0, 1.0, 1 / (1 - 0.9 ** (i + 1.0)))  # noqa: E731
    return optax.chain(optax.scale_by_adam(b1=0.0, b2=0.99, eps=1e-4), optax.scale_by_schedule(boost))


def annealed_rule(rate: float, meta_steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(rate, meta_steps, 0.1), b1=0.8, b2=0.9)


def learn(experiment: Experiment, rule: optax.GradientTransformation) -> list[hg.Result]:
    """One meta-optimization per seed, compiled once, in the order of seeds."""
    config = experiment.config
    results = hg.restarts(
        experiment.train_fn, experiment.train_loss,
        [experiment.start(config.first_seed + i) for i in range(config.seeds)],
        meta_steps=config.meta_steps, meta_optimizer=rule, key=jax.random.key(1),
        monitor_fn=experiment.validation_loss, callbacks=[_record.EveryTenth(config.meta_steps)],
    )  # fmt: skip
    return sorted(results, key=lambda r: int(hg.natural(r.hypers)["seed"]))


def load(name: _data.Name) -> Data:
    """MNIST in the order of its file, as the thesis cuts it; the digits' file is ordered by writer, so it is shuffled."""
    return _data.load(name, 0 if name == "digits" else None)


def main(config: Config) -> dict[str, Any]:
    begin, config = time.perf_counter(), _config.filled(config, PRESETS)
    experiment = Experiment(config, load(config.data))
    start = experiment.start()
    count = sum(x.size for x in jax.tree.leaves(start)) - 1
    rules = {"thesis": thesis_rule(config.thesis_rate), "annealed": annealed_rule(config.annealed_rate, config.meta_steps)}
    found = {}
    for rule in config.rules:
        print(f"{count:,} hyperparameters, {rule} rule, {config.meta_steps} meta-steps, {config.seeds} seeds:", flush=True)
        found[rule] = Learned(learn(experiment, rules[rule]), experiment)
    # What Bayesian optimization chose in the thesis, constants for all steps.
    before, chosen = (experiment.report([h]) for h in (start, experiment.hypers(2.43, 0.60, 0.196)))
    results = next(iter(found.values())).results
    arguments, options = experiment.arguments(hg.natural(results[0].hypers), jax.random.key(2))
    proof = hg.check_reversal(*arguments, **options)
    rows = _rows(config, before, chosen, found)
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, _learning_rate_schedules_plots.figures(start, before, found, experiment.sizes))
    seconds = time.perf_counter() - begin
    numbers = {
        "hyperparameters": count,
        "start": before.means(),
        "bayesian_optimization": chosen.means(),
        "rules": {rule: learned.numbers() for rule, learned in found.items()},
    }
    record = _record.write(
        config.out, "learning_rate_schedules", config, numbers,
        seeds=[config.first_seed + i for i in range(config.seeds)], seconds=seconds, certificate=proof, thesis=rows,
        pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return numbers | {"certificate": proof._asdict()}


class Learned:
    """What a rule found, one meta-optimization per seed."""

    def __init__(self, results: list[hg.Result], experiment: Experiment) -> None:
        self.results = results
        self.hypers = jax.tree.map(lambda *x: np.stack(x), *(hg.natural(r.hypers) for r in results))
        self.report = experiment.report([r.hypers for r in results])
        # The median, so that neither the first step, which compiles, nor a pause of the machine counts.
        steps = [[done.seconds for done in r.history] for r in results]
        self.seconds = [len(s) * float(np.median(s)) for s in steps]
        self.compiling = max(s[0] for s in steps)

    def numbers(self) -> dict[str, Any]:
        curves = {
            field: [[getattr(done, field) for done in r.history] for r in self.results]
            for field in ("value", "monitor", "gradient_norm")
        }
        return (
            self.report.means()
            | curves
            | {"seconds": self.seconds, "compiling": self.compiling, "init_scale": self.hypers["init_scale"]}
        )


def _rows(config: Config, before: Report, chosen: Report, found: dict[str, Learned]) -> list[_record.Row]:
    judged = f"one run there; ours are judged on {config.report_seeds} fresh initializations each"
    their_test = "the thesis's test images are training images of MNIST, ours the test set of 10,000"
    seed = "one run there; the noise of a fresh seed each meta-step stays in a schedule"
    if config.data != "mnist":
        judged = their_test = seed = f"another data set: {config.data}, not MNIST"
    rows = []

    def add(figure: str, quantity: str, thesis: Any, values: Any, why: str) -> None:
        """values: one per seed."""
        mean, spread = np.mean(values), np.std(values, ddof=1) if np.size(values) > 1 else None
        rows.append(_record.Row(figure, quantity, thesis, float(mean), spread if spread is None else float(spread), why))

    add("6.3", "training loss at the start", 0.5314, before.train[0], judged)
    add("6.3", "training loss, constants of Bayesian optimization", 0.1513, chosen.train[0], judged)
    add("6.3", "test loss, constants of Bayesian optimization", 0.2901, chosen.test[0], their_test)
    for rule, learned in found.items():
        after, report = f"after {config.meta_steps} meta-steps, {rule} rule", learned.report
        recorded = rule == "thesis"
        add("6.3", f"training loss {after}", 0.1235, report.train.mean(axis=1), judged if recorded else "a better rule")
        add("6.3", f"test loss {after}", 0.24, report.test.mean(axis=1), their_test)
        add("6.3", f"test error {after}, %", None, 100 * report.test_error.mean(axis=1), "not in the thesis")
        text, compiled = (
            f"seconds of {config.meta_steps} meta-steps, {rule} rule",
            f"{learned.compiling:.0f} s to compile, once",
        )
        add("6.3", text, None, learned.seconds, f"not in the thesis; {compiled}")
    hypers = next(iter(found.values())).hypers
    layers = [(layer, layer.replace("_", " ")) for layer in sorted(hypers["init_scale"])]
    for (layer, name), peak, end in zip(layers, (3.25, None, 1.84, 6.69), (0.56, 0.36, 0.48, 0.61), strict=False):
        values = hypers["learning_rate"][layer]["weights"].values
        add("6.2", f"learning rate of the weights of {name}, maximum", peak, values.max(axis=1), seed)
        add("6.2", f"learning rate of the weights of {name}, last 10 steps", end, values[:, -10:].mean(axis=1), seed)
    for (layer, name), scale in zip(layers, (0.0441, 0.2493, 0.1636, 0.1257), strict=False):
        add("6.5", f"initial scale of the weights of {name}", scale, hypers["init_scale"][layer]["weights"], seed)
    add("6.5", "initial scale of the biases of layer 1", 0.702, hypers["init_scale"]["layer_1"]["biases"], seed)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
