"""Whether a run is too small for its grid: updates of so few quanta that rounding shows.

Invariant: what is too large for the grid is an error of its own (`hypergrad.loop.status`); this is its other end, a warning.

The gradient's largest entry is looked at in steps 0, 1, 2, 4, 8, ...; what a link makes of it is then compared with the
link's quantum. A leaf counts if it moves by more than a thousandth of itself, or if all leaves that have a gradient are so
small: many networks have leaves whose gradient is nothing but rounding, a bias before a normalization for one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.exact import LOW_BITS, WORD_BITS, behind_branch
from hypergrad.loop.problem import Problem, join_steps, split_steps
from hypergrad.loop.step import Hypers, Rule, Values, increment
from hypergrad.optimizers.chain import PARAMS, Link


ENOUGH = 2.0**10  # quanta


class Small(NamedTuple):
    """The place whose largest update is of the fewest quanta, if these are fewer than `ENOUGH`."""

    place: Array  # int32; -1 if there is none
    quanta: Array  # float32


def sizes(t: Array, g: list[Array]) -> Array:
    """|g|, the largest of each vector, at some steps; else 0: float32 [vectors]."""
    return behind_branch((t & (t - 1)) == 0, largest, g)


def too_small(problem: Problem, values: Values, h: Hypers, end: Values, seen: Array) -> Small:
    """seen: `sizes` of all steps, [steps, vectors]."""
    rule, found = problem.rule, seen.max(axis=0)
    constant, stepped = split_steps(problem.parts(h)[0], problem.steps)
    middle = join_steps(constant, jax.tree.map(lambda x: x[problem.steps // 2], stepped))
    last = rule.decoded(end, rule.chain[-1])
    first, moved = largest(values[PARAMS]), largest([a - b for a, b in zip(last, values[PARAMS], strict=True)])
    rows = []
    for link in rule.chain[:-1]:
        read = rule.readable(end, link)
        filled = [jnp.full(x.shape, found[j], rule.dtypes[j]) for j, x in enumerate(values[PARAMS])]
        rows.append(largest([increment(link, middle[j], read[j], filled[j]) for j in rule.leaves]) / quanta_of(rule, link))
    updates = jnp.stack(rows)
    few = (updates < ENOUGH) & (updates > 0)  # a learning rate of 0 moves nothing, and means it
    counts = (few & (first > 0) & (moved > first / ENOUGH)) | (few & (few.any(axis=0) | (found == 0)).all())
    size = jnp.maximum(first, largest(last)) / quanta_of(rule, rule.chain[-1])
    quanta = jnp.concatenate([updates.reshape(-1), size])
    counts = jnp.concatenate([counts.reshape(-1), (size < ENOUGH) & (first > 0)])
    index = jax.lax.argmin(jnp.where(counts, quanta, jnp.inf), 0, jnp.int32)
    return Small(jnp.where(counts.any(), _places(rule)[index], -1), jnp.where(counts.any(), quanta[index], 0))


def largest(leaves: list[Array]) -> Array:
    """|x|, the largest of each: float32 [leaves]."""
    return jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in leaves])


def quanta_of(rule: Rule, link: Link) -> Array:
    """What values of a link are rounded to at worst, leaf by leaf: float32 [leaves]."""
    lost = WORD_BITS if link.decay else 0
    kept = LOW_BITS if link.wide else 0
    return jnp.asarray([2.0 ** (lost - kept - bits) for bits in rule.bits(link)], jnp.float32)


def _places(rule: Rule) -> Array:
    """Of the first leaf of each link and vector: int32 [links * vectors]."""
    firsts = [group[0] for group in rule.layout.groups]
    rows: list[Any] = [k * len(rule.layout.shapes) + first for k in range(len(rule.chain)) for first in firsts]
    return jnp.asarray(rows, jnp.int32)
