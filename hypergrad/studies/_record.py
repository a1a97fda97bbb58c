"""What connects the rest of the library with a study: `RecordTrials`, `prune_on_error`."""

import functools
import math
import os
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
    processes may record into one study. With a `checkpoint`, which is an attribute then, no meta-step is recorded twice: a
    run that goes on is told by its folder and its values. The study has one objective, which is minimized: ValueError.
    """

    def __init__(self, study: optuna.Study, evaluations: float | None = None) -> None:
        _check_study(study)
        self.study, self.evaluations = study, evaluations
        self.folder: str | None = None
        self.begin(None)

    def begin_folder(self, folder: Any) -> None:
        self.folder = os.path.abspath(folder)  # wherever the process goes

    def begin(self, history: list[Any] | None) -> None:
        self.folder = None if history is None else self.folder
        self.run: int | None = None
        self.known: set[int] = set()  # meta-steps that the study has
        if history:
            self._find_run(history, math.inf)
        for done in history or ():
            self._record(done)

    def __call__(self, done: Any) -> None:
        if self.run is None and self.folder is not None:
            self._find_run([done], 1)  # one that died in its first meta-step
        self._record(done)

    def _find_run(self, history: Sequence[Any], longest: float) -> None:
        """That of this folder which came to these values, and has no more meta-steps than `longest`. Of a history, where
        there is none: one that was recorded when studies had no folders."""
        runs: dict[tuple[bool, int], dict[int, float | None]] = {}  # (of this folder, run) -> meta-step -> value
        for trial in self.study.get_trials(deepcopy=False):
            run, step = (_natural_attribute(trial, name) for name in ("run", "meta_step"))
            folder = trial.user_attrs.get("checkpoint")
            of_here = folder == self.folder or (folder is None and longest == math.inf)
            if run is not None and step is not None and of_here and trial.state.is_finished():
                runs.setdefault((folder == self.folder, run), {})[step] = trial.value
        fits = {place: x for place, x in runs.items() if len(x) <= longest and _is_of(x, history)}
        steps = {done.step for done in history}
        place = max(fits, key=lambda place: (place[0], len(fits[place].keys() & steps), place[1]), default=None)
        self.run, self.known = (None, set()) if place is None else (place[1], {*fits[place]})

    def _record(self, done: Any) -> None:
        if done.step in self.known:
            return
        self.known.add(done.step)
        finite, storage = math.isfinite(done.value), self.study._storage
        state, values = (TrialState.COMPLETE, [done.value]) if finite else (TrialState.FAIL, None)
        attributes = {"meta_step": done.step, **self._attributes(done)}
        attributes |= {} if self.folder is None else {"checkpoint": self.folder}
        if self.run is not None:
            attributes["run"] = self.run
            self.study.add_trial(optuna.create_trial(state=state, values=values, user_attrs=attributes))
            return
        new = optuna.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        trial = storage.create_new_trial(self.study._study_id, new)  # its number is nobody else's
        self.run = storage.get_trial_number_from_id(trial)
        storage.set_trial_user_attr(trial, "run", self.run)
        storage.set_trial_state_values(trial, state, values)

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
    """Whether a run that was recorded is the one that goes on: all meta-steps that both have came to the same, but for what
    another machine may come to."""
    both = [(values[done.step], _number(done.value)) for done in history if done.step in values]
    near = lambda a, b: a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-2))  # noqa: E731
    return bool(both) and all(near(one, other) for one, other in both)


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
