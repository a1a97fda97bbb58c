"""The methods of `optuna_comparison`, each from the same start and under the same budgets.

A run ends when it has spent its seconds and its elementary gradient evaluations, whichever comes later. Nothing is compiled
while the clock runs.
"""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
import optuna

import hypergrad as hg
from experiments._comparison_tasks import Four, Task


class Evaluation(NamedTuple):
    """A training, or a training with its hypergradient; seconds and counts are those since the start of the run."""

    value: float  # validation loss, infinite where training failed
    test: float
    seconds: float
    trainings: int
    hypergradients: int


class Budget(NamedTuple):
    seconds: float
    evaluations: float  # elementary gradient evaluations: a training of T steps has T
    multiple: float  # of them that a hypergradient counts, per training

    def spent(self, done: Evaluation, steps: int) -> bool:
        work = steps * (done.trainings + self.multiple * done.hypergradients)
        return done.seconds >= self.seconds and work >= self.evaluations


def measured_multiple(task: Task, rounds: int = 7) -> float:
    """Time of a hypergradient over that of a training alone; medians of interleaved rounds, compiled before."""
    natural, key, times = hg.natural(task.start), jax.random.key(0), {"one": [], "both": []}
    for i in range(rounds + 1):
        for name, run in (("one", lambda: task.value(natural, key)), ("both", lambda: task.value_and_grad(task.start, key))):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            if i:
                times[name].append(time.perf_counter() - begin)
    return statistics.median(times["both"]) / statistics.median(times["one"])


Method = Callable[[Task, int, Budget], list[Evaluation]]


def _sampled(sampler: Callable[[Task, int], Any], objective: Callable[..., Any], start: Callable[[Task], Any]) -> Method:
    """A study in memory. objective(task, trial, key) -> (validation, test), and it may report a gradient."""

    def run(task: Task, seed: int, budget: Budget) -> list[Evaluation]:
        key, done, uses = jax.random.key(seed), [], int(objective in (_with_gradient, _with_tree))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CMA-ES: being separable is experimental, `x0` will go in Optuna 6
            study = optuna.create_study(sampler=sampler(task, seed))
        if start(task):
            study.enqueue_trial(start(task))
        begin = time.perf_counter()

        @hg.studies.prune_on_error
        def evaluate(trial: optuna.Trial) -> float:
            found = (float("inf"), float("nan"))
            try:
                found = tuple(float(x) for x in objective(task, trial, key))
            finally:
                n = len(done) + 1
                done.append(Evaluation(*found, time.perf_counter() - begin, (1 - uses) * n, uses * n))
            return found[0]

        def stop(study: optuna.Study, trial: Any) -> None:
            if budget.spent(done[-1], task.steps):
                study.stop()

        study.optimize(evaluate, callbacks=[stop])
        return done

    return run


def _alone(task: Task, trial: optuna.Trial, key: Any) -> Any:
    return task.value(task.suggest(trial), key)


def _constants(task: Task, trial: optuna.Trial, key: Any) -> Any:
    return task.value(task.suggest_constants(trial), key)


def _with_gradient(task: Task, trial: optuna.Trial, key: Any) -> Any:
    (value, test), grads = task.value_and_grad(Four.stored(task.suggest(trial)), key)
    hg.studies.report_gradient(trial, grads)
    return value, test


def _with_tree(task: Task, trial: optuna.Trial, key: Any) -> Any:
    (value, test), grads = task.value_and_grad(hg.studies.suggest_tree(trial, task.start), key)
    hg.studies.report_gradient(trial, grads)
    return value, test


def _cma_es(task: Task, seed: int) -> Any:
    """From the start; separable for many numbers, whose covariances would take a matrix of their square."""
    return optuna.samplers.CmaEsSampler(
        x0=task.start_numbers(), seed=seed, use_separable_cma=task.count > 100, warn_independent_sampling=False
    )  # fmt: skip


def _tpe(task: Task, seed: int) -> Any:
    return optuna.samplers.TPESampler(seed=seed)


RULE = optax.adam(0.1)  # of both methods that follow hypergradients


def _optimize(task: Task, seed: int, budget: Budget) -> list[Evaluation]:
    """`hg.optimize`. Its first meta-step compiles; it counts as long as the median of the others."""
    seconds: list[float] = []

    def stop(done: hg.MetaStep) -> bool:
        seconds.append(done.seconds)
        spent = sum(seconds[1:]) + statistics.median(seconds[1:] or [0.0])
        return budget.spent(Evaluation(0, 0, spent, 0, len(seconds)), task.steps)

    key = jax.random.key(seed)
    result = hg.optimize(
        lambda natural, _: task.train(natural, key), lambda params: task.losses(params)[0], task.start,
        monitor_fn=lambda params: task.losses(params)[1], meta_optimizer=RULE, meta_steps=10**6, callbacks=[stop],
        skip_nonfinite=True, stop_on_growth=False,  # which judges by what is monitored: by test images
    )  # fmt: skip
    found, spent = [], 0.0
    for i, done in enumerate(result.history):
        spent += statistics.median(seconds[1:] or seconds) if i == 0 else done.seconds
        value = done.value if done.value == done.value else float("inf")
        found.append(Evaluation(value, done.monitor, spent, 0, i + 1))
    return found


def _hypergradient_sampler(task: Task, seed: int) -> Any:
    return hg.studies.HypergradientSampler(seed=seed, meta_optimizer=RULE)


def raced(task: Task, seed: int, gradients: bool, trials: int) -> list[Evaluation]:
    """So many trials, without a start."""
    sampler = _hypergradient_sampler if gradients else _tpe
    objective = _with_gradient if gradients else _alone
    run = _sampled(sampler, objective, lambda task: {})
    return run(task, seed, Budget(0.0, task.steps * trials, 1.0))


METHODS: dict[str, dict[str, Method]] = {
    "four": {
        "Random": _sampled(lambda task, seed: optuna.samplers.RandomSampler(seed=seed), _alone, Task.start_numbers),
        "TPE": _sampled(_tpe, _alone, Task.start_numbers),
        "CMA-ES": _sampled(_cma_es, _alone, Task.start_numbers),
        "hg.optimize": _optimize,
        "HypergradientSampler": _sampled(_hypergradient_sampler, _with_gradient, Task.start_numbers),
    }
}
METHODS["schedules"] = METHODS["four"] | {
    "TPE, constants": _sampled(_tpe, _constants, Task.start_constants),
    "HypergradientSampler": _sampled(_hypergradient_sampler, _with_tree, lambda task: {}),
}
