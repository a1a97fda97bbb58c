"""Trials that are made again, samplers that are used again, and inner samplers that count their trials."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optuna
import pytest
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState

import hypergrad as hg
from hypergrad.studies import _marks


optuna.logging.set_verbosity(optuna.logging.ERROR)

START = {"x": jnp.float32(3.0)}


def study_of(**options: Any) -> optuna.Study:
    sampler = hg.studies.HypergradientSampler(seed=0, meta_optimizer=optax.sgd(0.2))
    return optuna.create_study(**{"sampler": sampler, **options})


def tried(trial: Any) -> float:
    return float(hg.studies.suggest_tree(trial, START)["x"])


def work(trial: Any, scale: float = 1.0) -> float:
    h = hg.studies.suggest_tree(trial, START)
    value, grads = jax.value_and_grad(lambda h: h["x"] ** 2)(h)
    hg.studies.report_gradient(trial, jax.tree.map(lambda g: scale * g, grads))
    return float(value)


@pytest.mark.parametrize("scale", [1.0, float("nan")])
def test_a_start_that_died_is_made_again_where_it_stood_with_a_gradient_of_its_own(scale: float) -> None:
    study = study_of()
    first, dying = study.ask(), study.ask()
    study.tell(first, work(first))
    work(dying)  # it dies after its report
    study.tell(dying, state=TrialState.FAIL)
    with pytest.warns(ExperimentalWarning):
        RetryHeartbeatStaleTrialCallback()(study, study.trials[1])
    again = study.ask()
    assert again.number == 2
    if scale == 1:
        study.tell(again, work(again, scale))
    else:
        with pytest.warns(UserWarning, match="its gradient is ignored"):
            study.tell(again, work(again, scale))
    died, made = study.trials[1:]
    assert tried(made) == tried(died) != tried(study.trials[0])
    assert _marks.read_link(made) == _marks.Link(2, 0, None)
    gradient = _marks.read_gradient(made)
    if scale == 1:
        assert gradient is not None and float(gradient.tree[0]) == pytest.approx(2 * tried(made))
    else:
        assert gradient is None


def along(study: optuna.Study, start: float, trials: int, high: float = 10.0) -> list[float]:
    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", 0, high)
        hg.studies.report_gradient(trial, {"x": 1.0})
        return x

    study.enqueue_trial({"x": start})
    study.optimize(objective, n_trials=trials)
    return [trial.params["x"] for trial in study.trials]


@pytest.mark.parametrize("change", [{"direction": "maximize"}, {"start": 1.0}, {"high": 6.0}], ids=lambda x: next(iter(x)))
def test_a_sampler_knows_a_study_by_what_is_in_it(change: dict[str, Any]) -> None:
    def run(sampler: Any, trials: int, direction: str = "minimize", start: float = 5.0, high: float = 10.0) -> list[float]:
        study = optuna.create_study(study_name="run", direction=direction, sampler=sampler)
        return along(study, start, trials, high)

    used = hg.studies.HypergradientSampler(seed=0)
    run(used, 2)
    assert run(used, 4, **change) == run(hg.studies.HypergradientSampler(seed=0), 4, **change)


def test_a_grid_gives_the_starts() -> None:
    cells = {"c": ["a", "b", "d"]}
    inner = optuna.samplers.GridSampler(cells, seed=0)
    study = study_of(sampler=hg.studies.HypergradientSampler(seed=0, inner_sampler=inner))

    def objective(trial: Any) -> float:
        target = {"a": 1.0, "b": 2.0, "d": 3.0}[trial.suggest_categorical("c", cells["c"])]
        h = hg.studies.suggest_tree(trial, {"r": hg.positive(1.0)})
        value, grads = jax.value_and_grad(lambda h: (hg.natural(h)["r"] - target) ** 2)(h)
        hg.studies.report_gradient(trial, grads)
        return float(value)

    study.optimize(objective, n_trials=30)
    assert {trial.params["c"] for trial in study.trials} == {*cells["c"]}


def test_a_trial_that_leaves_its_chain_ends_no_grid() -> None:
    inner = optuna.samplers.GridSampler({"c": ["a", "b"]}, seed=0)
    study = study_of(sampler=hg.studies.HypergradientSampler(seed=0, inner_sampler=inner))

    def objective(trial: Any) -> float:
        trial.suggest_categorical("c", ["a", "b"])
        h = hg.studies.suggest_tree(trial, {"r" if trial.number < 2 else "s": jnp.float32(1.0)})
        value, grads = jax.value_and_grad(lambda h: sum(x**2 for x in h.values()))(h)
        hg.studies.report_gradient(trial, grads)
        return float(value)

    with pytest.warns(UserWarning, match="begins a chain of its own"):
        study.optimize(objective, n_trials=8)
