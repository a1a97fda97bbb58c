"""What a trial tried is what it is asked for again; a tree of another form is never passed off as it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optuna
import pytest

import hypergrad as hg
from hypergrad.studies import _marks


optuna.logging.set_verbosity(optuna.logging.ERROR)


def start(value=0.5):
    return {"rate": hg.positive(value)}


def rate(hypers):
    return float(hg.natural(hypers)["rate"])


def objective(trial):
    hypers = hg.studies.suggest_tree(trial, start())
    x = rate(hypers)
    hg.studies.report_gradient(trial, jax.tree.map(lambda u: jnp.asarray(2 * x * (x - 3), u.dtype), hypers))
    return (x - 3) ** 2


def study_of(objective=objective, trials=3):
    study = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0))
    study.optimize(objective, n_trials=trials)
    return study


def steps(study):
    return [_marks.read_link(trial).step for trial in study.trials]


def test_a_finished_trial_gives_back_what_it_tried_under_another_setting_of_x64() -> None:
    best = study_of().best_trial
    tried = rate(hg.studies.suggest_tree(best, start()))
    with jax.enable_x64(True):
        again = hg.studies.suggest_tree(best, start())
        assert again["rate"].unconstrained.dtype == jnp.float64
        assert rate(again) == pytest.approx(tried, rel=1e-6) and tried != pytest.approx(0.5)


@pytest.mark.parametrize(
    ("hypers", "problem"),
    [
        ({"rate": hg.bounded(0.5, 0.0, 9.0)}, "float32[] in positive at ['rate'] there, float32[] in bounded 0..9 here"),
        ({**start(), "new": 1.0}, "nothing at ['new'] there, float32[] in the real line here"),
    ],
    ids=["domain", "one more"],
)
def test_a_finished_trial_of_another_tree_is_an_error(hypers, problem) -> None:
    with pytest.raises(ValueError) as caught:
        hg.studies.suggest_tree(study_of(trials=1).trials[0], hypers)
    assert str(caught.value).startswith(f"trial 0 tried another tree than `hypers`: {problem}")


def test_a_finished_trial_without_a_tree_is_an_error() -> None:
    study = optuna.create_study()
    hg.studies.RecordTrials(study)(hg.MetaStep(0, 1.0, 1.0, 0.1, None, 0.0, start(2.0)))
    with pytest.raises(ValueError, match="trial 0 suggested no tree"):
        hg.studies.suggest_tree(study.best_trial, start())


@pytest.mark.parametrize("other", [{"b": 0.5}, {"a": 0.7}], ids=["unlike", "alike"])
def test_a_second_tree_in_one_trial_is_an_error(other) -> None:
    trial = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0)).ask()
    first = hg.studies.suggest_tree(trial, {"a": 0.5})
    assert hg.studies.suggest_tree(trial, {"a": 0.5}) == first  # the same twice is one
    with pytest.raises(ValueError, match="one tree a trial"):
        hg.studies.suggest_tree(trial, other)
    assert _marks.read_tree(trial.storage.get_trial_system_attrs(trial._trial_id)).leaves.keys() == {"['a']"}


def test_a_worker_with_another_setting_of_x64_goes_on_with_the_chain() -> None:
    """The other road: a study that never changed it."""
    study, other = study_of(), study_of(trials=6)
    with jax.enable_x64(True):
        study.optimize(objective, n_trials=2)
    study.optimize(objective, n_trials=1)
    assert steps(study) == list(range(6))
    np.testing.assert_allclose([t.value for t in study.trials], [t.value for t in other.trials], rtol=1e-4)
    assert all(_marks.read_gradient(trial).tree.size == 1 for trial in study.trials)


def test_a_worker_with_another_tree_begins_a_chain_of_its_own_and_says_so() -> None:
    study = study_of()

    def longer(trial):
        hypers = hg.studies.suggest_tree(trial, {"rate": hg.positive(np.full(2, 0.5, np.float32))})
        hg.studies.report_gradient(trial, hypers)
        return 1.0 + trial.suggest_int("depth", 1, 3)

    with pytest.warns(
        UserWarning, match=r"trial 3 does not go on with the chain of trial 0.*float32\[\] in positive at"
    ) as told:
        study.optimize(longer, n_trials=1)
    assert [w.filename for w in told] == [__file__]
    assert steps(study) == [0, 1, 2, 0] and _marks.read_link(study.trials[3]).chain == 3


def test_a_tree_begins_no_chain_in_the_middle_of_one_of_numbers() -> None:
    def with_number(trial, tree):
        x = trial.suggest_float("x", -1.0, 1.0)
        hypers = hg.studies.suggest_tree(trial, start()) if tree else {}
        hg.studies.report_gradient(trial, {"x": 2 * x, **hypers})
        return x**2

    study = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0))
    study.enqueue_trial({"x": 0.5})
    study.optimize(lambda trial: with_number(trial, False), n_trials=3)
    with pytest.warns(UserWarning, match=r"trial 3 does not go on with the chain of trial 0.*nothing at \['rate'\] there"):
        study.optimize(lambda trial: with_number(trial, True), n_trials=1)
    assert steps(study) == [0, 1, 2, 0]


def test_meta_steps_are_recorded_in_a_study_that_minimizes_one_value() -> None:
    for directions in (["maximize"], ["minimize", "minimize"]):
        with pytest.raises(ValueError, match=f"the directions of the study are \\[{', '.join(directions)}\\]"):
            hg.studies.RecordTrials(optuna.create_study(directions=directions))
    with pytest.raises(TypeError, match="RecordTrials needs an Optuna study.*got str"):
        hg.studies.RecordTrials("study")


def test_single_floats_of_any_type_are_recorded_and_what_is_no_number_is_passed_over() -> None:
    study = optuna.create_study()
    hypers = {"half": jnp.bfloat16(0.5), "key": hg.fixed(jax.random.key(0)), "rule": hg.fixed("adam"), "many": jnp.ones(2)}
    hg.studies.RecordTrials(study)(hg.MetaStep(0, 1.0, 1.0, 0.1, None, 0.0, hypers))
    assert study.trials[0].user_attrs["hypers"] == {"['half']": 0.5}


@pytest.mark.parametrize("inner", [optuna.samplers.RandomSampler, "tpe"], ids=["class", "name"])
def test_an_inner_sampler_is_a_sampler(inner) -> None:
    with pytest.raises(TypeError, match="`inner_sampler` must be a sampler of Optuna, called"):
        hg.studies.HypergradientSampler(inner_sampler=inner)


def test_a_meta_optimizer_that_searches_along_a_line_is_refused() -> None:
    with pytest.raises(TypeError, match=r"this one asks for more \(.*value_fn.*is for hg.optimize"):
        hg.studies.HypergradientSampler(meta_optimizer=optax.lbfgs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hg.studies.HypergradientSampler(meta_optimizer=optax.contrib.reduce_on_plateau())  # reads the value


def test_a_chain_goes_on_whatever_the_order_of_reports():
    def points(turn):
        study = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=1))
        study.enqueue_trial({"a": 4.0, "b": -2.0})

        def objective(trial):
            a, b = (trial.suggest_float(name, -5, 5) for name in "ab")
            gradient = {"a": 2 * (a - 1), "b": 20 * (b - 1)}
            hg.studies.report_gradient(trial, dict(reversed(gradient.items())) if turn and trial.number % 2 else gradient)
            return (a - 1) ** 2 + 10 * (b - 1) ** 2

        study.optimize(objective, n_trials=8)
        return [trial.params for trial in study.trials]

    assert points(False) == points(True)
