"""What a user's function holds besides its arguments: a traced value there would get no derivative, or leak.

Invariant: whatever a function can reach by its closure, defaults, partial arguments or owner, `_captured` yields.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax


def reject_traced_closure(role: str, function: Any) -> None:
    """A traced value inside a closure would get no derivative, or leak: name the variable instead."""
    if role == "batches" and isinstance(function, jax.tree_util.Partial):
        function = function.func  # a callable pytree: its arguments are leaves, and flow
    for name, value in _captured(function, set()):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            cures = {
                "loss": "through `theta` or the batch",
                "batches": "as a leaf: jax.tree_util.Partial(function, value)",
            }
            raise ValueError(
                f"`{role}` ({name_of(function)}) closes over the traced value `{name}`, whose derivative would be lost. "
                f"Pass it {cures[role]}."
            )


def _captured(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """(name, value) of all that a function holds, and of what the functions among it hold."""
    if id(function) in seen or isinstance(function, eqx.Module):
        return
    seen.add(id(function))
    for name, value in _held(function):
        yield name, value
        if callable(value):
            yield from _captured(value, seen)


def _held(function: Any) -> Iterator[tuple[str, Any]]:
    """Closure cells, defaults, partial arguments, and the attributes of a method's or a callable's object."""
    code = getattr(function, "__code__", None)
    for name, cell in zip(getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    yield from ((f"default {i}", v) for i, v in enumerate(getattr(function, "__defaults__", None) or ()))
    yield from (getattr(function, "__kwdefaults__", None) or {}).items()
    if isinstance(function, functools.partial):
        yield "func", function.func
        yield from ((f"argument {i}", v) for i, v in enumerate(function.args))
        yield from function.keywords.items()
    owner = getattr(function, "__self__", function if code is None else None)
    yield from list(getattr(owner, "__dict__", {}).items())


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
