"""Two workers on one sqlite file, killed at random and started again: does the study lose anything?

    python -m experiments.benchmarks.kill_workers [--trials 60] [--kills 20] [--seed 0]

Each worker is a process that runs trials of one study, a valley of four parameters that takes 30 ms, with the hypergradient
sampler. By a schedule drawn from the seed one of the two is killed, with SIGKILL, and started again, until the study has its
trials. Then: no trial that was finished is missing or changed, each (chain, step) has at most one trial that counts and each
parent counts, and the study is complete. A worker reports each trial that Optuna had told it was stored.
"""

import dataclasses
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import optuna
import tyro
from optuna.trial import TrialState

import hypergrad as hg


@dataclasses.dataclass(frozen=True)
class Config:
    trials: int = 60  # complete ones
    kills: int = 20
    seed: int = 0
    work: float = 2.0  # seconds that a trial takes, so that an idle machine too is at work when it is killed
    child: pathlib.Path | None = None  # the folder that a worker works in: what this script starts
    name: str = ""


CENTRE = np.array([0.3, -0.7, 0.1, 0.9])


def objective(trial: optuna.Trial, work: float = 0.0) -> float:
    x = np.array([trial.suggest_float(f"x{i}", -2.0, 2.0) for i in range(4)])
    time.sleep(work)
    hg.studies.report_gradient(trial, {f"x{i}": 2 * g for i, g in enumerate(x - CENTRE)})
    return float(np.sum((x - CENTRE) ** 2))


def study_in(folder: pathlib.Path, seed: int) -> optuna.Study:
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}", engine_kwargs={"connect_args": {"timeout": 60}})
    sampler = hg.studies.HypergradientSampler(seed=seed)
    return optuna.create_study(study_name="killed", storage=storage, sampler=sampler, load_if_exists=True)


def work(config: Config) -> None:
    """A worker: trials until there are enough complete ones; a line per trial that is stored."""
    study = study_in(config.child, config.seed)
    log = (config.child / f"{config.name}.jsonl").open("a", buffering=1)

    def note(study: optuna.Study, trial: Any) -> None:
        log.write(json.dumps([trial.number, trial.value, trial.params]) + "\n")

    enough = optuna.study.MaxTrialsCallback(config.trials, states=(TrialState.COMPLETE,))
    if complete(study.trials) < config.trials:
        study.optimize(lambda trial: objective(trial, config.work), callbacks=[note, enough])


def complete(trials: list[Any]) -> int:
    return sum(trial.state == TrialState.COMPLETE for trial in trials)


def counted(trials: list[Any]) -> dict[tuple[int, int], int]:
    """(chain, step) -> number of the trial that counts there, of a storage alone."""
    places: dict[tuple[int, int], int] = {}
    for trial in trials:
        link = trial.system_attrs.get("hypergrad:link")
        if link is not None and trial.state == TrialState.COMPLETE and "hypergrad:gradient" in trial.system_attrs:
            places.setdefault((link["chain"], link["step"]), trial.number)
    return places


def verdict(trials: list[Any], logged: list[Any]) -> dict[str, int]:
    """What happened to a study; AssertionError if anything was lost. logged: [number, value, params] of finished trials."""
    places = counted(trials)
    for number, value, params in logged:
        assert trials[number].state == TrialState.COMPLETE, f"trial {number} was finished and is {trials[number].state}"
        assert trials[number].value == value and trials[number].params == params, f"trial {number} has changed"
    for (chain, step), number in places.items():
        parent = trials[number].system_attrs["hypergrad:link"]["parent"]
        assert step == 0 or (chain, step - 1) in places, f"trial {number} stands on nothing"
        assert step == 0 or trials[parent].state == TrialState.COMPLETE, f"trial {number} goes on from one without a value"
    return {
        "complete": complete(trials), "counted": len(places), "repeated": complete(trials) - len(places),
        "left running": sum(trial.state == TrialState.RUNNING for trial in trials),
        "longest chain": 1 + max(step for _, step in places),
    }  # fmt: skip


def main(config: Config) -> dict[str, int]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if config.child is not None:
        work(config)
        return {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, rng = pathlib.Path(temporary), random.Random(config.seed)
        study_in(folder, config.seed)

        def started(name: str) -> subprocess.Popen[bytes]:
            options = ["--trials", str(config.trials), "--seed", str(config.seed), "--work", str(config.work)]
            command = [sys.executable, "-m", __spec__.name, "--child", str(folder), "--name", name, *options]
            return subprocess.Popen(command)

        workers = {name: started(name) for name in ("first", "second")}
        kills = 0
        while any(process.poll() is None for process in workers.values()):
            time.sleep(rng.uniform(0.5, 6.0))
            name = rng.choice(list(workers))
            if kills < config.kills and workers[name].poll() is None:
                workers[name].kill()
                workers[name].wait()
                kills, workers[name] = kills + 1, started(name)
        assert all(process.returncode == 0 for process in workers.values()), "a worker failed"
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
        logged = [json.loads(line) for line in lines if line.endswith("\n")]
        found = {"kills": kills} | verdict(study_in(folder, config.seed).trials, logged)
    print(", ".join(f"{count} {name}" for name, count in found.items()) + ": nothing lost")
    return found


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
