"""One link of one block backwards: its increment taken back exactly, and the cotangents through it.

Invariant: cotangents of a link are those of its values after a step until `undo_link` and `decayed` have made them those of
its values before.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad._isolation import isolated, stored
from hypergrad.exact import Fixed, total
from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import STATISTICS, Link
from hypergrad.optimizers.expand import Hypers
from hypergrad.run.spec import Run
from hypergrad.run.step import Entries, Signals, State, decoded, increment_at, readable, replaced, rests, retreat


class Cotangents(NamedTuple):
    """Of the links' values, of the hyperparameters, and of theta."""

    z: list[Floats]  # of each block; of the statistics none, if nobody differentiates what they come to
    h: list[Hypers]
    theta: list[Array]  # of the leaves that somebody differentiates


class Pullback(NamedTuple):
    """The cotangents of what an increment reads."""

    h: Hypers  # in every entry of a block that is entrywise: `summed` has their sums
    read: Floats
    g: Array | None


def pull(block: Block, link: Link, dz: Array, h: Hypers, read: Floats, g: Array | None) -> Pullback:
    """The vjp of a link's increment along dz, at what it reads."""
    entries = {key: jnp.broadcast_to(x, block.shape) for key, x in h.items()} if block.entrywise else h
    update, vjp = jax.vjp(lambda *a: block.increment(link, *a), entries, read, g)
    return Pullback(*vjp(sum_to(dz, update.shape).astype(update.dtype)))


def undo_link(
    run: Run, j: int, link: Link, t: Array, state: State, ct: Cotangents, h: list[Hypers], entries: Entries, signals: Signals
) -> tuple[State, Cotangents, Array | None]:
    """Take back z <- rho z + increment(h, others, g) exactly, and pull the cotangents through it; also that of g.

    That of z itself has yet to decay.
    """
    block, g = run.blocks[j], signals[j].get(link.signal)
    if rests(link):
        return state, ct, None
    read = _stored_reads(run, j, link, t, state)
    back = pull(block, link, ct.z[j][link.name], h[j], read, g)
    slot = retreat(block, link, state[j], h[j], entries[j], increment_at(block, link, t, h[j], read, g))
    state = replaced(state, j, {link.name: slot})
    dz = spread(run, j, ct.z, back.read)
    dh = {k: x + summed(run, t, back.h[k], x.shape) for k, x in ct.h[j].items()}
    if link.decay:
        dh[link.decay] += summed(run, t, dz[j][link.name] * decoded(block, link, state[j]), dh[link.decay].shape)
    return state, Cotangents(dz, [dh if i == j else own for i, own in enumerate(ct.h)], ct.theta), back.g


def _stored_reads(run: Run, j: int, link: Link, t: Array, state: State) -> Floats:
    """`readable`; isolated where the increment is, so that it is stored: in the open, XLA would read the integers again for
    every kernel of the derivative."""
    block = run.blocks[j]
    if not block.isolated[block.chain.index(link)]:
        return readable(run, j, link, state)
    names = block.reads[block.chain.index(link)]
    seen = {j, *run.statistics} if STATISTICS in names else {j}
    values = {i: {name: slot.value for name, slot in state[i].items() if i != j or name in names} for i in seen}

    def floats(values: dict[int, dict[str, Fixed]]) -> Floats:
        from_values: Any = [{n: _Value(x) for n, x in values.get(i, {}).items()} for i in range(len(state))]
        return readable(run, j, link, from_values)

    return isolated(t, floats, values)


class _Value(NamedTuple):
    """What `readable` takes of a slot."""

    value: Fixed


def decays(block: Block, links: Iterable[Link], h: Hypers) -> dict[str, Array]:
    """{link: rho}, of those that decay."""
    return {link.name: h[link.decay] for link in links if link.decay}


def decayed(dz: Floats, rho: dict[str, Array]) -> Floats:
    """dz_k <- rho_k dz_k, of the links that have a rho here."""
    return {**dz, **{name: r * dz[name] for name, r in rho.items()}}


def summed(run: Run, t: Array, x: Array, shape: tuple[int, ...]) -> Array:
    """The cotangent of a hyperparameter from that of each entry, which is stored first; in no order where programs for other
    numbers of devices are to come to the same."""
    if x.shape == shape:
        return x
    return sum_to(stored(t, x), shape) if run.microbatches is None else total(x, shape)


def plus(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), a, b)


def spread(run: Run, j: int, dz: list[Floats], read: Floats) -> list[Floats]:
    """Add what an increment of block j passes back to the links, and the statistics, that it read."""
    own = {name: x + read[name] if name in read and name != STATISTICS else x for name, x in dz[j].items()}
    dz = replaced(dz, j, own)
    if STATISTICS in read:
        for i, x in zip(run.statistics, jax.tree.leaves(read[STATISTICS]), strict=True):
            dz = replaced(dz, i, {STATISTICS: dz[i][STATISTICS] + x})
    return dz


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum a cotangent over the axes along which its primal was broadcast."""
    if x.shape == shape:
        return x
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b)
    return x.sum(axis=axes, keepdims=True)
