"""From the user's source of batches to a program of t.

Invariant: what a batch is beside its arrays is the same at every step.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad import _door as door
from hypergrad import _programs as programs
from hypergrad._program_keys import equations
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


def source_of(batches: Any) -> Source:
    """Called once, and once more to see that it is pure."""
    (leaves, _), whole = split_arrays(batches, eqx.is_array)
    seen: list[Any] = []

    def arrays(leaves: list[Any], t: Array) -> list[Any]:
        with door.calling_batches(batches):
            found, others = eqx.partition(whole(leaves, [])(t), eqx.is_array_like)
        seen.append((jax.tree.structure(found), others))
        return jax.tree.leaves(found)

    step = jax.ShapeDtypeStruct((), jnp.int32)
    batch, constants = programs.trace(arrays, leaves, step)
    door.check_pure(batches, (batch, constants), lambda: programs.trace(arrays, leaves, step))
    return Source(batch, constants, leaves, *seen[0])


def split_arrays(tree: Any, chosen: Callable[[Any], bool]) -> tuple[tuple[list[Any], list[Any]], Callable[..., Any]]:
    """((arrays that are chosen, its other arrays), from such lists back to the whole)."""
    first, rest = eqx.partition(tree, chosen)
    second, static = eqx.partition(rest, eqx.is_array)
    structures = [jax.tree.structure(x) for x in (first, second)]

    def whole(*lists: list[Any]) -> Any:
        return eqx.combine(*map(jax.tree.unflatten, structures, lists), static)

    return (jax.tree.leaves(first), jax.tree.leaves(second)), whole
