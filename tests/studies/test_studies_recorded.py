"""Meta-steps as trials: which run each is of, whoever else records into the study."""

import collections
import contextlib
import pathlib
from typing import Any

import optax
import optuna
import pytest
from optuna.trial import TrialState

import hypergrad as hg


optuna.logging.set_verbosity(optuna.logging.ERROR)


def meta_step(step, value, status=None):
    return hg.MetaStep(step, value, 1.0, 0.5, status, 0.1, {"rate": hg.positive(0.1)})


def test_runs_are_told_apart_and_what_is_not_finite_failed():
    study = optuna.create_study()
    record = hg.studies.RecordTrials(study)
    record.begin(None)
    for value in (1.0, float("nan")):
        record(meta_step(0 if value == 1 else 1, value))
    record.begin([])
    record(meta_step(0, 0.5))
    assert [t.state for t in study.trials] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert [t.user_attrs["run"] for t in study.trials] == [0, 0, 2] and study.best_value == 0.5
    assert "certificate" not in study.trials[0].user_attrs and "gradient_evaluations" not in study.trials[0].user_attrs


def test_what_a_killed_run_did_not_record_is_recorded_when_it_goes_on():
    study = optuna.create_study()
    hg.studies.RecordTrials(study)(meta_step(0, 3.0))
    record = hg.studies.RecordTrials(study)
    record.begin([meta_step(0, 3.0), meta_step(1, 2.0)])
    record(meta_step(2, 1.0))
    assert [t.value for t in study.trials] == [3.0, 2.0, 1.0]
    assert {t.user_attrs["run"] for t in study.trials} == {0}


def test_a_run_that_goes_on_is_known_by_its_values(tmp_path: pathlib.Path) -> None:
    """Others were recorded after it."""
    study = optuna.create_study()
    record, h = lambda: hg.studies.RecordTrials(study), {"x": 5.0}

    def go_on(name: str, start: float, meta_steps: int) -> None:
        hg.optimize(
            lambda h, _: h["x"], lambda x: (x - 1.0) ** 2, {"x": start}, meta_steps=meta_steps, callbacks=[record()],
            checkpoint=tmp_path / name,
        )  # fmt: skip

    go_on("a", h["x"], 2)
    go_on("b", -30.0, 3)
    go_on("a", h["x"], 4)
    found = [(t.user_attrs["run"], t.user_attrs["meta_step"]) for t in study.trials]
    assert sorted(found) == [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1), (2, 2)]
    assert all((t.value > 100) == (t.user_attrs["run"] == 2) for t in study.trials)


@pytest.mark.parametrize("longer", [2, 3, 5])
def test_a_run_of_the_same_start_is_another(longer: int, tmp_path: pathlib.Path) -> None:
    """What is known of the one that goes on is a meta-step that both have."""
    study = optuna.create_study()

    def go_on(rate: float, meta_steps: int) -> None:
        hg.optimize(
            lambda h, _: h["x"], lambda x: (x - 3.0) ** 2, {"x": 0.5}, meta_steps=meta_steps,
            meta_optimizer=optax.sgd(rate), callbacks=[hg.studies.RecordTrials(study)], checkpoint=tmp_path / str(rate),
        )  # fmt: skip

    go_on(0.01, 1)
    go_on(0.1, longer)
    go_on(0.01, 5)
    runs = collections.defaultdict(dict)
    for t in study.trials:
        runs[t.user_attrs["run"]][t.user_attrs["meta_step"]] = t.value
    slow, fast = ([6.25 * (1 - 2 * rate) ** (2 * i) for i in range(n)] for rate, n in ((0.01, 5), (0.1, longer)))
    assert len(study.trials) == 5 + longer
    found = sorted(([run[i] for i in range(len(run))] for run in runs.values()), reverse=True)
    for run, expected in zip(found, (slow, fast), strict=True):
        assert run == pytest.approx(expected, rel=1e-5)


