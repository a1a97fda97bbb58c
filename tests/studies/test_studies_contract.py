"""Optuna's contract of samplers: its own test classes, and the same situations when gradients are reported in them."""

import warnings

import numpy as np
import optax
import optuna
import optuna.testing.pytest_samplers as contract
import pytest

import hypergrad as hg
from hypergrad.studies import _marks


optuna.logging.set_verbosity(optuna.logging.ERROR)


pytestmark = pytest.mark.filterwarnings("ignore:none of the study's")  # the contract knows nothing of gradients


class TestSampler(contract.BasicSamplerTestCase, contract.SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self):
        return lambda: hg.studies.HypergradientSampler(seed=0)


class TestRelativeSampler(contract.RelativeSamplerTestCase):
    @pytest.fixture
    def sampler(self):
        """TPE takes part in relative sampling once its startup trials are over."""
        inner = optuna.samplers.TPESampler(n_startup_trials=0, seed=0)
        return lambda: hg.studies.HypergradientSampler(inner_sampler=inner)


def study_of(sampler=None, **options):
    return optuna.create_study(sampler=sampler or hg.studies.HypergradientSampler(seed=0), **options)


def mixed(trial):
    """Every kind of parameter, with a gradient of the three that have one; lowest at large x and y, b and four layers."""
    x = trial.suggest_float("x", -1.0, 2.0)
    y = trial.suggest_float("y", 1e-4, 10.0, log=True)
    free = trial.suggest_float("free", 0.0, 1.0)
    stepped = trial.suggest_float("stepped", 0.0, 1.0, step=0.25)
    layers = trial.suggest_int("layers", 1, 4)
    cost = {"a": 1.0, "b": 0.0}[trial.suggest_categorical("kind", ["a", "b"])]
    hg.studies.report_gradient(trial, {"x": -1.0, "y": -1.0, "stepped": 2.0})
    return -x - y + free + 2 * stepped - layers + cost


def trace(study):
    return [(t.params, t.value, _marks.read_link(t)) for t in study.trials]


def steps(study):
    return [_marks.read_link(t).step for t in study.trials]


def test_seeds_reproduce():
    one, same, other = (study_of(hg.studies.HypergradientSampler(seed=seed)) for seed in (1, 1, 2))
    for study in (one, same, other):
        study.optimize(mixed, n_trials=14)
    assert trace(one) == trace(same) != trace(other)
    assert max(steps(one)) > 2


def test_without_a_seed_studies_differ():
    studies = [study_of(hg.studies.HypergradientSampler()) for _ in range(2)]
    for study in studies:
        study.optimize(mixed, n_trials=2)
    assert trace(studies[0]) != trace(studies[1])


def test_descent_respects_distributions_and_bounds():
    study = study_of(hg.studies.HypergradientSampler(meta_optimizer=optax.sgd(3.0), seed=3))
    study.optimize(mixed, n_trials=25)
    assert max(steps(study)) > 3
    for trial in study.trials:
        assert trial.state == optuna.trial.TrialState.COMPLETE
        for name, distribution in trial.distributions.items():
            assert distribution._contains(distribution.to_internal_repr(trial.params[name]))
    assert max(t.params["y"] for t in study.trials) == 10.0  # pushed into its bound, and kept there


def test_along_a_chain_only_what_has_a_gradient_moves():
    study = study_of()
    study.optimize(mixed, n_trials=25)
    moved = 0
    for trial in study.trials:
        link = _marks.read_link(trial)
        if link.step:
            parent = study.trials[link.parent]
            same = {k for k in trial.params if trial.params[k] == parent.params[k]}
            assert same == {"free", "stepped", "layers", "kind"}
            assert trial.params["x"] > parent.params["x"] and trial.params["y"] >= parent.params["y"]
            moved += 1
    assert moved > 5


def test_the_inner_sampler_goes_on_choosing_what_has_no_gradient():
    study = study_of()
    study.optimize(mixed, n_trials=30)
    begun = [i for i, step in enumerate(steps(study)) if step == 0]
    assert max(b - a for a, b in zip(begun, begun[1:], strict=False)) <= 4 and len(begun) < 20


def test_an_inner_sampler_of_ones_own_begins_every_chain():
    grid = optuna.samplers.GridSampler({"x": [0.5, 1.5]}, seed=0)
    study = study_of(hg.studies.HypergradientSampler(inner_sampler=grid))
    study.optimize(parabola, n_trials=2)
    assert {trial.params["x"] for trial in study.trials} == {0.5, 1.5}


def parabola(trial):
    x = trial.suggest_float("x", -2.0, 2.0)
    hg.studies.report_gradient(trial, {"x": 2 * (x - 1)})
    return (x - 1) ** 2


def test_failed_pruned_and_nan_trials_are_passed_over():
    study = study_of()

    def objective(trial):
        value = parabola(trial)
        if trial.number % 4 == 1:
            raise ArithmeticError
        if trial.number % 4 == 2:
            raise optuna.TrialPruned
        return float("nan") if trial.number % 8 == 3 else value

    study.optimize(objective, n_trials=40, catch=(ArithmeticError,))
    counted = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    assert len(study.trials) == 40 and len(counted) == 15
    for trial in study.trials:
        link = _marks.read_link(trial)
        assert link.parent is None or study.trials[link.parent].state == optuna.trial.TrialState.COMPLETE


