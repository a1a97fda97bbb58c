"""Callbacks of the meta-loop: they are checked when it is made, and asked after each meta-step whether it stops.

Invariant: only True stops. A result that is true by accident, such as the length that `write` returns, is an error.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hypergrad._closures import name_of
from hypergrad._door import check_signature
from hypergrad._history import MetaStep
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


def asked(callbacks: list[Callback], done: MetaStep) -> tuple[list[Callback], TypeError | None]:
    """All are called: (those that stop, the error for one whose result says neither to stop nor to go on)."""
    stopping, wrong = list[Callback](), None
    for callback in callbacks:
        result = callback(done)
        if result is None or _is_bool(result):
            stopping += [callback] if result else []
        elif wrong is None:
            wrong = TypeError(
                f"after meta-step {done.step} the callback {name_of(callback)} returns {describe(result)}; True stops the "
                "loop, None or False goes on. Let it return nothing, or wrap the result in bool(...) if it decides."
            )
    return stopping, wrong


def _is_bool(x: Any) -> bool:
    """One of Python, NumPy or JAX."""
    return isinstance(x, bool) or (getattr(x, "shape", None) == () and getattr(x, "dtype", None) == np.dtype(bool))


def say_who_stops(stopping: list[Callback], history: list[MetaStep], meta_steps: int) -> None:
    """Of callbacks of one's own: those of the library are there to stop, while True is returned by much that logs."""
    others = [name_of(c) for c in stopping if not isinstance(c, (EarlyStopping, StopOnGrowth))]
    if others and len(history) < meta_steps:
        warnings.warn(
            f"hg.optimize stops at meta-step {history[-1].step} of {meta_steps}: the callback {', '.join(others)} returned "
            "True. If it is not to stop, let it return nothing.",
            stacklevel=5,
        )


def say_what_is_left(callbacks: list[Callback], path: Any, history: list[MetaStep], meta_steps: int) -> None:
    """Of a folder whose run was stopped early, unless one of the library's callbacks would stop there too."""
    known = any(isinstance(c, (EarlyStopping, StopOnGrowth)) and c.stopped for c in callbacks)
    if not known and len(history) < meta_steps:
        warnings.warn(
            f"`checkpoint` {path}: a callback stopped this run after {len(history)} of {meta_steps} meta-steps, and it "
            f"stays so: nothing is made. A call with more than meta_steps={meta_steps} goes on.",
            stacklevel=4,
        )