def test_two_runs_at_once_are_two() -> None:
    study = optuna.create_study()
    one, other = hg.studies.RecordTrials(study), hg.studies.RecordTrials(study)
    for record in (one, other):
        record.begin(None)
    for step in range(2):
        for record in (one, other):
            record(meta_step(step, 1.0))
    assert [(t.user_attrs["run"], t.user_attrs["meta_step"]) for t in study.trials] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_run_that_dies_in_its_first_meta_step_records_it_once(tmp_path: pathlib.Path) -> None:
    study, h = optuna.create_study(), {"x": 5.0}

    def interrupt(done: Any) -> None:
        raise KeyboardInterrupt

    for others in ([interrupt], []):
        with contextlib.suppress(KeyboardInterrupt):
            hg.optimize(
                lambda h, _: h["x"], lambda x: (x - 1.0) ** 2, h, meta_steps=2, checkpoint=tmp_path,
                callbacks=[hg.studies.RecordTrials(study), *others],
            )  # fmt: skip
    assert [(t.user_attrs["run"], t.user_attrs["meta_step"]) for t in study.trials] == [(0, 0), (0, 1)]


def test_a_call_with_fewer_meta_steps_records_nothing_again(tmp_path: pathlib.Path) -> None:
    study = optuna.create_study()
    for meta_steps in (4, 2, 4):
        hg.optimize(
            lambda h, _: h["x"], lambda x: (x - 1.0) ** 2, {"x": 5.0}, meta_steps=meta_steps, checkpoint=tmp_path,
            callbacks=[hg.studies.RecordTrials(study)],
        )  # fmt: skip
    assert [(t.user_attrs["run"], t.user_attrs["meta_step"]) for t in study.trials] == [(0, i) for i in range(4)]


def test_what_a_killed_process_left_half_written_is_no_meta_step() -> None:
    study = optuna.create_study()
    record = hg.studies.RecordTrials(study)
    record.begin([meta_step(0, 3.0)])
    left = optuna.create_trial(state=TrialState.RUNNING, user_attrs={"run": 0, "meta_step": 1})
    study.add_trial(left)
    again = hg.studies.RecordTrials(study)
    again.begin([meta_step(0, 3.0)])
    again(meta_step(1, 2.0))
    done = [(t.user_attrs["run"], t.user_attrs["meta_step"]) for t in study.trials if t.state.is_finished()]
    assert done == [(0, 0), (0, 1)]


def test_runs_of_one_start_in_two_folders_are_two_also_at_once(tmp_path: pathlib.Path) -> None:
    study = optuna.create_study()
    records = [hg.studies.RecordTrials(study) for _ in range(2)]
    for i, record in enumerate(records):
        record.begin_folder(tmp_path / str(i))
        record.begin([])
    for step in range(2):
        for i, record in enumerate(records):
            record(meta_step(step, 3.0 - i * step))
    assert [(t.user_attrs["run"], t.value) for t in study.trials] == [(0, 3.0), (1, 3.0), (0, 3.0), (1, 2.0)]


def test_a_value_that_another_machine_rounds_is_the_same_meta_step(tmp_path: pathlib.Path) -> None:
    study = optuna.create_study()
    for last in (2.0, 2.00001):
        record = hg.studies.RecordTrials(study)
        record.begin_folder(tmp_path)
        record.begin([meta_step(0, 3.0)])
        record(meta_step(1, last))
    assert [t.value for t in study.trials] == [3.0, 2.0]


def test_a_run_without_a_folder_is_not_that_of_one(tmp_path: pathlib.Path) -> None:
    study = optuna.create_study()
    kept, loose = hg.studies.RecordTrials(study), hg.studies.RecordTrials(study)
    kept.begin_folder(tmp_path)
    kept.begin([])
    kept(meta_step(0, 3.0))
    loose.begin(None)
    for step in range(3):
        loose(meta_step(step, 3.0 - step))
    again = hg.studies.RecordTrials(study)
    again.begin_folder(tmp_path)
    again.begin([meta_step(0, 3.0)])
    again(meta_step(1, 2.5))
    other = hg.studies.RecordTrials(study)
    other.begin_folder(tmp_path / "other")
    other.begin([])
    other(meta_step(0, 3.0))
    assert [(t.user_attrs["run"], t.value) for t in study.trials] == [
        (0, 3.0), (1, 3.0), (1, 2.0), (1, 1.0), (0, 2.5), (5, 3.0),
    ]  # fmt: skip
