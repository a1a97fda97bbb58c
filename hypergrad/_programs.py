"""Compiled programs, found again by what they compute: a new lambda that traces to an old program does not compile.

Invariant: two calls share a program only if their jaxprs are equal, equation by equation, literals and parameters included.
Arrays that a function closes over are no part of a program: they are its arguments.
"""

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


KEPT = 128  # programs; the least recently used goes first


class Traced(NamedTuple):
    """A function as a program, for arguments like those it was traced with."""

    jaxpr: Jaxpr
    key: "Key"
    constants: list[Any]  # what the function closes over, on the device
    out: Any  # `ShapeDtypeStruct`s of what it returns

    def __call__(self, constants: list[Any], leaves: list[Any]) -> list[Any]:
        """What it returns, flat: of its own constants, or of those of a function with the same key."""
        return jax.core.eval_jaxpr(self.jaxpr, constants, *leaves)

    def alone(self) -> "Traced":
        """The program without the arrays of the function that it was traced from, to be kept."""
        return self._replace(constants=[])

    def whole(self, leaves: list[Any]) -> Any:
        """The tree of what it returns."""
        return jax.tree.unflatten(jax.tree.structure(self.out), leaves)


class Key:
    """A nested tuple that hashes once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.parts == other.parts)


_TRACED: weakref.WeakKeyDictionary[Any, tuple[Key, list[Any]]] = weakref.WeakKeyDictionary()
_PROGRAMS: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
_LOCK = threading.Lock()


def trace(jitted: Any, *args: Any) -> Traced:
    """`jitted`: of `jax.jit`, which keeps its traces; args: as it takes them."""
    traced = jitted.trace(*args)
    closed = traced.jaxpr
    if closed not in _TRACED:
        _TRACED[closed] = key_of(closed.jaxpr), [_on_device(x) for x in closed.consts]
    return Traced(closed.jaxpr, *_TRACED[closed], traced.out_info)


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` made at the first call with this key, and this setting of how hard XLA should try."""
    key = key, jax.config.read("jax_disable_most_optimizations")
    with _LOCK:
        if key not in _PROGRAMS:
            _PROGRAMS[key] = make()
            while len(_PROGRAMS) > KEPT:
                _PROGRAMS.popitem(last=False)
        _PROGRAMS.move_to_end(key)
        return _PROGRAMS[key]


def compiled(function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Any:
    """`jax.jit` of an outermost function."""
    return jax.jit(function, donate_argnums=donate, compiler_options=compiler_options())


def call(jitted: Any, statics: tuple[Any, ...], *args: Any) -> Any:
    """jitted(*statics, *args), compiled once for all functions that trace to the same program."""
    traced = trace(jitted, *statics, *args)
    run = kept(traced.key, lambda: compiled(traced.alone().__call__))
    return traced.whole(run(traced.constants, jax.tree.leaves(args)))


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) as a program of its own, for arguments of which no array is traced."""
    arrays, rest = eqx.partition(args, eqx.is_array)
    return call(jax.jit(lambda *a: function(*eqx.combine(a, rest))), (), *arrays)


def ahead(jitted: Any, *args: Any) -> Callable[..., Any]:
    """jitted, compiled now for arguments like these: what it returns depends on no setting of the thread that calls it."""
    traced, leaves = trace(jitted, *args), jax.tree.leaves(args)
    places = tuple(getattr(x, "sharding", None) for x in leaves)
    compile_ = lambda: compiled(traced.alone().__call__).lower(traced.constants, leaves).compile()  # noqa: E731
    run = kept((traced.key, places), compile_)
    return lambda *args: traced.whole(run(traced.constants, jax.tree.leaves(args)))


# Measured in docs/performance.md: fewer copies of what a loop carries, and all lanes of the processor.
_FOR_CPU = {"xla_cpu_copy_insertion_use_region_analysis": True, "xla_cpu_prefer_vector_width": 512}


@functools.cache
def compiler_options() -> dict[str, Any] | None:
    """How `hg.optimize` has XLA compile, for an outermost `jax.jit` of your own: jax.jit(f, compiler_options=this).

    On CPUs: loops copy less of what they carry, and vectors are as wide as the processor's. None elsewhere, or where XLA
    does not know these options. JAX takes none for a jit inside of another.
    """
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=_FOR_CPU)()
    except jax.errors.JaxRuntimeError:  # another version of XLA may not know them
        return None
    return dict(_FOR_CPU)


def contains(jaxpr: Jaxpr, primitive: str) -> bool:
    """Whether an equation of the program, or of one inside of it, is of this kind."""
    return any(e.primitive.name == primitive for e in jaxpr.eqns) or any(
        contains(inner, primitive) for e in jaxpr.eqns for inner in _inner(tuple(e.params.values()))
    )


def _inner(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        yield value.jaxpr if isinstance(value, ClosedJaxpr) else value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _inner(x)


# Of custom derivatives and batching rules only the function itself is left to run; names are for people.
_NO_PART = {
    "name",
    "rule",
    "jvp",
    "jvp_jaxpr_fun",
    "jvp_jaxpr_thunk",
    "fwd_jaxpr_thunk",
    "bwd",
    "num_consts_in_bwd",
    "debug_info",
}


def key_of(jaxpr: Jaxpr) -> Key:
    """What the program computes, whatever its variables are called. It keeps alive what it compares by identity."""
    number: dict[Any, int] = {}

    def atom(x: Any) -> Any:
        if isinstance(x, Literal):
            return _of_array(x.val), _of_type(x.aval)
        return number.setdefault(x, len(number))

    def variables(xs: Any) -> tuple[Any, ...]:
        return tuple((atom(x), _of_type(x.aval)) for x in xs)

    head = variables(jaxpr.constvars), variables(jaxpr.invars)
    body = tuple(
        (
            e.primitive,
            tuple(atom(x) for x in e.invars),
            variables(e.outvars),
            tuple((k, _of_value(v)) for k, v in sorted(e.params.items()) if k not in _NO_PART),
            e.ctx,
        )
        for e in jaxpr.eqns
    )
    return Key((head, body, tuple(atom(x) for x in jaxpr.outvars)))


def _of_value(value: Any) -> Any:
    """Something hashable, equal only for values that make the same program."""
    if isinstance(value, ClosedJaxpr):
        return key_of(value.jaxpr), tuple(_of_array(x) for x in value.consts)
    if isinstance(value, Jaxpr):
        return key_of(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_of_value(x) for x in value)
    if isinstance(value, dict):
        return dict, tuple((k, _of_value(v)) for k, v in value.items())
    if isinstance(value, (np.ndarray, np.generic, float, complex)):
        return _of_array(value)
    return (type(value), value) if isinstance(value, Hashable) and _hashes(value) else _Same(value)


def _of_array(x: Any) -> Any:
    """Numbers by their bits: 0.0 is not -0.0, and NaN is NaN. Arrays of JAX by identity."""
    if isinstance(x, jax.Array) or not eqx.is_array_like(x):
        return _Same(x)
    array = np.asarray(x)
    return type(x), array.dtype, array.shape, array.tobytes()


def _of_type(aval: Any) -> Any:
    return aval, getattr(aval, "weak_type", None)


class _Same(NamedTuple):
    """Equal to itself alone."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _on_device(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)
