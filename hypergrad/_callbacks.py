"""Callbacks of the meta-loop: they are checked when it is made, and asked after each meta-step whether it stops.

Invariant: only True stops. A result that is true by accident, such as the length that `write` returns, is an error.
"""

import pathlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hypergrad._closures import name_of
from hypergrad._door import check_signature
from hypergrad._history import MetaStep
from hypergrad._processes import in_all
from hypergrad.callbacks import EarlyStopping, StopOnGrowth
from hypergrad.hypers import describe


Callback = Callable[[MetaStep], Any]


def listed(callbacks: Any) -> list[Callback]:
    """All of them, of an iterator that gives each once, too."""
    given = list(callbacks) if isinstance(callbacks, Iterable) and not callable(callbacks) else None
    if given is None or not all(callable(c) and not isinstance(c, type) for c in given):
        raise TypeError(
            "`callbacks` must be a sequence of functions of a MetaStep, classes called: callbacks=[hg.callbacks.Progress()]."
        )
    for callback in given:
        check_signature("callback(done)", callback, "Bind others beforehand: functools.partial(callback, writer).")
    return given


def begin(callbacks: list[Callback], folder: pathlib.Path | None, history: list[MetaStep]) -> None:
    """Those that remember are told; of a run that is kept in a folder, in all processes alike."""

    def tell() -> None:
        for callback in callbacks:
            if folder is not None and hasattr(callback, "begin_folder"):
                callback.begin_folder(folder)
            if hasattr(callback, "begin"):
                callback.begin(None if folder is None else list(history))

    tell() if folder is None else in_all(tell)


def asked(callbacks: list[Callback], done: MetaStep, undecided: set[int]) -> tuple[list[Callback], TypeError | None]:
    """All are called: (those that stop, the error for one whose result says neither to stop nor to go on). undecided: gets
    the ids of those that return None."""
    stopping, wrong = list[Callback](), None
    for callback in callbacks:
        result = callback(done)
        if result is None:
            undecided.add(id(callback))
        elif _is_bool(result):
            stopping += [callback] if result else []
        elif wrong is None:
            wrong = TypeError(
                f"after meta-step {done.step} the callback {name_of(callback)} returns {describe(result)}; True stops the "
                "loop, None or False goes on. Let it return nothing, or wrap the result in bool(...) if it decides."
            )
    return stopping, wrong


def _is_ours(callback: Callback) -> bool:
    return type(callback).__module__ == EarlyStopping.__module__


def _is_bool(x: Any) -> bool:
    """One of Python, NumPy or JAX."""
    return isinstance(x, bool) or (getattr(x, "shape", None) == () and getattr(x, "dtype", None) == np.dtype(bool))


def say_who_stops(stopping: list[Callback], undecided: set[int], history: list[MetaStep], meta_steps: int) -> None:
    """Of those that are made to log, it seems: much that logs returns nothing, and now and then True. undecided: the ids of
    callbacks that have returned None."""
    loggers = [name_of(c) for c in stopping if id(c) in undecided]
    if loggers and len(history) < meta_steps:
        warnings.warn(
            f"hg.optimize stops at meta-step {history[-1].step} of {meta_steps}: the callback {', '.join(loggers)} returned "
            "True, and nothing before. If it is not to stop, let it return nothing; if it is, False else.",
            stacklevel=4,
        )


def stopped_before(callbacks: list[Callback], history: list[MetaStep], meta_steps: int) -> bool:
    """Whether the run that goes on is one that callbacks of this call stop where it stands; then it says so."""
    names = [type(c).__name__ for c in callbacks if isinstance(c, (EarlyStopping, StopOnGrowth)) and c.stopped]
    if not history or not names or len(history) >= meta_steps:
        return False
    warnings.warn(
        f"hg.optimize makes no meta-step: {', '.join(names)} stops this run after {len(history)} of {meta_steps}. To go on, "
        "give it more patience, or leave it out (stop_on_growth=False where you gave none).",
        stacklevel=4,
    )
    return True


def say_what_is_left(
    callbacks: list[Callback], path: Any, history: list[MetaStep], meta_steps: int, stopped_at: int
) -> None:
    """Of a folder whose run was stopped early, unless a callback of this call would stop there too. stopped_at: meta-steps
    of the call that was."""
    known = any(c.stopped if isinstance(c, (EarlyStopping, StopOnGrowth)) else not _is_ours(c) for c in callbacks)
    if not known and len(history) < meta_steps:
        warnings.warn(
            f"`checkpoint` {path}: a callback stopped this run after {len(history)} of {meta_steps} meta-steps, and it "
            f"stays so: nothing is made. A call with more than meta_steps={max(meta_steps, stopped_at)} goes on.",
            stacklevel=4,
        )
