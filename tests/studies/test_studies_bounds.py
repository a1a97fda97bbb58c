"""Descent near the ends of an interval."""

import numpy as np
import optuna
import pytest

import hypergrad as hg
from hypergrad.studies import _chains, _descent


optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(autouse=True)
def without_exploration(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chain after the other."""
    monkeypatch.setattr(_chains, "EXPLORATION", 10**6)


@pytest.mark.parametrize(("low", "high", "start", "end"), [(0.0, 1000.0, 0.3, 0.1), (0.0, 1.0, 1 - 2e-4, 1 - 1e-4)])
def test_descent_goes_where_the_gradient_points_near_an_end_too(low: float, high: float, start: float, end: float) -> None:
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", low, high)
        hg.studies.report_gradient(trial, {"x": 2 * (x - end)})
        return (x - end) ** 2

    study = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0))
    study.enqueue_trial({"x": start})
    study.optimize(objective, n_trials=12)
    chain = [t.params["x"] for t in study.trials if t.system_attrs["hypergrad:link"]["chain"] == 0]
    off = [abs(x - end) for x in chain]
    assert len(chain) > 3 and off[1] < off[0] and min(off) < off[0] / 4


def test_no_step_comes_to_a_bound() -> None:
    axes = _descent.Axes(("x",), np.zeros(1), np.ones(1), np.zeros(1, bool))
    for u in (-1e3, 1e3):
        x = axes.natural(np.array([u]))
        assert 0 < x < 1 and np.sign(axes.unconstrained(x)) == np.sign(u) and np.isfinite(axes.slope(x))