def test_attempts_that_failed_make_the_next_one_shorter():
    study = study_of()
    study.enqueue_trial({"x": -1.0})
    study.optimize(parabola, n_trials=1)
    tried = []
    for _ in range(3):
        trial = study.ask()
        tried.append(trial.suggest_float("x", -2.0, 2.0) + 1.0)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    assert steps(study) == [0, 1, 1, 1] and tried[0] > 0
    np.testing.assert_allclose(tried, tried[0] / 4.0 ** np.arange(3), rtol=0.03)  # short, so all but straight in u
    trial = study.ask()
    trial.suggest_float("x", -2.0, 2.0)
    assert steps(study)[-1] == 0  # given up


def test_conditional_spaces():
    study = study_of()

    def objective(trial):
        name = trial.suggest_categorical("which", ["x", "y"])
        value = trial.suggest_float(name, 0.0, 1.0)
        hg.studies.report_gradient(trial, {name: 2 * (value - 0.5)})
        return (value - 0.5) ** 2

    study.optimize(objective, n_trials=30)
    for trial in study.trials:
        assert set(trial.params) == {"which", trial.params["which"]}
        link = _marks.read_link(trial)
        assert link.step == 0 or study.trials[link.parent].params["which"] == trial.params["which"]
    assert max(steps(study)) > 1


def test_changing_ranges():
    study = study_of()

    def objective(trial, low, high):
        x = trial.suggest_float("x", low, high)
        hg.studies.report_gradient(trial, {"x": 2 * x})
        return x**2

    for low, high in ((0.0, 10.0), (5.0, 20.0), (-30.0, -25.0)):
        study.optimize(lambda trial, low=low, high=high: objective(trial, low, high), n_trials=8)
        assert all(low <= trial.params["x"] <= high for trial in study.trials[-8:])


def test_parallel_asks_take_different_places():
    study = study_of()
    study.optimize(parabola, n_trials=6)
    trials = [study.ask() for _ in range(5)]
    xs = {trial.suggest_float("x", -2.0, 2.0) for trial in trials}
    places = {_marks.read_link(study.trials[trial.number])[:2] for trial in trials}
    assert len(xs) == len(places) == 5
    for trial in trials:
        study.tell(trial, parabola(trial))


def test_threads():
    study = study_of()
    study.optimize(parabola, n_trials=20, n_jobs=2)
    assert len(study.trials) == 20 and study.best_value < 0.5


def test_a_trial_that_was_enqueued_begins_a_chain():
    study = study_of()
    study.enqueue_trial({"x": -1.5})
    study.optimize(parabola, n_trials=2)
    assert steps(study) == [0, 1] and study.trials[0].params == {"x": -1.5}
    study.enqueue_trial({"x": 1.9})
    study.optimize(parabola, n_trials=1)
    assert steps(study)[-1] == 0 and study.trials[-1].params == {"x": 1.9}


def test_trials_of_other_samplers_begin_chains():
    study = study_of(optuna.samplers.RandomSampler(seed=0))
    study.optimize(parabola, n_trials=4)
    study.sampler = hg.studies.HypergradientSampler(seed=0)
    study.optimize(parabola, n_trials=1)
    best = min(study.trials[:4], key=lambda trial: trial.value).number
    assert _marks.read_link(study.trials[-1]) == (best, 1, best)


def test_hyperband_sees_whole_chains():
    """It shows samplers only the trials of a bracket."""
    pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9)
    study = study_of(pruner=pruner)
    study.optimize(parabola, n_trials=9)
    assert steps(study)[4:7] == [1, 2, 3]


def test_marks_of_another_version_are_passed_over_with_one_warning():
    study = study_of()
    study.optimize(parabola, n_trials=5)
    assert steps(study)[-1] == 1
    newer = study_of()
    for trial in study.trials:
        attributes = {k: {"format": 99, "other": "content"} for k in trial.system_attrs}
        newer.add_trial(
            optuna.create_trial(
                value=trial.value, params=trial.params, distributions=trial.distributions, system_attrs=attributes
            )
        )
    with pytest.warns(UserWarning, match=r"another version of hypergrad wrote them \(format 99, here 1\)") as caught:
        newer.optimize(parabola, n_trials=8)
    assert len(caught) == 1
    assert [_marks.read_link(t) is None for t in newer.trials] == 5 * [True] + 8 * [False]
    assert max(_marks.read_link(t).step for t in newer.trials[5:]) > 0


def test_partial_fixed_sampler_around_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.PartialFixedSampler({"layers": 3}, hg.studies.HypergradientSampler(seed=0))
    study = study_of(sampler)
    study.optimize(mixed, n_trials=12)
    assert {t.params["layers"] for t in study.trials} == {3} and max(steps(study)) > 1
