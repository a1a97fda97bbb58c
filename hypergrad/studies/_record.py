"""What connects the rest of the library with a study: `RecordTrials`, `prune_on_error`."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hypergrad._forms import natural as natural_number
from hypergrad._hyper_names import hyper_path
from hypergrad.errors import HypergradError
from hypergrad.hypers import natural


class RecordTrials:
    """A callback of `hg.optimize`: each meta-step becomes a trial of `study`, with the validation value as its value.

    Attributes of the trial: run (the number of the first trial of its run), meta_step, seconds, gradient_norm,
    gradient_evaluations (elementary ones, `evaluations` of them a meta-step: a number that you measure, None leaves it out),
    certificate ("exact", or the sentence of what went wrong; None if nothing was trained), bits_per_parameter_step, monitor,
    and `hypers` with the natural value of each that is one number. A value that is not finite makes a failed trial. Several
    processes may record into one study. With a `checkpoint` no meta-step is recorded twice: a run that goes on is told by
    its values. The study has one objective, which is minimized: ValueError.
    """

    def __init__(self, study: optuna.Study, evaluations: float | None = None) -> None:
        _check_study(study)
        self.study, self.evaluations = study, evaluations
        self.begin(None)

    def begin(self, history: list[Any] | None) -> None:
        self.history = list(history or ())
        self.run: int | None = None
        self.may_go_on = history is not None
        if self.history:
            self._find_run(len(self.history) + 1)  # a process that dies may have recorded what it has not kept

    def __call__(self, done: Any) -> None:
        self.history.append(done)
        if self.may_go_on:
            self.may_go_on = False
            self._find_run(len(self.history))
        else:
            self._record(done)

    def _find_run(self, longest: int) -> None:
        """That of which nothing is known that is not in the history; what it lacks is recorded."""
        runs: dict[int, dict[int, float | None]] = {}  # run -> meta-step -> value
        for trial in self.study.get_trials(deepcopy=False):
            run, step = (_natural_attribute(trial, name) for name in ("run", "meta_step"))
            if run is not None and step is not None:
                runs.setdefault(run, {})[step] = trial.value
        fits = [run for run, values in runs.items() if max(values) < longest and _is_of(values, self.history)]
        self.run = max(fits, key=lambda run: (len(runs[run]), run), default=None)
        for done in self.history:
            if self.run not in runs or done.step not in runs[self.run]:
                self._record(done)

    def _record(self, done: Any) -> None:
        finite, storage = math.isfinite(done.value), self.study._storage
        new = optuna.create_trial(state=TrialState.RUNNING, user_attrs={"meta_step": done.step, **self._attributes(done)})
        trial = storage.create_new_trial(self.study._study_id, new)
        if self.run is None:
            self.run = storage.get_trial_number_from_id(trial)
        storage.set_trial_user_attr(trial, "run", self.run)
        storage.set_trial_state_values(
            trial, TrialState.COMPLETE if finite else TrialState.FAIL, [done.value] if finite else None
        )

    def _attributes(self, done: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "seconds": done.seconds,
            "gradient_norm": _number(done.gradient_norm),
            "gradient_evaluations": self.evaluations,
            "certificate": None if done.status is None else done.status.sentence() or "exact",
            "bits_per_parameter_step": _number(done.bits_per_parameter_step),
            "monitor": _number(done.monitor),
            "hypers": _single_numbers(done.hypers),
        }
        return {k: v for k, v in found.items() if v is not None}


def _check_study(study: Any) -> None:
    if not isinstance(study, optuna.Study):
        raise TypeError(
            f"RecordTrials needs an Optuna study, optuna.create_study(study_name=...); got {type(study).__name__}."
        )
    if study.directions != [StudyDirection.MINIMIZE]:
        directions = ", ".join(direction.name.lower() for direction in study.directions)
        raise ValueError(
            f"RecordTrials records values that hg.optimize minimizes; the directions of the study are [{directions}], so "
            "its best trial would be another. Record into a study of its own with direction='minimize'."
        )


def _is_of(values: dict[int, float | None], history: Sequence[Any]) -> bool:
    """Whether a run that was recorded is the one that goes on: all meta-steps that both have came to the same."""
    both = [(values[done.step], _number(done.value)) for done in history if done.step in values]
    return bool(both) and all(one == other for one, other in both)


def _natural_attribute(trial: Any, name: str) -> int | None:
    """None where a trial has none, or something else of that name: users write attributes too."""
    found = trial.user_attrs.get(name)
    return int(found) if natural_number(found) else None


def _number(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None


def _single_numbers(hypers: Any) -> dict[str, float]:
    leaves = jax.tree_util.tree_leaves_with_path(natural(hypers))
    return {hyper_path(path): float(x) for path, x in leaves if _is_single(x)}


def _is_single(x: Any) -> bool:
    """One float of any type; what is fixed may be a key, or no number at all."""
    return eqx.is_array_like(x) and np.shape(x) == () and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def prune_on_error(objective: Callable[..., Any]) -> Callable[..., Any]:
    """The objective, with any `HypergradError` inside it turned into `optuna.TrialPruned`.

    `study.optimize(hg.studies.prune_on_error(objective))`: a training run that diverges costs its trial and not the study.
    The sentence is kept as the trial's attribute "error". It is recognised out of the user's own `jax.jit` too, where JAX
    raises an error of its own with our sentence in it.
    """

    @functools.wraps(objective)
    def pruned(trial: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return objective(trial, *arguments, **options)
        except Exception as error:
            sentence = str(error) if isinstance(error, HypergradError) else _sentence_inside(str(error))
            if sentence is None:
                raise
            trial.set_user_attr("error", sentence)
            raise optuna.TrialPruned(sentence) from error

    return pruned


def _sentence_inside(text: str) -> str | None:
    """The sentence of one of our errors in what JAX raised of it: a `JaxRuntimeError`, or a ValueError when it came late."""
    found = re.search(r"hypergrad\.\w+Error: (.*)", text)
    return found and found[1]
