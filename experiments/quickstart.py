"""Learn thousands of hyperparameters of a small network from their exact hypergradient.

    python -m experiments.quickstart [--data digits|mnist|fashion_mnist] [--seed 0] [--meta-steps 100]

A tanh network with three weight layers is trained for 100 steps on real images. Its learning rate per step and layer,
momentum per step, initial scale per layer and kind, and one L2 penalty per weight are learned together by descending the
validation loss, starting from the best of 16 constant learning rates. Test images are only looked at in the report.
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array

import hypergrad as hg
from experiments import _data, _models, _plots, _quickstart_plots, _record
from experiments._data import Data


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    seed: int = 0
    meta_steps: int = 100
    meta_learning_rate: float = 0.05
    steps: int = 100
    batch_size: int = 100
    hidden: tuple[int, int] = (32, 32)
    start: float | None = None  # a constant learning rate to start from, instead of the best of 16
    momentum: float = 0.9
    penalty: float = 1e-4
    report_seeds: int = 20  # initializations and batch orders that the report averages over
    out: pathlib.Path = pathlib.Path("results/quickstart")


class Report(NamedTuple):
    """Means over `report_seeds` trainings."""

    validation_loss: float
    validation_error: float
    test_loss: float
    test_error: float

    def __str__(self) -> str:
        return (
            f"validation loss {self.validation_loss:.4f}, error {self.validation_error:6.2%}   "
            f"test loss {self.test_loss:.4f}, error {self.test_error:6.2%}"
        )


class Experiment:
    """The three functions that a user of the library writes, and the data they read."""

    def __init__(self, config: Config, data: Data) -> None:
        self.config, self.data = config, data
        self.sizes = (data.train.x.shape[1], *config.hidden, 10)

    @staticmethod
    def loss(params: Any, penalties: Any, batch: Any) -> Array:
        """The elementary loss: cross-entropy plus an L2 penalty with a coefficient per weight."""
        penalty = jax.tree.map(lambda p, w: jnp.vdot(p, w * w), penalties, params)
        return _models.cross_entropy(params, *batch) + jax.tree.reduce(jnp.add, penalty)

    def arguments(self, hypers: Any, key: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `hg.train` and `hg.check_reversal` take."""
        init_key, batch_key = jax.random.split(key)
        params = _models.init_mlp(init_key, self.sizes, hypers["init_scale"])
        sgd = hg.SGD(hypers["learning_rate"], hypers["momentum"])
        batches = hg.minibatches(tuple(self.data.train), self.config.batch_size, batch_key)
        return (self.loss, params, sgd, batches), {"theta": hypers["penalties"], "steps": self.config.steps}

    def train_fn(self, hypers: Any, key: Array) -> Any:
        arguments, options = self.arguments(hypers, key)
        return hg.train(*arguments, **options).params

    def val_fn(self, params: Any) -> Array:
        return _models.cross_entropy(params, *self.data.validation)

    def hypers(self, learning_rate: Any) -> dict[str, Any]:
        """The start: everything constant, in natural units and with its domain."""
        config = self.config
        shapes = jax.eval_shape(lambda: _models.init_mlp(jax.random.key(0), self.sizes, 1.0))
        scale = {n: {"weights": p["weights"].shape[0] ** -0.5, "biases": 0.01} for n, p in shapes.items()}
        rates = {name: hg.PerStep(jnp.full(config.steps, learning_rate)) for name in shapes}
        return {
            "learning_rate": hg.positive(rates),
            "momentum": hg.unit_interval(hg.PerStep(jnp.full(config.steps, config.momentum))),
            "init_scale": hg.positive(scale),
            "penalties": hg.positive(jax.tree.map(lambda p: jnp.full(p.shape, config.penalty), shapes)),
        }

    def report(self, hypers: Any) -> Report:
        """Averages over fresh initializations and batches, in one vmapped run."""
        return Report(*(float(x) for x in self._measure(hypers)))

    @functools.partial(jax.jit, static_argnums=0)
    def _measure(self, hypers: Any) -> list[Array]:
        keys = jax.random.split(jax.random.key(self.config.seed + 1_000), self.config.report_seeds)
        params = jax.vmap(lambda k: self.train_fn(hg.natural(hypers), k))(keys)
        rows = [(f, s) for s in (self.data.validation, self.data.test) for f in (_models.cross_entropy, _models.error_rate)]
        return [jnp.mean(jax.vmap(lambda p, f=f, s=s: f(p, *s))(params)) for f, s in rows]


def best_constant(experiment: Experiment) -> float:
    """The best of 16 constant learning rates by validation loss, all trained at once; printed."""
    rates = jnp.asarray(np.geomspace(0.01, 10, 16), jnp.float32)
    keys = jax.random.split(jax.random.key(experiment.config.seed), 3)

    def value(rate: Array, key: Array) -> Array:
        arguments, options = experiment.arguments(hg.natural(experiment.hypers(rate)), key)
        return experiment.val_fn(hg.train(*arguments, **options, throw=False).params)  # NaN where a rate diverges

    losses = jax.jit(jax.vmap(lambda r: jnp.mean(jax.vmap(lambda k: value(r, k))(keys))))(rates)
    best = int(jnp.nanargmin(losses))
    print("constant learning rates and their validation losses:")
    for i, (rate, loss) in enumerate(zip(rates.tolist(), losses.tolist(), strict=True)):
        print(f"  {rate:7.3f}  {loss:8.4f}{'  <- best' if i == best else ''}")
    return float(rates[best])


def certificate(experiment: Experiment, hypers: Any) -> hg.Certificate:
    arguments, options = experiment.arguments(hg.natural(hypers), jax.random.key(experiment.config.seed))
    return hg.check_reversal(*arguments, **options)


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    experiment = Experiment(config, _data.load(config.data, config.seed))
    rate = config.start if config.start is not None else best_constant(experiment)
    start = experiment.hypers(rate)
    count = sum(x.size for x in jax.tree.leaves(start))
    print(f"learning {count:,} hyperparameters in {config.meta_steps} meta-steps from learning rate {rate:.3g}:")
    meta_optimizer = optax.adam(optax.cosine_decay_schedule(config.meta_learning_rate, config.meta_steps, 0.1))
    key = jax.random.key(config.seed + 1)
    progress = [_record.EveryTenth(config.meta_steps)]
    result = hg.optimize(
        experiment.train_fn, experiment.val_fn, start,
        meta_steps=config.meta_steps, meta_optimizer=meta_optimizer, key=key, callbacks=progress,
    )  # fmt: skip
    before, after, proof = (
        experiment.report(start),
        experiment.report(result.hypers),
        certificate(experiment, result.hypers),
    )
    seconds = time.perf_counter() - begin
    print(f"before: {before}\nafter:  {after}")
    print(f"test loss {1 - after.test_loss / before.test_loss:.1%} lower")
    print(f"reversal {'exact' if proof.exact else f'FAILED: {proof.first_mismatch}'}, every bit compared; ", end="")
    print(f"bits per parameter and step: {proof.bits_per_parameter_step:.4f}, ", end="")
    print(f"log2(1/gamma) = {proof.ideal_bits_per_parameter_step:.4f}")
    pictures = _quickstart_plots.draw(config.out, start, result, experiment.data.side)
    numbers = {
        "hyperparameters": count, "start_learning_rate": rate, "before": before._asdict(), "after": after._asdict(),
        "values": [s.value for s in result.history],
    }  # fmt: skip
    record = _record.write(
        config.out, "quickstart", config, numbers,
        seeds=[config.seed], seconds=seconds, certificate=proof, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return numbers | {"certificate": proof._asdict()}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
