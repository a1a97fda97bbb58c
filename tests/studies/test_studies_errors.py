"""What is asked of a sampler with gradients, and cannot be: errors, and one warning where the study can go on."""

import re
import warnings

import jax
import numpy as np
import optuna
import pytest

import hypergrad as hg
from hypergrad.studies import _marks


optuna.logging.set_verbosity(optuna.logging.ERROR)


def study_of(**options):
    return optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0), **options)


def test_several_objectives_are_refused():
    study = study_of(directions=["minimize", "minimize"])
    with pytest.raises(ValueError, match="follows the gradient of one objective; the study has 2"):
        study.ask()
    study.sampler = optuna.samplers.RandomSampler()
    trial = study.ask({"x": optuna.distributions.FloatDistribution(0.0, 1.0)})
    with pytest.raises(ValueError, match="is for one objective; the study has 2"):
        hg.studies.report_gradient(trial, {"x": 1.0})


@pytest.mark.parametrize(
    ("grads", "problem"),
    [
        ({"x": np.ones(3)}, r"'x' is one number, its derivative of shape \(3,\)"),
        ({"x": float("nan")}, "it is NaN, or beyond the range of float32, in x"),
        ({"x": 1e300}, "it is NaN, or beyond the range of float32, in x"),
        ({"x": hg.positive(hg.PerStep(np.ones(2, np.float32)))}, r"'x' is one number, its derivative of shape \(2,\)"),
        ({"x": hg.bounded(2.2, 2.1, 2.3)}, "'x' is .*, which is not in the domain of its derivative, hg.bounded"),
    ],
    ids=["shape", "nan", "infinite", "schedule", "domain"],
)
def test_a_gradient_that_cannot_be_used_is_ignored_with_one_warning(grads, problem):
    study = study_of()

    def objective(trial):
        x = trial.suggest_float("x", 0.1, 2.0)
        if trial.number == 4:
            hg.studies.report_gradient(trial, grads)
        else:
            hg.studies.report_gradient(trial, {"x": 2 * (x - 1)})
        return (x - 1) ** 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study.optimize(objective, n_trials=8)
    assert [str(w.message) for w in caught if "gradient is ignored" in str(w.message)] == [str(caught[0].message)]
    assert re.match(f"trial 4: its gradient is ignored: {problem}", str(caught[0].message))
    assert study.trials[4].state == optuna.trial.TrialState.COMPLETE
    assert all(_marks.read_link(t).parent != 4 for t in study.trials)


def test_names_that_were_not_suggested_are_errors():
    study = study_of()
    trial = study.ask()
    trial.suggest_float("x", 0.0, 1.0)
    trial.suggest_int("layers", 1, 3)
    with pytest.raises(ValueError, match=r"trial 0 suggested no 'y'; it suggested 'x', 'layers'. Report under those"):
        hg.studies.report_gradient(trial, {"x": 1.0, "y": 1.0})
    with pytest.raises(ValueError, match="'layers' is suggested as IntDistribution.*a gradient is of floats"):
        hg.studies.report_gradient(trial, {"layers": 1.0})
    with pytest.raises(ValueError, match='`space` is "natural" or "unconstrained"; got \'log\''):
        hg.studies.report_gradient(trial, {"x": 1.0}, space="log")
    with pytest.raises(ValueError, match="`grads` must be {name: derivative}; got float.$"):
        hg.studies.report_gradient(trial, 1.0)
    with pytest.raises(ValueError, match=r"got tuple. Give names: dict\(zip\(names, grads\)\)."):
        hg.studies.report_gradient(trial, (1.0,))


def test_a_study_in_which_nothing_is_reported_says_so_once() -> None:
    study = study_of()
    objective = lambda trial: trial.suggest_float("x", 0.1, 2.0)  # noqa: E731
    study.optimize(objective, n_trials=10)
    with pytest.warns(UserWarning, match="none of the study's 10 trials by HypergradientSampler has reported") as caught:
        study.optimize(objective, n_trials=4)
    assert len(caught) == 1


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="`meta_optimizer` must be an optax transformation like optax.adam"):
        hg.studies.HypergradientSampler(meta_optimizer="adam")


@pytest.mark.parametrize("given", ["a", "1.0", 1j, np.complex64(1), jax.random.key(0)], ids=str)
def test_a_derivative_is_a_real_number(given) -> None:
    trial = study_of().ask()
    trial.suggest_float("x", 0.0, 1.0)
    with pytest.raises(TypeError, match="the derivative of 'x' must be one real number; got"):
        hg.studies.report_gradient(trial, {"x": given})
    assert _marks.read_gradient(trial.study.trials[0]) is None
