"""Two workers on one storage that die between its calls: nothing finished is lost, and chains stay whole.

The short form of `experiments.benchmarks.kill_workers`, which kills processes.
"""

import io
import json
import random
import warnings

import matplotlib.pyplot as plt
import numpy as np
import optuna
import pytest
from covering import some_of
from optuna.trial import TrialState

import hypergrad as hg
from experiments import optuna_quickstart
from experiments.benchmarks import kill_workers, sampler_overhead


optuna.logging.set_verbosity(optuna.logging.ERROR)


class Death(BaseException):
    """No `except Exception` survives it."""


class Deadly(optuna.storages.InMemoryStorage):
    """Kills whoever writes when `lives` writes are over: before it is done, or after."""

    lives = 10**9
    done_first = False

    def _write(self, name, *arguments):
        self.lives -= 1
        if self.lives == 0 and not self.done_first:
            raise Death
        result = getattr(optuna.storages.InMemoryStorage, name)(self, *arguments)
        if self.lives == 0:
            raise Death
        return result

    def create_new_trial(self, study_id, template_trial=None):
        return self._write("create_new_trial", study_id, template_trial)

    def set_trial_param(self, *arguments):
        return self._write("set_trial_param", *arguments)

    def set_trial_system_attr(self, *arguments):
        return self._write("set_trial_system_attr", *arguments)

    def set_trial_state_values(self, trial_id, state, values=None):
        return self._write("set_trial_state_values", trial_id, state, values)


class Worker:
    """Takes a trial in three moves, so that others can come between them."""

    def __init__(self, storage):
        self.storage = storage
        self.begin()

    def begin(self):
        sampler = hg.studies.HypergradientSampler(seed=0)
        self.study = optuna.load_study(study_name="s", storage=self.storage, sampler=sampler)
        self.moves = self.trials()

    def trials(self):
        while True:
            trial = self.study.ask()
            yield
            value = kill_workers.objective(trial)
            yield
            self.study.tell(trial, value)
            yield [trial.number, value, trial.params]


def lived_through(seed, trials, deaths):
    """(the study's trials, those that a worker was told were stored, deaths)."""
    rng, storage, logged, died = random.Random(seed), Deadly(), [], 0
    optuna.create_study(study_name="s", storage=storage)
    workers = [Worker(storage), Worker(storage)]
    while kill_workers.complete(workers[0].study.trials) < trials:
        if died < deaths and storage.lives > 100:
            storage.lives, storage.done_first = rng.randint(1, 40), rng.random() < 0.5
        worker = rng.choice(workers)
        try:
            finished = next(worker.moves)
            logged += [finished] if finished else []
        except Death:
            died, storage.lives = died + 1, 10**9
            worker.begin()
    return workers[0].study.trials, logged, died


@some_of("seed", range(4), 0)
def test_workers_that_die_lose_nothing(seed):
    trials, logged, died = lived_through(seed, trials=40, deaths=8)
    found = kill_workers.verdict(trials, logged)
    assert died == 8 and found["complete"] == 40 and found["longest chain"] > 3
    assert 40 - died <= len(logged) <= 40


def test_the_verdict_catches_lies():
    trials, logged, _ = lived_through(5, trials=12, deaths=0)
    kill_workers.verdict(trials, logged)
    with pytest.raises(AssertionError, match="trial 0 has changed"):
        kill_workers.verdict(trials, [[0, -1.0, trials[0].params]])
    child = next(trial for trial in trials if trial.system_attrs["hypergrad:link"]["step"] == 2)
    parent = trials[child.system_attrs["hypergrad:link"]["parent"]]
    parent.state = TrialState.FAIL
    with pytest.raises(AssertionError, match=f"trial {child.number} stands on nothing"):
        kill_workers.verdict(trials, [])
    with pytest.raises(AssertionError, match=f"trial {parent.number} was finished and is"):
        kill_workers.verdict(trials, [[parent.number, parent.value, parent.params]])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study in a file, as a dashboard opens it."""
    path = f"sqlite:///{tmp_path_factory.mktemp('study') / 'study.db'}"
    study = optuna.create_study(study_name="s", storage=path, sampler=hg.studies.HypergradientSampler(seed=0))
    study.optimize(kill_workers.objective, n_trials=7)
    return path


def test_the_dashboard_reads_the_study(finished):
    dashboard = pytest.importorskip("optuna_dashboard")
    app, answer = dashboard.wsgi(optuna.storages.RDBStorage(finished)), []

    def get(path):
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO()}
        body = b"".join(app(environ, lambda status, headers, error=None: answer.append(status)))
        return json.loads(body)

    (summary,) = get("/api/studies")["study_summaries"]
    trials = get(f"/api/studies/{summary['study_id']}")["trials"]
    assert answer == ["200 OK", "200 OK"] and len(trials) == 7
    values = [[trial.value] for trial in optuna.load_study(study_name="s", storage=finished).trials]
    assert [trial["values"] for trial in trials] == values


@some_of(
    "plot",
    [f"plot_{x}" for x in ("optimization_history", "parallel_coordinate", "slice", "edf")],
    "plot_optimization_history",
)
def test_optuna_draws_the_study(finished, plot):
    study = optuna.load_study(study_name="s", storage=finished)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        axes = np.ravel(getattr(optuna.visualization.matplotlib, plot)(study))
    axes[0].figure.canvas.draw()
    assert any(ax.has_data() for ax in axes)
    plt.close(axes[0].figure)


def test_a_chain_step_of_many_parameters_is_one_chain():
    medians = sampler_overhead.main(sampler_overhead.Config(parameters=21, trials=4))
    assert len(medians) == 3 and min(medians.values()) > 0


@pytest.mark.long
def test_the_script_before_and_after_two_lines():
    found = optuna_quickstart.main(optuna_quickstart.Config(trials=6, steps=4))
    assert [len(curve) for curve in found.values()] == [6, 6] and np.isfinite(found["after"]).all()
