"""What a step of a chain costs the sampler: 1,608 continuous parameters, in-memory storage, an objective of no work.

    python -m experiments.benchmarks.sampler_overhead [--parameters 1608] [--trials 30]

Medians over trials of studies in turn: one whose sampler does nothing, one whose sampler goes on with a chain. Both suggest
every parameter by a call of its own, as Optuna has it. The third suggests the same numbers as one tree.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optuna
import tyro

import hypergrad as hg


BOTTOM = -9.0  # the log of where the objective is lowest: a hundred steps away


@dataclasses.dataclass(frozen=True)
class Config:
    parameters: int = 1_608
    trials: int = 30


class Nothing(optuna.samplers.BaseSampler):
    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> float:
        return 1.0


def objective(names: list[str]) -> Callable[[optuna.Trial], float]:
    def suggest(trial: optuna.Trial) -> float:
        x = np.array([trial.suggest_float(name, 1e-4, 10.0, log=True) for name in names])
        if not isinstance(trial.study.sampler, Nothing):
            hg.studies.report_gradient(trial, dict(zip(names, (2 * (np.log(x) - BOTTOM) / x).tolist(), strict=True)))
        return float(np.mean((np.log(x) - BOTTOM) ** 2))

    return suggest


def tree_objective(count: int) -> Callable[[optuna.Trial], float]:
    start = {"rates": hg.positive(jnp.full(count, 3.0))}

    def suggest(trial: optuna.Trial) -> float:
        tree = hg.studies.suggest_tree(trial, start)
        hg.studies.report_gradient(trial, jax.tree.map(lambda u: 2 * (u - BOTTOM), tree))
        return float(jnp.mean((tree["rates"].unconstrained - BOTTOM) ** 2))

    return suggest


def main(config: Config) -> dict[str, float]:
    """Milliseconds per trial."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = [f"rate_{i:04d}" for i in range(config.parameters)]
    rows: dict[str, tuple[optuna.Study, Any]] = {
        "a sampler that does nothing": (optuna.create_study(sampler=Nothing()), objective(names)),
        "HypergradientSampler, a step of a chain": (_study(), objective(names)),
        "the same numbers as one tree": (_study(), tree_objective(config.parameters)),
    }
    rows["HypergradientSampler, a step of a chain"][0].enqueue_trial(dict.fromkeys(names, 3.0))
    times: dict[str, list[float]] = {name: [] for name in rows}
    for i in range(config.trials + 3):  # the first compile, or start
        for name, (study, function) in rows.items():
            begin = time.perf_counter()
            study.optimize(function, n_trials=1)
            if i >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, (study, _) in rows.items():
        links = [trial.system_attrs.get("hypergrad:link") for trial in study.trials]
        assert all(link is None or link["step"] == i for i, link in enumerate(links)), "a chain broke off"
        print(f"{name:42} {medians[name]:6.1f} ms")
    return medians


def _study() -> optuna.Study:
    return optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
