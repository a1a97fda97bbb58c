"""An Optuna script, as its own documentation would write it, before and after two more lines.

    python -m experiments.optuna_quickstart [--trials 60] [--seed 0]

A tanh network learns scikit-learn's digits for 60 steps. Learning rate, momentum, scale of the initial weights and L2
penalty are suggested, the validation loss is minimized. `before` is the script that you may have. `after` computes the
hypergradient with the loss, reports it, and takes the sampler that follows it. The study stays what it was: its storage, its
dashboard, its pruners, its enqueued trials.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optuna
import tyro

import hypergrad as hg
from experiments import _data, _models


@dataclasses.dataclass(frozen=True)
class Config:
    trials: int = 60
    seed: int = 0
    steps: int = 60
    storage: str | None = None  # as in optuna.create_study, for example sqlite:///quickstart.db


ROOMY = hg.Reversible(capacity=8)  # words per parameter: inside `jax.jit` the momentum is not known, and it may be small


def loss(params: Any, l2: Any, batch: Any) -> jax.Array:
    return _models.cross_entropy(params, *batch) + l2 * sum(jnp.vdot(w, w) for w in jax.tree.leaves(params))


class Digits:
    """The training that both scripts share."""

    def __init__(self, steps: int, seed: int = 0) -> None:
        self.steps, self.data = steps, _data.load("digits", seed)

    def train_fn(self, hypers: Any, key: jax.Array) -> Any:
        init_key, batch_key = jax.random.split(key)
        params = _models.init_mlp(init_key, (64, 32, 10), hypers["init_scale"])
        sgd = hg.SGD(hypers["learning_rate"], hypers["momentum"])
        batches = hg.minibatches(tuple(self.data.train), 100, batch_key)
        return hg.train(loss, params, sgd, batches, theta=hypers["l2"], steps=self.steps, adjoint=ROOMY).params

    def val_fn(self, params: Any) -> jax.Array:
        return _models.cross_entropy(params, *self.data.validation)

    @functools.cached_property
    def value(self) -> Any:
        return jax.jit(lambda hypers, key: self.val_fn(self.train_fn(hypers, key)))

    @functools.cached_property
    def value_and_grad(self) -> Any:
        return jax.jit(jax.value_and_grad(lambda hypers, key: self.val_fn(self.train_fn(hypers, key))))


def suggest(trial: optuna.Trial) -> dict[str, float]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-3, 10.0, log=True),
        "momentum": trial.suggest_float("momentum", 0.1, 0.99),
        "init_scale": trial.suggest_float("init_scale", 1e-3, 1.0, log=True),
        "l2": trial.suggest_float("l2", 1e-6, 1e-1, log=True),
    }


def before(digits: Digits, config: Config) -> optuna.Study:
    def objective(trial: optuna.Trial) -> float:
        value = digits.value(suggest(trial), jax.random.key(0))
        return float(value)

    sampler = optuna.samplers.TPESampler(seed=config.seed)
    study = optuna.create_study(study_name="before", sampler=sampler, storage=config.storage)
    study.optimize(hg.studies.prune_on_error(objective), n_trials=config.trials)
    return study


def after(digits: Digits, config: Config) -> optuna.Study:
    def objective(trial: optuna.Trial) -> float:
        value, grads = digits.value_and_grad(suggest(trial), jax.random.key(0))
        hg.studies.report_gradient(trial, grads)  # the first line more
        return float(value)

    sampler = hg.studies.HypergradientSampler(seed=config.seed)  # and the second
    study = optuna.create_study(study_name="after", sampler=sampler, storage=config.storage)
    study.optimize(hg.studies.prune_on_error(objective), n_trials=config.trials)
    return study


def main(config: Config) -> dict[str, list[float]]:
    """The lowest validation loss after each trial."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    digits, found = Digits(config.steps), {}
    for script in (before, after):
        study = script(digits, config)
        lowest = float("inf")
        found[script.__name__] = [lowest := min(lowest, t.value if t.value is not None else lowest) for t in study.trials]
    for trials in sorted({*range(9, config.trials, 10), config.trials - 1}):
        print(f"{trials + 1:4d} trials   " + "   ".join(f"{name} {curve[trials]:.4f}" for name, curve in found.items()))
    return found


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
