"""What a program computes, as something to compare: its jaxpr, equation by equation.

Invariant: two keys are equal only if their programs compute the same of the same arguments, to the last literal. A key keeps
nothing alive: what it compares by identity it holds weakly.
"""

import dataclasses
import functools
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


class Key:
    """A nested tuple that hashes once."""

    __slots__ = ("__weakref__", "_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.parts == other.parts)


# Of custom derivatives and batching rules only the function itself is left to run; names are for people.
_NO_PART = {
    "name",
    "rule",
    "jvp",
    "jvp_jaxpr_fun",
    "jvp_jaxpr_thunk",
    "fwd",
    "fwd_jaxpr_thunk",
    "bwd",
    "out_trees",
    "num_consts_in_bwd",
    "debug_info",
}


def key_of(jaxpr: Jaxpr) -> Key:
    """What the program computes, whatever its variables are called, and whatever derivatives it declares."""
    number: dict[Any, int] = {}

    def atom(x: Any) -> Any:
        if isinstance(x, Literal):
            return array_key(x.val), _of_type(x.aval)
        return number.setdefault(x, len(number))

    def variables(xs: Any) -> tuple[Any, ...]:
        return tuple((atom(x), _of_type(x.aval)) for x in xs)

    head = variables(jaxpr.constvars), variables(jaxpr.invars)
    body = tuple(
        (
            e.primitive,
            tuple(atom(x) for x in e.invars),
            variables(e.outvars),
            parameters_key(e),
            e.ctx,
        )
        for e in jaxpr.eqns
    )
    return Key((head, body, tuple(atom(x) for x in jaxpr.outvars)))


def parameters_key(e: Any) -> Hashable:
    """What an equation is told beside its inputs."""
    return tuple((k, _of_value(v)) for k, v in sorted(e.params.items()) if k not in _NO_PART)


def contains(jaxpr: Jaxpr, primitive: str) -> bool:
    """Whether an equation of the program, or of one inside of it, is of this kind."""
    return any(e.primitive.name == primitive for e in equations(jaxpr))


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Those of the program, and of all programs inside of it."""
    for e in jaxpr.eqns:
        yield e
        for inner in programs_in(tuple(e.params.values())):
            yield from equations(inner)


def programs_in(value: Any) -> Iterator[Jaxpr]:
    """Those that a parameter of an equation holds."""
    return (program for program, _ in closed_in(value))


def closed_in(value: Any) -> Iterator[tuple[Jaxpr, list[Any]]]:
    """The same with the arrays that they close over."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr, value.consts
    elif isinstance(value, Jaxpr):
        yield value, []
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from closed_in(x)


def _of_value(value: Any) -> Any:
    """Something hashable, equal only for values that make the same program."""
    if isinstance(value, ClosedJaxpr):
        return key_of(value.jaxpr), tuple(array_key(x) for x in value.consts)
    if isinstance(value, Jaxpr):
        return key_of(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_of_value(x) for x in value)
    if isinstance(value, dict):
        return dict, tuple((k, _of_value(v)) for k, v in value.items())
    if isinstance(value, (np.ndarray, np.generic, float, complex)):
        return array_key(value)
    if callable(value) and not isinstance(value, type):
        return _of_callable(value)
    return (type(value), value) if isinstance(value, Hashable) and _hashes(value) else Same(value)


def _of_callable(value: Any) -> Any:
    """By identity, of what it is made of where it is made anew for each call: two may be equal and not do the same."""
    if isinstance(value, types.MethodType):
        return types.MethodType, Same(value.__self__), Same(value.__func__)
    if isinstance(value, functools.partial):
        return functools.partial, _of_value(value.func), _of_value(value.args), _of_value(value.keywords)
    if dataclasses.is_dataclass(value) and type(value).__module__.split(".")[0] in ("jax", "hypergrad"):
        return type(value), tuple(_of_value(getattr(value, field.name)) for field in dataclasses.fields(value))
    return Same(value)


def array_key(x: Any) -> Any:
    """Numbers by their bits: 0.0 is not -0.0, and NaN is NaN. Arrays of JAX by identity."""
    if isinstance(x, jax.Array) or not eqx.is_array_like(x):
        return Same(x)
    array = np.asarray(x)
    return type(x), array.dtype, array.shape, array.tobytes()


def _of_type(aval: Any) -> Any:
    return aval, getattr(aval, "weak_type", None)


class Same:
    """Equal to itself alone, while it lives."""

    __slots__ = ("_number", "_value")

    def __init__(self, value: Any) -> None:
        self._number = id(value)
        try:
            self._value: Any = weakref.ref(value)
        except TypeError:
            self._value = lambda: value  # what has no weak references is held

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value() is not None and self._value() is other._value()


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
