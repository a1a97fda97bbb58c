"""How a status reaches the caller: raised at once, raised from compiled code, or written into a ledger.

Invariant: `surface` returns a flag that every output is masked with, so that a report is never dropped as dead code.
"""

import contextlib
import dataclasses
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _lifted
from hypergrad._processes import several
from hypergrad._settings import own_settings
from hypergrad.errors import BUFFER_FULL, OK, REVERSAL, Status


ENTERED = "entered"  # in `Norms`: what cotangents of losses and metrics have brought so far, where there are any
Norms = dict[str, Any]  # link -> log of the norm of its cotangent before each step and at the end: float32 [..., steps + 1]


class Ledger:
    """Collects the statuses of the runs inside one evaluation, from compiled code too (`listen`).

    watch: also the norms of the cotangents of their parameters, step by step: 2 to 4% of a hypergradient, measured on the
    benchmark's network with SGD and Adam.
    """

    def __init__(self, watch: bool = False) -> None:
        with _ONE_AT_A_TIME:
            self.number = next(i for i in itertools.count() if i not in _LEDGERS)  # the next one will have it again
            _LEDGERS[self.number] = self
        self.watch = watch
        self.statuses: list[Status] = []
        self.norms: list[Norms] = []  # of each run that was reversed, and went well
        self.failure: Status | None = None  # the first, of a run that was asked to throw
        self.lost = False  # whether a run did not come back, whatever became of others
        self.words = 0  # per parameter, that a run would have needed which was asked to throw, likewise
        self.capacity = 0  # words per parameter, at least, for runs that leave the choice to the library
        # What links lose whose decays are traced, by name: words of the buffer at all steps, and bits at one.
        self.room: tuple[tuple[str, tuple[int, float]], ...] = ()
        self.guessed: int | None = 0  # bytes of such links in what has been traced; None: nobody counts any more
        self.isolate = False  # whether such runs compute gradients apart from their derivatives

    def record(self, status: Status, throw: bool, norms: Norms) -> None:
        self.statuses.append(status.worst())
        codes, words = (x.reshape(-1) for x in np.broadcast_arrays(status.code, status.words))
        self.lost |= bool((codes == REVERSAL).any())
        if throw:
            self.words = max(self.words, int(words.max(initial=0, where=codes == BUFFER_FULL)))
        if norms:
            rows = zip(codes, *(np.asarray(x).reshape(len(codes), -1) for x in norms.values()), strict=True)
            self.norms += [dict(zip(norms, row, strict=True)) for code, *row in rows if code == OK]
        if throw and self.failure is None and int(self.statuses[-1].code) != OK:
            self.failure = self.statuses[-1]

    def clear(self) -> None:
        self.statuses, self.norms, self.failure, self.lost, self.words = [], [], None, False, 0
        self.guessed = None if self.guessed is None else 0

    def summary(self) -> Status | None:
        """The failure, or else the report of the run that stores most bits."""
        return self.failure or max(self.statuses, key=lambda s: float(s.bits), default=None)


# Compiled code knows its ledger by number. That, and what the ledger has learnt, is in the key of every jit cache: what a
# user has jitted reports to the ledger of today, and is traced again when it must be compiled otherwise. JAX calls back
# from threads of its own, so no context variable would do.
_LEDGERS: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()
_LISTENER = jax.make_user_context((-1, 0, (), False, False))  # (number, capacity, room, isolate, watch) of the ledger
_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def listen(ledger: Ledger) -> Iterator[Ledger]:
    """Runs traced or executed inside report to `ledger`, and do not raise from compiled code."""
    with _LISTENER((ledger.number, ledger.capacity, ledger.room, ledger.isolate, ledger.watch)):
        yield ledger


def current_ledger() -> Ledger | None:
    return _LEDGERS.get(_LISTENER.value[0])


def watched() -> bool:
    """Whether who listens wants the norms of cotangents."""
    return bool(_LISTENER.value[4]) and current_ledger() is not None and not probing()


def surface(status: Status, throw: bool, norms: Norms | None = None) -> Array:
    """Raise if `status` is bad, now or from compiled code; returns its `ok` flag (bool []) to mask results with.

    Compiled code under a ledger only reports to it: who listens raises, with the class and without a detour through XLA.
    norms: for who has `watched`.
    """
    norms = norms or {}
    ledger, throw = current_ledger(), throw and not probing()
    traced = lambda status: any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(status))  # noqa: E731
    if traced(status):
        leaves, structure = jax.tree.flatten(status)
        status = jax.tree.unflatten(structure, _known(leaves))  # where JAX differentiates known values, they are known again
    if not traced(status):
        if ledger is not None:
            ledger.record(status, throw, norms)
        if throw and int((worst := status.worst()).code) != OK:
            raise worst.error()
        if ledger is None:
            warn(status)
        return jnp.asarray(status.ok)
    if not throw and ledger is None:
        return status.ok

    leaves, structure = jax.tree.flatten((status, norms))
    report = _Report(structure, _LISTENER.value[0], throw)
    if jax.device_count() > 1:
        # On every device, so that none waits for another that has raised: XLA would end the process.
        jax.debug.callback(report, *leaves, partitioned=True)  # type: ignore[arg-type]
        return status.ok

    # What comes of it masks every output: a report cannot be dropped while any output is used.
    return _lifted.report(report, *leaves)


