"""What others wrote besides marks: fields of trials, the seed of a study, attributes that users may have called as we do."""

import datetime
import warnings
from typing import Any

import numpy as np
import optuna
import pytest

import hypergrad as hg
from hypergrad.studies import _chains, _marks


optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial: Any) -> float:
    x, y = trial.suggest_float("x", -5, 5), trial.suggest_float("y", -5, 5)
    hg.studies.report_gradient(trial, {"x": 2 * (x - 1), "y": 2 * (y + 2)})
    return (x - 1) ** 2 + (y + 2) ** 2


def study_of() -> optuna.Study:
    study = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0))
    study.optimize(objective, n_trials=6)
    return study


FIELDS: dict[str, dict[str, Any]] = {
    "no value": {"values": None},
    "nobody knows when": {"datetime_start": None},
    "long ago": {"datetime_start": datetime.datetime(1, 1, 1)},
    "NaN": {"params": {"x": float("nan"), "y": 0.0}},
    "text": {"params": {"x": "a", "y": 0.0}},
    "outside of its interval": {"params": {"x": -6.0, "y": 0.0}},
    "a time with a zone": {"datetime_start": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
    "no parameters": {"params": {}},
}


@pytest.mark.parametrize("way", FIELDS)
def test_fields_of_trials_are_not_trusted_either(way: str) -> None:
    study = study_of()
    for trial in study.trials:
        for name, value in FIELDS[way].items():
            setattr(study._storage._get_trial(trial._trial_id), name, value)  # type: ignore[attr-defined]
    study.optimize(objective, n_trials=3)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 9


@pytest.mark.parametrize("values", [[1.0, 2.0], [], ["1"], [10**400], [float("nan")]], ids=lambda x: str(x)[:9])
def test_a_trial_with_another_value_than_one_number_does_not_count(values: Any) -> None:
    trial = study_of().trials[0]
    assert _chains.counts(trial)
    trial.values = values
    assert not _chains.counts(trial)


@pytest.mark.parametrize("seed", ["5", -1, 2.5, None, True, 10**50, [1]], ids=repr)
def test_a_seed_that_is_none_is_drawn_again(seed: Any) -> None:
    study = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=3))
    study._storage.set_study_system_attr(study._study_id, _marks.SEED, seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study.optimize(objective, n_trials=2)
    told = ["the seed of the study cannot be used"] if seed is not None else []
    assert [str(w.message).partition(":")[0] for w in caught] == told
    assert _marks.study_seed(study) == 3


@pytest.mark.parametrize("seed", ["5", -1, 2.5, True, 2**128], ids=repr)
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"`seed` must be an integer from 0 to 2\*\*128 - 1, or None; got"):
        hg.studies.HypergradientSampler(seed=seed)
    hg.studies.HypergradientSampler(seed=np.int64(7))  # type: ignore[arg-type]


def test_values_outside_of_their_interval_begin_no_chain() -> None:
    trial = study_of().trials[0]
    trial.params = {"x": -6.0, "y": 6.0}
    assert not _chains.counts(trial)


def test_a_meta_step_of_another_type_is_none_of_ours() -> None:
    study = optuna.create_study()
    for place in ({"run": True, "meta_step": 0}, {"run": 0, "meta_step": False}, {"run": 0, "meta_step": np.zeros(2)}):
        study.add_trial(optuna.create_trial(value=1.0, user_attrs=place))
    record = hg.studies.RecordTrials(study)
    record.begin([])
    record(DONE)
    assert study.trials[-1].user_attrs["run"] == 3


@pytest.mark.parametrize("run", ["1", None, [2], 1.5, -7, 10**30, 2**31 - 1, True, np.zeros(2)], ids=str)
def test_what_others_call_run_is_no_run(run: Any) -> None:
    study = optuna.create_study()
    study.add_trial(optuna.create_trial(value=1.0, user_attrs={"run": run}))
    record = hg.studies.RecordTrials(study)
    record.begin([DONE])
    assert [t.user_attrs["run"] for t in study.trials[1:]] == [1]


DONE = hg.MetaStep(0, 1.0, 1.0, 1.0, None, 1.0, {"a": np.float32(1)}, 0.0, 0.0, 0, 1.0)
