"""Whether a run is too small for its grid: updates of so few quanta that rounding shows.

Invariant: what is too large for the grid is an error of its own (`hypergrad.run.status`); this is its other end, a warning.

The gradient's largest entry is looked at in steps 0, 1, 2, 4, 8, ...; what a link makes of it is then compared with the
link's quantum. A part of a block counts if it moves by more than a thousandth of itself, or if all that have a gradient are
so small: many networks have leaves whose gradient is nothing but rounding, a bias before a normalization for one.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._isolation import behind_branch, unseen
from hypergrad.exact import LOW_BITS
from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import GRADIENT, PARAMS, Link
from hypergrad.optimizers.expand import Hypers
from hypergrad.run.per_step import join_steps, split_steps
from hypergrad.run.spec import Run
from hypergrad.run.step import State, readable, seen_outside


ENOUGH = 2.0**10  # quanta


class Underflow(NamedTuple):
    """The place whose largest update is of the fewest quanta, if these are fewer than `ENOUGH`."""

    place: Array  # int32; -1 if there is none
    quanta: Array  # float32


def sizes(run: Run, t: Array, g: list[Array]) -> Array:
    """|g|, the largest of each part of each block of the parameters, at some steps; else 0: float32 [parts of all]."""
    return behind_branch((t & (t - 1)) == 0, lambda g: largest(run.of_parameters, g), g)


def underflow(
    run: Run, values: list[Floats], h: list[Hypers], end: State, found: Array, places: list[list[int]]
) -> Underflow:
    """found: the largest of `sizes`, [parts of all]; places: of each block and link, the index of its first leaf."""
    blocks = run.of_parameters
    owner = np.repeat(np.arange(len(blocks)), [len(block.parts) for block in blocks])  # of each part, its block
    constant, stepped = split_steps(h, run.steps)
    middle = join_steps(constant, jax.tree.map(lambda x: x[run.steps // 2], stepped))
    last = [seen_outside(b, b.chain[-1], end[j]) for j, b in enumerate(run.of_parameters)]
    taken = unseen()  # what a program begins with may be constants: XLA took seconds to find the largest of a million
    start = [jnp.where(taken, values[j][PARAMS], 0) for j in run.parameters]
    first, moved = largest(blocks, start), largest(blocks, [a - b for a, b in zip(last, start, strict=True)])
    updates: list[Array] = []
    which: list[tuple[int, int]] = []  # (part, place) of each update
    for j, block in enumerate(blocks):
        (parts,) = np.nonzero(owner == j)
        for link, place in zip(block.chain[:-1], places[j], strict=False):
            if link.signal != GRADIENT or link.increment is None:
                continue
            own = found[parts].astype(block.dtype)
            filled = jnp.broadcast_to(own[:, None] if len(block.parts) > 1 else own[0], block.shape)
            update = block.increment(link, middle[j], readable(run, j, link, end), filled)
            updates.append(largest([block], [update]) / quantum(block, link))
            which.extend(zip(parts, _places(block, place), strict=True))
    owners = np.asarray([part for part, _ in which], int)
    update = jnp.concatenate([*updates, jnp.zeros(0, jnp.float32)])  # none, where all links see signals
    few = (update < ENOUGH) & (update > 0)  # a learning rate of 0 moves nothing, and means it
    any_few = (few[:, None] & (owners[:, None] == np.arange(len(first)))).any(axis=0)
    counts = few & ((first > 0) & (moved > first / ENOUGH) | (any_few | (found == 0)).all())[owners]
    quanta_of = np.asarray([quantum(block, block.chain[-1]) for block in blocks], np.float32)[owner]
    size = jnp.maximum(first, largest(blocks, last)) / quanta_of
    quanta = jnp.concatenate([update, size])
    counts = jnp.concatenate([counts, (size < ENOUGH) & (first > 0)])
    of_parameters = [place for j, block in enumerate(blocks) for place in _places(block, places[j][-1])]
    index = jax.lax.argmin(jnp.where(counts, quanta, jnp.inf), 0, jnp.int32)
    all_places = jnp.asarray([place for _, place in which] + of_parameters, jnp.int32)
    return Underflow(jnp.where(counts.any(), all_places[index], -1), jnp.where(counts.any(), quanta[index], 0))


def largest(blocks: Sequence[Block], arrays: list[Array]) -> Array:
    """|x|, the largest of each part of each block: float32 [parts of all]."""

    def of_parts(block: Block, x: Array) -> Array:
        row = jnp.max(jnp.abs(x), axis=None if len(block.parts) == 1 else -1, initial=0)
        return row.astype(jnp.float32).reshape(-1)

    return jnp.concatenate(list(map(of_parts, blocks, arrays)))


def _places(block: Block, place: int) -> list[int]:
    """Of each part of a block, the place of its first leaf. place: of the block's first."""
    return [place + n for n in itertools.accumulate(map(len, block.parts[:-1]), initial=0)]


def quantum(block: Block, link: Link) -> float:
    """What values of a link are rounded to at worst."""
    replaced = block.buffer(link).replaced(link.denominator) if link.decay else 0
    return 2.0 ** (replaced - (LOW_BITS if link.wide else 0) - block.bits(link))
