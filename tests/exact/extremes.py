"""Values and numerators at the edges of what the exact layer holds, and the round trip that its law is about."""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad.exact import DEFERRED, DEFERRED_REFERENCE, HEADS, LOW_BITS, REFERENCE, Buffer, Deferred, Fixed, Reference


DENOMINATORS = (2**12, 2**16, 2**24)
SMALLEST = {d: max(1, d // 2**16) for d in DENOMINATORS}
STEPS, WEIGHTS, BITS = 130, 3, 48
LARGEST = 2**62
BUFFERS = {"heads": HEADS, "deferred": DEFERRED, "reference": REFERENCE, "deferred reference": DEFERRED_REFERENCE}
VALUES = {"one limb": False, "wide": True}  # whether there is a second limb
SCALES = {"as it is": None, "scaled": 77.7, "full scale": 2.0**16, "no scale left": 1.0}
GRIDS = [(np.float64, 52), (np.float32, 48), (np.float32, 44), (np.float64, 60)]  # dtypes and fraction bits
SIZE, STEP = 16, 7
LOW = [0, 1, 2**16 - 1, 2**31, 2**46 - 1]


def integers(x: Fixed) -> list[int]:
    """The values in quanta of the last limb, as Python integers."""
    high = [int(v) for v in np.ravel(x.high)]
    return high if x.low is None else [(h << LOW_BITS) + int(low) for h, low in zip(high, np.ravel(x.low), strict=True)]


def fixed(high: list[int], wide: bool, scale: float | None = None) -> Fixed:
    """These high limbs, with each of `LOW` if there is a second."""
    limbs = np.meshgrid(high, LOW) if wide else [np.asarray(high)]
    return scaled(Fixed(*(jnp.asarray(x.ravel()) for x in limbs)), scale)


def scaled(x: Fixed, scale: float | None) -> Fixed:
    return x if scale is None else x._replace(scale=jnp.asarray([scale, 1 / scale]))


def entry_of(entries: Any, t: int) -> Any:
    return jax.tree.map(lambda x: x[t], entries)


def extremes(d: int, largest: int) -> st.SearchStrategy[int]:
    edges = [0, -1, 1, d - 1, d, -d, largest, largest - 1, -largest, 1 - largest]
    return st.sampled_from([x for x in edges if abs(x) <= largest]) | st.integers(-largest, largest)


def numerators(d: int) -> st.SearchStrategy[int]:
    smallest = max(1, d // 2**16)
    return st.sampled_from([smallest, d - 1, d, d // 2]) | st.integers(smallest, d)


def floats(dtype: type, limit: float) -> st.SearchStrategy[float]:
    """Below `limit` in magnitude, its neighbours and tiny numbers among them."""
    edge = float(np.nextafter(dtype(limit), dtype(0)))
    edges = st.sampled_from([0.0, -0.0, edge, -edge, 2.0**-60, -(2.0**-60)])
    return edges | st.floats(-edge, edge, width=np.dtype(dtype).itemsize * 8, allow_subnormal=False)


def quanta(x: float, bits: int) -> int:
    """trunc(x 2^bits), in exact arithmetic."""
    return math.trunc(Fraction(x) * 2**bits)


@functools.partial(jax.jit, static_argnums=2)
def add_and_subtract(x: Fixed, increment: Any, bits: int) -> tuple[Fixed, Fixed]:
    after = x.add(increment, bits, STEP)
    return after, after.subtract(increment, bits)


@st.composite
def tables(draw: Any, elements: st.SearchStrategy[int], steps: int) -> np.ndarray:
    """int64 [steps, WEIGHTS]: another value for every step and weight, for every step only, or always the same.

    Their patterns repeat with periods of their own, so that two tables meet in every combination.
    """
    shape = draw(st.sampled_from([1, 2, 5, 7])), draw(st.sampled_from([1, WEIGHTS]))
    pattern = draw(hnp.arrays(np.int64, shape, elements=elements, fill=st.nothing()))
    return np.resize(np.broadcast_to(pattern, (shape[0], WEIGHTS)), (steps, WEIGHTS))


class Run(NamedTuple):
    """value <- value n/d, then + increment: of the value that the last step left, or where `fresh` of one that is drawn."""

    drawn: Fixed  # [steps, WEIGHTS]
    fresh: np.ndarray  # bool [steps]
    n: np.ndarray  # int64 [steps, WEIGHTS]
    increments: np.ndarray | None  # float64 [steps, WEIGHTS]


@st.composite
def runs(draw: Any, buffer: Buffer, d: int, wide: bool, adds: bool, steps: int) -> Run:
    """Integers up to 2^62; with increments as large as keep all sums in range."""
    largest = LARGEST if not adds else 2**44 if has_scale(buffer) else 2**60
    high = draw(tables(extremes(d, largest), steps))
    low = draw(tables(st.sampled_from(LOW) | st.integers(0, 2**46 - 1), steps)) if wide else None
    fresh = np.resize(draw(hnp.arrays(bool, st.integers(1, 7))), steps)
    increments = draw(tables(st.sampled_from([0, 1, -1]) | st.integers(-(2**53), 2**53), steps)) * 2.0**-50 if adds else None
    return Run(Fixed(high, low), fresh, draw(tables(numerators(d), steps)), increments)


def cases() -> list[Any]:
    """What may be multiplied by what: heads of wide values take d up to 2^16, as `WIDE_DENOMINATOR` says."""
    return [
        pytest.param(buffer, wide, d, id=f"{name}, {kind}, 2^{d.bit_length() - 1}")
        for name, buffer in BUFFERS.items()
        for kind, wide in VALUES.items()
        for d in DENOMINATORS
        if not (buffer == HEADS and wide and d > 2**16)
    ]


def cases_of(buffer: Buffer, *short: str) -> list[Any]:
    """Those of one buffer, of which the short form has those of these names."""
    own = [case for case in cases() if case.values[0] == buffer]
    return [case if case.id in short else long(*case.values, id=case.id) for case in own]


def has_scale(buffer: Buffer) -> bool:
    return isinstance(buffer, Deferred) or (isinstance(buffer, Reference) and buffer.deferred)


class Trace(NamedTuple):
    """What each step found and left, there and on the way back: leading axis = step."""

    before: Any
    after: Any
    digits: Any  # left by the last step
    back: Any  # `before`, found again
    first: Any  # the digits that the way back leaves


schedule = jax.jit(lambda buffer, n, d: buffer.schedule(n, d), static_argnums=(0, 2))


def round_trip(buffer: Buffer, d: int, capacity: int, run: Run) -> Trace:
    if isinstance(buffer, Reference):
        return _round_trip(buffer, python_scan, d, capacity, run)
    return _jitted(buffer, jax.lax.scan, d, capacity, run)


def _round_trip(buffer: Buffer, scan: Callable[..., Any], d: int, capacity: int, run: Run) -> Trace:
    entries = schedule(buffer, jnp.min(run.n, axis=1), d).entries

    def forward(carry: Any, x: Any) -> Any:
        (digits, value), (x, entry) = carry, x
        value = x.drawn._replace(scale=value.scale).where(x.fresh, value)
        left, new = buffer.multiply_by(digits, value, x.n, d, entry)
        new = new if x.increments is None else new.add(x.increments, BITS)
        return (left, new), ((value, visible(digits)), (new, visible(left)))

    def backward(digits: Any, x: Any) -> Any:
        (new, _), x, entry = x
        new = new if x.increments is None else new.subtract(x.increments, BITS)
        digits, value = buffer.divide_by(digits, new, x.n, d, entry)
        return digits, (value, visible(digits))

    start = buffer.hold(entry_of(run.drawn, 0))
    (end, _), (before, after) = scan(forward, (buffer.empty(start.high, capacity), start), (run, entries))
    first, back = scan(backward, end, (after, run, entries), reverse=True)
    return Trace(before, after, end, back, first)


_jitted = jax.jit(_round_trip, static_argnums=(0, 1, 2, 3))


def python_scan(body: Callable[..., Any], carry: Any, xs: Any, reverse: bool = False) -> Any:
    """`jax.lax.scan` of a body that JAX cannot trace."""
    steps, ys = range(len(jax.tree.leaves(xs)[0])), {}
    for t in reversed(steps) if reverse else steps:
        carry, ys[t] = body(carry, jax.tree.map(lambda x, t=t: np.asarray(x)[t], xs))
    return carry, jax.tree.map(lambda *y: np.stack(y), *(ys[t] for t in steps))


def visible(digits: Any) -> Any:
    """What of the digits must come back at every step: not the words above the top of the stack."""
    return getattr(digits, "head", getattr(digits, "i", None))


def assert_came_back(buffer: Buffer, trace: Trace) -> None:
    """What every inverse goes through: all integers, scales and heads are back, bit for bit, and no digit is left."""
    jax.tree.map(np.testing.assert_array_equal, trace.back, trace.before)
    assert np.all(buffer.is_empty(trace.first))


worst = functools.cache(lambda buffer, d, steps: buffer.words_needed(np.full(steps, SMALLEST[d]), d))  # words, at most
