"""What a user's function holds besides its arguments, by name: for errors about it.

Invariant: whatever a function can reach by its closure, globals, defaults, partial arguments, or the attributes of objects
among these, `name_in` finds, up to a depth of four.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax


_DEPTH = 4


def name_in(function: Any, value: Any) -> str:
    """What the function calls a value that it holds: `scale`, `cfg.l2`."""
    for name, held in _reached(function, "", _DEPTH, set()):
        if held is value or any(leaf is value for leaf in jax.tree.leaves(held)):
            return f"`{name}`"
    return "a value from outside"


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _reached(owner: Any, prefix: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that a function or an object holds, and of what the functions and objects among it hold."""
    if id(owner) in seen or not depth or isinstance(owner, (types.ModuleType, type, jax.Array, jax.core.Tracer)):
        return
    seen.add(id(owner))
    held = [(f"{prefix}{name}", value) for name, value in _held(owner)]
    yield from held
    for name, value in held:
        yield from _reached(value, "" if callable(value) else f"{name}.", depth - 1, seen)


def _held(owner: Any) -> Iterator[tuple[str, Any]]:
    """Closure cells, globals, defaults, partial arguments, and attributes."""
    code = getattr(owner, "__code__", None)
    for name, cell in zip(getattr(code, "co_freevars", ()), getattr(owner, "__closure__", None) or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    globals_ = getattr(owner, "__globals__", {})
    yield from ((name, globals_[name]) for name in getattr(code, "co_names", ()) if name in globals_)
    yield from ((f"default {i}", v) for i, v in enumerate(getattr(owner, "__defaults__", None) or ()))
    yield from (getattr(owner, "__kwdefaults__", None) or {}).items()
    if isinstance(owner, functools.partial):
        yield "func", owner.func
        yield from ((f"argument {i}", v) for i, v in enumerate(owner.args))
        yield from owner.keywords.items()
    whose = getattr(owner, "__self__", owner if code is None else None)
    yield from list(getattr(whose, "__dict__", {}).items())
