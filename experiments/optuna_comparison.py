"""Optuna's samplers and hypergradients on the same tasks, from the same start, for the same seconds and gradients.

    python -m experiments.optuna_comparison [--workers 2] [--seeds 5]

Two tasks: four hyperparameters of a network on scikit-learn's digits, and 1,608 of one on MNIST, if HYPERGRAD_DATA has it,
else on the digits. Five methods: Random, TPE, CMA-ES, `hg.optimize`, `HypergradientSampler`; on the second task also TPE on
three constants. Every run starts at the same point, has a core of its own, and goes on until it has spent two budgets:
seconds, and elementary gradient evaluations, of which a hypergradient counts its measured multiple. Third, a race: how many
trials until the loss that TPE reaches in 60?

Each finished run is a study in one journal file, so a run that was killed is the only thing that is lost: start again. The
report, in docs/optuna.md, is made of that file alone; `--report-only` makes it anew.
"""

import dataclasses
import importlib.metadata
import logging
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import optuna
import tyro

from experiments import _comparison_methods, _config, _optuna_report
from experiments._comparison_methods import METHODS, Budget, Evaluation
from experiments._comparison_tasks import TASKS, Task


@dataclasses.dataclass(frozen=True)
class Config:
    workers: int = 2  # processes, each on a core of its own; 0: in this one
    seeds: int | None = None  # 5
    race_seeds: int | None = None  # 10
    race_trials: int | None = None  # 60 of TPE, twice as many of the other
    four_seconds: float | None = None  # 5
    four_trainings: float | None = None  # 300, as many gradient evaluations as steps each
    schedules_seconds: float | None = None  # 60
    schedules_trainings: float | None = None  # 160
    report_only: bool = False
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/optuna_comparison")
    docs: pathlib.Path = pathlib.Path("docs")
    worker: int | None = None  # which one this process is: what the script starts


PRESETS: dict[str, dict[str, Any]] = {
    "": {
        "seeds": 5, "race_seeds": 10, "race_trials": 60, "four_seconds": 5.0, "four_trainings": 300.0,
        "schedules_seconds": 60.0, "schedules_trainings": 160.0,
    },
    "tiny": {
        "seeds": 1, "race_seeds": 1, "race_trials": 6, "four_seconds": 0.0, "four_trainings": 5.0,
        "schedules_seconds": 0.0, "schedules_trainings": 2.0,
    },
}  # fmt: skip

Job = tuple[str, str, int]  # task, method, seed
KEPT = 300  # evaluations of a run: all that lowered the best, and as many others as fit


def jobs(config: Config) -> list[Job]:
    runs = [(task, method, seed) for task in TASKS for seed in range(config.seeds) for method in METHODS[task]]
    races = [("race", method, seed) for seed in range(config.race_seeds) for method in ("TPE", "HypergradientSampler")]
    return races + runs


def opened(config: Config) -> optuna.storages.BaseStorage:
    config.out.mkdir(parents=True, exist_ok=True)
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(config.out / "studies.log")))


def finished(storage: optuna.storages.BaseStorage) -> set[str]:
    summaries = optuna.get_all_study_summaries(storage, include_best_trial=False)
    return {summary.study_name for summary in summaries if summary.user_attrs.get("complete")}


def name_of(job: Job) -> str:
    return f"{job[0]} / {job[1]} / seed {job[2]}"


def work(config: Config, mine: list[Job], storage: optuna.storages.BaseStorage) -> None:
    tasks: dict[str, tuple[Task, float]] = {}
    for i, job in enumerate(mine):
        which, method, seed = job
        kind = "four" if which == "race" else which
        if kind not in tasks:
            task = TASKS[kind](config.tiny)
            tasks[kind] = task, _comparison_methods.measured_multiple(task, 1 if config.tiny else 7)
        task, multiple = tasks[kind]
        begin = time.perf_counter()
        if which == "race":
            trials = config.race_trials * (1 if method == "TPE" else 2)
            done, budget = _comparison_methods.raced(task, seed, method != "TPE", trials), None
        else:
            seconds, trainings = getattr(config, f"{kind}_seconds"), getattr(config, f"{kind}_trainings")
            budget = Budget(seconds, trainings * task.steps, multiple)
            done = METHODS[which][method](task, seed, budget)
        keep(storage, job, task, done, budget, multiple)
        lowest = min(e.value for e in done)
        print(
            f"{i + 1:3d} of {len(mine)}   {name_of(job):44} {lowest:.4f} after {len(done)} in {done[-1].seconds:.1f} s, "
            f"{time.perf_counter() - begin:.0f} s in all", flush=True,
        )  # fmt: skip


def keep(
    storage: optuna.storages.BaseStorage,
    job: Job,
    task: Task,
    done: list[Evaluation],
    budget: Budget | None,
    multiple: float,
) -> None:
    """The run as a study; complete when it says so."""
    name = name_of(job)
    if any(study.study_name == name for study in optuna.get_all_study_summaries(storage, include_best_trial=False)):
        optuna.delete_study(study_name=name, storage=storage)
    study = optuna.create_study(study_name=name, storage=storage)
    every, lowest, kept = -(-len(done) // KEPT), float("inf"), []
    for i, one in enumerate(done):
        if one.value < lowest or i % every == 0 or i == len(done) - 1:
            kept.append(one)
        lowest = min(lowest, one.value)
    finite = [one for one in kept if one.value < float("inf")]
    study.add_trials([optuna.create_trial(value=one.value, user_attrs=_attributes(one)) for one in finite])
    attributes = {
        "task": job[0], "method": job[1], "seed": job[2], "title": task.title, "steps": task.steps, "evaluated": len(done),
        "multiple": multiple, "budget": budget and [budget.seconds, budget.evaluations],
        "jax": jax.__version__, "optuna": importlib.metadata.version("optuna"), "device": jax.devices()[0].device_kind,
        "complete": True,
    }  # fmt: skip
    for key, value in attributes.items():
        study.set_user_attr(key, value)


def _attributes(one: Evaluation) -> dict[str, Any]:
    return {k: v for k, v in one._asdict().items() if k != "value"}


def main(config: Config) -> dict[str, Any]:
    config = _config.filled(config, PRESETS)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)  # training that fails is pruned, and says so there
    storage = opened(config)
    left = [job for job in jobs(config) if name_of(job) not in finished(storage)]
    if config.worker is not None:
        _keep_to_one_core(config.worker)
        mine = [job for i, job in enumerate(jobs(config)) if (job[2] + i) % config.workers == config.worker]
        work(config, [job for job in mine if job in left], storage)
        return {}
    begin = time.perf_counter()
    if not config.report_only and left:
        print(f"{len(left)} runs to do, {len(jobs(config)) - len(left)} done before", flush=True)
        if config.workers:
            _side_by_side(config)
        else:
            work(config, left, storage)
        print(f"{time.perf_counter() - begin:.0f} s")
    return _optuna_report.write(opened(config), config.out, config.docs)


def _keep_to_one_core(worker: int) -> None:
    """Before JAX starts its threads: they inherit it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[worker % len(cores)]})


def _side_by_side(config: Config) -> None:
    """What the workers have stored stays, whatever happens to them."""
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--workers", str(config.workers), "--worker"]
    workers = [subprocess.Popen([*command, str(i)]) for i in range(config.workers)]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit(f"a worker ended with {max(codes, key=abs)}; start again, and what is done stays done")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
