"""Which traced values lie in an interval, whatever they are: those that a domain made.

Invariant: what `lowest` says of an array, no entry of it is below.
"""

import weakref
from typing import Any

import jax


# By identity: a tracer has no value to be found by. It leaves when the tracer does.
_LOWEST: dict[int, tuple[weakref.ref[Any], float]] = {}


def at_least(x: Any, low: float) -> Any:
    """x, of which it is known from now on that no entry is below `low`."""
    if isinstance(x, jax.core.Tracer):
        place = id(x)
        _LOWEST[place] = weakref.ref(x, lambda _: _LOWEST.pop(place, None)), low
    return x


def lowest(x: Any) -> float | None:
    """Where the interval of x begins; None: nobody knows."""
    found = _LOWEST.get(id(x))
    return found[1] if found is not None and found[0]() is x else None