_known = jax.jit(jax.lax.stop_gradient, inline=True)  # at once: one by one they took a tenth of a call from Python


@dataclasses.dataclass(frozen=True)
class _Report:
    """What compiled code tells. Equal ones are one program to JAX; and it holds no traced value, as JAX holds it."""

    structure: Any  # of the status and the norms
    listener: int
    throw: bool

    def __call__(self, *leaves: Any) -> np.ndarray:
        known, norms = jax.tree.unflatten(self.structure, [np.asarray(x) for x in leaves])
        if (now := _LEDGERS.get(self.listener)) is not None:
            now.record(known, self.throw, norms)
        elif self.throw and int((worst := known.worst()).code) != OK:
            raise worst.error()
        else:
            warn(known)
        return np.asarray(known.code == OK)


def warn(status: Status) -> None:
    """Of what went well, and should be known."""
    for element in status.elements():
        for note in element.notes() if element.ok else ():
            warnings.warn(note, stacklevel=2)


def mask(ok: Array, tree: Any) -> Any:
    """NaN in every float leaf where `ok` is False, and in its derivative. A branch: what comes after is compiled apart."""
    if not isinstance(ok, jax.core.Tracer) and ok.all():
        return tree
    lost = lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else x  # noqa: E731
    return jax.lax.cond(ok, lambda tree: tree, lambda tree: jax.tree.map(lost, tree), tree)


class Trace(NamedTuple):
    """One reverse pass, as a probe saw it."""

    status: Status
    losses: np.ndarray  # [steps]
    norms: dict[str, np.ndarray]  # link -> norm of its cotangent before each step and at the end, float64 [steps + 1]
    # of the gradient's Jacobian at each step, where it passes as symmetric: float32 [steps, 2]
    asymmetry: np.ndarray | None = None


# In the key of every jit cache: what was compiled without a probe is traced again under one, and the other way round.
_PROBING = jax.make_user_context("")  # "growth", or "curvature", of training as well
_TRACES: list[Trace] = []  # not a context variable: JAX calls back from threads of its own
_EXCESSES: list[np.ndarray] = []
_ONE_PROBE = threading.Lock()


@contextlib.contextmanager
def probe(curvature: bool = False) -> Iterator[tuple[list[Trace], list[np.ndarray]]]:
    """Runs differentiated inside leave a `Trace` each, and none raises: a run that fails is a result, not an error.
    curvature: all runs leave what `hypergrad/_sharpness.py` measures, [steps], too."""
    global _TRACES, _EXCESSES
    with _ONE_PROBE, _PROBING("curvature" if curvature else "growth"):
        _TRACES, _EXCESSES = [], []
        try:
            yield _TRACES, _EXCESSES
            jax.effects_barrier()
        finally:
            _TRACES, _EXCESSES = [], []  # what was found is who asked's alone


def probing() -> bool:
    return bool(_PROBING.value)


def probing_curvature() -> bool:
    return _PROBING.value == "curvature"


def exceeded(excess: Array) -> None:
    """Leave the excess of each step with the probe."""
    _leave(lambda x: _EXCESSES.append(np.asarray(x)), excess)


def trace(status: Status, losses: Array, norms: dict[str, Array], asymmetry: Array | None) -> None:
    """Leave a `Trace` with the probe, from compiled code too; one for each element of a batch."""
    with own_settings():
        _leave(_keep, status, losses, norms, asymmetry)


def _leave(keep: Callable[..., None], *seen: Any) -> None:
    """At once, where values are known: a callback would move them to one device, and some may be another process's. From
    compiled code of several processes each device tells its own, or only the first process would hear."""
    seen = jax.lax.stop_gradient(seen)  # where JAX differentiates known values, they are known again
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(seen)):
        keep(*seen)
    else:
        jax.debug.callback(keep, *seen, partitioned=several())


def logarithms(norms: Norms) -> Norms:
    """What a report holds of norms in float64."""
    with own_settings():
        return {name: jnp.log(x).astype(jnp.float32) for name, x in norms.items()}


def _keep(*seen: Any) -> None:
    _TRACES.append(Trace(*jax.tree.map(np.asarray, seen)))
