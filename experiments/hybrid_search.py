"""Depth, width and optimizer by TPE, schedules inside of each choice by their gradient: one study.

    python -m experiments.hybrid_search [--trials 80] [--storage sqlite:///hybrid.db]

A network with one to three hidden layers of 16 or 64 units learns the digits by SGD or Adam for 100 steps. TPE proposes
depth, width and optimizer. Inside of a choice a learning rate per step and layer, a momentum per step and a scale of the
initial weights per layer go down the hypergradient of the validation loss, as one suggested tree. Beside it is the usual
study of as many trials: TPE on the same choices and three constants. A trial of it is one training, where one with a
hypergradient costs some four.
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optuna
import tyro

import hypergrad as hg
from experiments import _comparison_plots, _config, _data, _models, _plots, _record


@dataclasses.dataclass(frozen=True)
class Config:
    trials: int | None = None  # 80
    steps: int | None = None  # 100
    depths: int | None = None  # 3
    seed: int = 0
    storage: str | None = None  # as in optuna.create_study; in memory without
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/hybrid_search")


PRESETS: dict[str, dict[str, Any]] = {
    "": {"trials": 80, "steps": 100, "depths": 3},
    "tiny": {"trials": 3, "steps": 3, "depths": 1},
}

WIDTHS, OPTIMIZERS = (16, 64), ("sgd", "adam")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What only a sampler can choose."""

    depth: int
    width: int
    optimizer: str

    @property
    def sizes(self) -> tuple[int, ...]:
        return (64, *[self.width] * self.depth, 10)

    def start(self, steps: int, rate: Any = None, momentum: Any = 0.9, scale: Any = 0.1) -> dict[str, Any]:
        """Constants as schedules, in their domains."""
        rate = {"sgd": 1.0, "adam": 0.01}[self.optimizer] if rate is None else rate
        names = [f"layer_{i + 1}" for i in range(self.depth + 1)]
        return {
            "learning_rate": hg.positive({name: hg.PerStep(jnp.full(steps, rate)) for name in names}),
            "momentum": hg.unit_interval(hg.PerStep(jnp.full(steps, momentum))),
            "init_scale": hg.positive({name: jnp.float32(scale) for name in names}),
        }


def suggested_choice(trial: optuna.Trial, depths: int) -> Choice:
    return Choice(
        trial.suggest_int("depth", 1, depths),
        trial.suggest_categorical("width", WIDTHS if depths > 1 else WIDTHS[:1]),
        trial.suggest_categorical("optimizer", OPTIMIZERS if depths > 1 else OPTIMIZERS[:1]),
    )


class Experiment:
    def __init__(self, config: Config) -> None:
        self.config, self.data = config, _data.load("digits", config.seed)
        self.compiled = functools.cache(self._compile)

    def losses(self, choice: Choice, hypers: Any) -> tuple[jax.Array, jax.Array]:
        """(validation, test) after training, always from the same initialization, with the same batches."""
        h = hg.natural(hypers)
        init_key, batch_key = jax.random.split(jax.random.key(self.config.seed))
        params = _models.init_mlp(init_key, choice.sizes, h["init_scale"])
        rule = {"sgd": hg.SGD, "adam": hg.Adam}[choice.optimizer](h["learning_rate"], h["momentum"])
        batches = hg.minibatches(tuple(self.data.train), 100, batch_key)
        words = -(-self.config.steps * 7 // 64) + 1  # room for momenta of 0.1: 3.4 bits a step
        roomy = hg.Reversible(capacity=words)
        run = hg.train(_loss, params, rule, batches, steps=self.config.steps, adjoint=roomy)
        return tuple(_models.cross_entropy(run.params, *part) for part in (self.data.validation, self.data.test))

    def _compile(self, choice: Choice, gradient: bool) -> Any:
        """Once for each choice; as it has another network, it is another program."""
        function = functools.partial(self.losses, choice)
        function = jax.value_and_grad(function, has_aux=True) if gradient else function
        return jax.jit(function, compiler_options=hg.compiler_options())

    def hybrid(self, trial: optuna.Trial) -> float:
        choice = suggested_choice(trial, self.config.depths)
        hypers = hg.studies.suggest_tree(trial, choice.start(self.config.steps))
        (value, test), grads = self.compiled(choice, True)(hypers)
        hg.studies.report_gradient(trial, grads)
        trial.set_user_attr("test", float(test))
        return float(value)

    def constants(self, trial: optuna.Trial) -> float:
        choice = suggested_choice(trial, self.config.depths)
        rate = trial.suggest_float(f"rate of {choice.optimizer}", *RATES[choice.optimizer], log=True)
        momentum = trial.suggest_float("momentum", 0.1, 0.99)
        scale = trial.suggest_float("init_scale", 0.01, 0.5, log=True)
        value, test = self.compiled(choice, False)(choice.start(self.config.steps, rate, momentum, scale))
        trial.set_user_attr("test", float(test))
        return float(value)


RATES = {"sgd": (0.05, 10.0), "adam": (0.001, 0.1)}


def _loss(params: Any, theta: None, batch: Any) -> jax.Array:
    return _models.cross_entropy(params, *batch)


def main(config: Config) -> dict[str, Any]:
    begin, config = time.perf_counter(), _config.filled(config, PRESETS)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    experiment, studies = Experiment(config), {}
    for name, objective, sampler in (
        ("constants by TPE", experiment.constants, optuna.samplers.TPESampler(seed=config.seed)),
        ("schedules by gradient", experiment.hybrid, hg.studies.HypergradientSampler(seed=config.seed)),
    ):
        study = optuna.create_study(study_name=name, sampler=sampler, storage=config.storage, load_if_exists=True)
        left = config.trials - len(study.trials)
        if left > 0:
            study.optimize(hg.studies.prune_on_error(objective), n_trials=left)
        studies[name] = study
    found = {name: _numbers(study) for name, study in studies.items()}
    for name, row in found.items():
        print(f"{name:22} validation {row['validation'][-1]:.4f}   test {row['test']:.4f}   {row['choice']}")
    pictures = _plots.save(config.out, {"hybrid": _comparison_plots.hybrid(found)})
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "hybrid_search", config, found, seeds=[config.seed], seconds=seconds, pictures=pictures
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return found


def _numbers(study: optuna.Study) -> dict[str, Any]:
    """validation: lowest so far, by trial; by_choice: lowest of each choice and how many trials it had."""
    values = [np.inf if trial.value is None else trial.value for trial in study.trials]
    best, by_choice = study.best_trial, {}
    for trial, value in zip(study.trials, values, strict=True):
        label = _label(trial)
        lowest, count = by_choice.get(label, (np.inf, 0))
        by_choice[label] = (min(lowest, value), count + 1)
    return {
        "validation": np.minimum.accumulate(values).tolist(), "test": best.user_attrs["test"],
        "choice": _label(best), "by_choice": by_choice,
    }  # fmt: skip


def _label(trial: Any) -> str:
    return f"{trial.params['depth']} x {trial.params['width']}, {trial.params['optimizer']}"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
