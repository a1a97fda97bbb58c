"""From the user's source of batches to a program of t.

Invariant: what a batch is beside its arrays is the same at every step.
"""

import collections
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad import _door as door
from hypergrad import _programs as programs
from hypergrad._numbers import check_numbers
from hypergrad._program_keys import Same, equations
from hypergrad._programs import Program


class Source(NamedTuple):
    """A source of batches, as a program of t."""

    batch: Program
    constants: list[Any]
    leaves: list[Array]  # arrays that are leaves of the source itself
    structure: Any  # of what is array-like in a batch
    others: Any  # what is not

    def whole(self, leaves: list[Any]) -> Any:
        return eqx.combine(jax.tree.unflatten(self.structure, leaves), self.others)

    @property
    def equations(self) -> Iterator[Any]:
        return equations(self.batch.jaxpr)


_PURE: collections.OrderedDict[Hashable, None] = collections.OrderedDict()  # what was called twice, and made the same
REMEMBERED = 128


def source_of(batches: Any) -> Source:
    """Called once; and once more to see that it is pure, unless the same code made the same program before."""
    (leaves, _), whole = split_arrays(batches, eqx.is_array)
    seen: list[Any] = []

    def arrays(leaves: list[Any], t: Array) -> list[Any]:
        with door.calling_batches(batches):
            found, others = eqx.partition(whole(leaves, [])(t), eqx.is_array_like)
        check_numbers("what `batches` gives", found)
        seen.append((jax.tree.structure(found), others))
        return jax.tree.leaves(found)

    step = jax.ShapeDtypeStruct((), jnp.int32)
    batch, constants = programs.trace(arrays, leaves, step)
    name = _code(batches), batch.key, tuple(map(Same, constants))
    if name not in _PURE:
        door.check_pure(batches, (batch, constants), lambda: programs.trace(arrays, leaves, step))
        while len(_PURE) >= REMEMBERED:
            _PURE.popitem(last=False)
        _PURE[name] = None
    return Source(batch, constants, leaves, *seen[0])


def _code(batches: Any) -> Hashable:
    """Of its function, which is not held: it may close over data."""
    function = getattr(batches, "func", batches)  # of what is partially applied, by JAX or Equinox
    return Same(getattr(function, "__code__", function))


def split_arrays(tree: Any, chosen: Callable[[Any], bool]) -> tuple[tuple[list[Any], list[Any]], Callable[..., Any]]:
    """((arrays that are chosen, its other arrays), from such lists back to the whole)."""
    first, rest = eqx.partition(tree, chosen)
    second, static = eqx.partition(rest, eqx.is_array)
    structures = [jax.tree.structure(x) for x in (first, second)]

    def whole(*lists: list[Any]) -> Any:
        return eqx.combine(*map(jax.tree.unflatten, structures, lists), static)

    return (jax.tree.leaves(first), jax.tree.leaves(second)), whole
