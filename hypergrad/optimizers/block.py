"""Blocks: what one chain of links moves, one leaf of the parameters or several small ones side by side.

Invariant: `block.split(block.join(leaves))` are the leaves of the block; all that is decided about a block is decided once,
at set-up, and is part of its value.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr

from hypergrad._bounds import lowest
from hypergrad._isolation import only_products
from hypergrad._mended import mending
from hypergrad._placement import at_hand
from hypergrad.exact import DEFERRED, DEFERRED_REFERENCE, HEADS, REFERENCE, Buffer, default_fraction_bits, known_numerator
from hypergrad.optimizers.chain import GRADIENT, PARAMS, STATISTICS, Link, View, as_float, check_fits, foreign
from hypergrad.optimizers.expand import Hypers, compute_dtype
from hypergrad.schedules import PerStep


MANY, SMALL = 32, 1024  # leaves of a block, and entries of each on the average: see `Block.split_apart`
WIDE_RANGE_BITS = 8  # sums of squares up to 2^22 for float32 parameters

Parts = tuple[tuple[int, ...], ...]  # of a block, the leaves of each, in the order in which they lie
Floats = dict[str, Any]  # of one block: link -> array; also the tree of new statistics, by their name


class Lost(NamedTuple):
    """What the values of a link lose to a decay."""

    words: int  # at all steps, as the buffer keeps them
    bits: float  # the most at one step


@dataclasses.dataclass(frozen=True)
class Block:
    """What one chain moves; hashable."""

    parts: Parts  # of as many entries each, with hyperparameters of their own
    shapes: tuple[tuple[int, ...], ...]  # of its leaves
    flat: bool  # whether they lie one after the other; else the block is one leaf and has its shape
    entrywise: bool  # whether what becomes of an entry depends on no other
    chain: tuple[Link, ...]
    dtype: np.dtype  # of accumulators, updates and hyperparameters
    leaf_dtype: np.dtype
    fraction_bits: tuple[int, ...]  # of each link's grid
    buffers: tuple[Buffer | None, ...]  # where the decay of each link keeps what it loses
    known: tuple[Lost | None, ...]  # what each decay loses, where that is known beforehand
    most: tuple[Lost | None, ...]  # and what it loses at most, where it is traced but bounded
    isolated: tuple[bool, ...] = ()  # of each link, whether its increments are compiled apart from all else
    reads: tuple[frozenset[str], ...] = ()  # of each link, the links whose values enter its increments

    @property
    def leaves(self) -> tuple[int, ...]:
        """Of the parameters, or of the statistics, in the order in which they lie."""
        return tuple(i for part in self.parts for i in part)

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.flat:
            return self.shapes[0]
        size = sum(map(math.prod, self.shapes))
        return (size,) if len(self.parts) == 1 else (len(self.parts), size // len(self.parts))

    @property
    def of_parameters(self) -> bool:
        return self.chain[-1].name == PARAMS

    def moved(self) -> "Block":
        """What its increments are traced with: equal for blocks that differ in where they lie and what they lose."""
        nothing: Any = {"parts": ((),), "shapes": (self.shape,), "flat": False, "buffers": ()}
        return dataclasses.replace(self, **nothing, fraction_bits=(), known=(), most=(), isolated=(), reads=())

    def join(self, leaves: list[Any]) -> Any:
        """All leaves of the tree -> the block's own as one array."""
        return self.joined([leaves[i] for i in self.leaves])

    def joined(self, own: list[Array]) -> Array:
        return lying(own, self.flat, len(self.parts))

    def split(self, array: Array) -> list[Array]:
        """The inverse of `joined`, and of what is computed entry by entry from what it made."""
        return split_vectors([array], (self.shapes,))[0] if self.flat else [array]

    @property
    def split_apart(self) -> bool:
        """Whether to split it apart from what is computed with its leaves.

        XLA:CPU compiles a kernel for each place where a slice begins, and with what it fuses into it another one for each
        use: of many small leaves that is half of the time that a program takes to compile. Apart, all uses share one, and a
        copy more of small leaves costs less.
        """
        return len(self.leaves) > MANY and math.prod(self.shape) <= SMALL * len(self.leaves)

    @property
    def ends(self) -> np.ndarray:
        """Where its leaves end, but for the last: entry i lies in leaf number sum(i >= ends)."""
        return np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]

    def increment(self, link: Link, h: Hypers, z: Floats, g: Array | None) -> Array:
        """A pure function of floats, differentiated by every adjoint."""
        rule, signal = link.increment, () if link.name == PARAMS else (g,)
        if rule is None:
            return jnp.zeros((), self.dtype)

        def function(h: Hypers, z: Floats, *signal: Any) -> Array:
            x = rule(View(h, link.name), View(z, link.name), *signal)
            return as_float(x, self.dtype, f"the increment of link `{link.name}`")

        return mending(function)(h, z, *signal)

    def traced(self, link: Link, h: Hypers, z: Floats) -> Jaxpr:
        """The increment of a link as a program of the leaves of (h, what it may read, g)."""
        others = {name: x for name, x in z.items() if name != link.name}
        function = lambda h, z, g: self.increment(link, h, z, g)  # noqa: E731
        program = jax.make_jaxpr(function)(h, others, self.seen(link, z)).jaxpr
        check_fits(link, program.outvars[0].aval.shape, z[link.name].shape)
        return program

    def seen(self, link: Link, z: Floats) -> jax.ShapeDtypeStruct:
        """What a link is given as g: like the block, or, if it is no gradient, like what the link holds."""
        return jax.ShapeDtypeStruct(self.shape if link.signal == GRADIENT else z[link.name].shape, self.dtype)

    def bits(self, link: Link) -> int:
        return self.fraction_bits[self.chain.index(link)]

    def buffer(self, link: Link) -> Buffer:
        buffer = self.buffers[self.chain.index(link)]
        assert buffer is not None, "of a link that decays"
        return buffer


def lying(leaves: list[Array], flat: bool, parts: int) -> Array:
    """As one array: where it is `flat`, one after the other, with an axis for parts if there are several."""
    if not flat:
        return leaves[0]
    x = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    return x if parts == 1 else x.reshape(parts, x.size // parts)


@functools.partial(jax.jit, static_argnames="shapes", inline=True)
def split_vectors(arrays: list[Array], shapes: tuple[tuple[tuple[int, ...], ...] | None, ...]) -> list[list[Array]]:
    """Of each array, those that lie in it, one after the other; with None for shapes, an array as it is."""

    def split(x: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
        sizes = list(map(math.prod, shapes))
        leaves = [x] if len(sizes) == 1 else jax.lax.split(x.reshape(-1), sizes)  # the transpose of a concatenation
        return [leaf.reshape(shape) for leaf, shape in zip(leaves, shapes, strict=True)]

    return [[x] if own is None else split(x, own) for x, own in zip(arrays, shapes, strict=True)]


def block(
    parts: Parts,
    arrays: list[Array],
    chain: tuple[Link, ...],
    h: Hypers,
    decays: Sequence[Any],
    steps: int,
    *,
    flat: bool,
    entrywise: bool,
    fraction_bits: int | None,
    unbounded: bool,
) -> Block:
    """arrays: all leaves of the tree that the block is of; decays: of each link, as it was given, None if it was made."""
    first = arrays[parts[0][0]]
    bits = default_fraction_bits(first.dtype) if fraction_bits is None else fraction_bits
    return Block(
        parts,
        tuple(arrays[i].shape for part in parts for i in part),
        flat,
        entrywise,
        chain,
        compute_dtype(first),
        np.dtype(first.dtype),
        tuple(bits - WIDE_RANGE_BITS if link.wide else bits for link in chain),
        tuple(_buffer(h[link.decay], unbounded) if link.decay else None for link in chain),
        tuple(known_lost(link, value, first, steps) for link, value in zip(chain, decays, strict=True)),
        tuple(most_lost(link, value, first, steps) for link, value in zip(chain, decays, strict=True)),
    )


def decided(blocks: list[Block], h: list[Hypers], values: list[Floats], statistics: Any) -> tuple[Block, ...]:
    """The blocks with what their increments read, and which are isolated. h: of one step; values: of their links;
    statistics: as a rule reads them, None where there are none. Equal blocks are traced once, and those that the library
    alone moves once in a process."""
    once = functools.cache(_decided)
    result = []
    for block, hj, own in zip(blocks, h, values, strict=True):
        like = {name: jax.ShapeDtypeStruct(x.shape, block.dtype) for name, x in own.items()}
        if block.of_parameters and statistics is not None:
            like[STATISTICS] = statistics
        ours = not any(foreign(link.increment) for link in block.chain if link.increment)
        arrays, tree = jax.tree.flatten((hj, like))
        isolated, reads = (_remembered if ours else once)(block.moved(), tuple(arrays), tree, jnp.result_type(float))
        result.append(dataclasses.replace(block, isolated=isolated, reads=reads))
    return tuple(result)


def _decided(
    block: Block, arrays: tuple[jax.ShapeDtypeStruct, ...], tree: Any, _default: np.dtype
) -> tuple[tuple[bool, ...], tuple[frozenset[str], ...]]:
    """Of each link, whether its increments are isolated, and what they read.

    tree: of (h, values). _default: the dtype of Python's floats, which a trace depends on as well.

    Nothing but products is rounded alike wherever it stands; all else is isolated. In float64 all is: no rounding to float32
    parts an increment from the unit of its link, and XLA multiplies the constants of a product among themselves, which are
    other ones in another program.
    """
    h, values = jax.tree.unflatten(tree, arrays)
    isolated: list[bool] = []
    reads: list[frozenset[str]] = []
    for link in block.chain:
        if link.increment is None:
            isolated.append(False)
            reads.append(frozenset())
            continue
        program = block.traced(link, h, values)
        isolated.append(block.dtype == np.float64 or not only_products(program))
        used = {id(x) for x in (*program.outvars, *(x for e in program.eqns for x in e.invars))}
        of_h = len(jax.tree.leaves(h))
        names = [name for name in sorted(values) if name != link.name for _ in jax.tree.leaves(values[name])]
        inputs = program.invars[of_h : of_h + len(names)]
        reads.append(frozenset(name for name, x in zip(names, inputs, strict=True) if id(x) in used))
    return tuple(isolated), tuple(reads)


_remembered = functools.lru_cache(256)(_decided)


def _buffer(rho: Any, unbounded: bool) -> Buffer:
    """A decay that all entries of a block share can be deferred: [steps | 1, ...]."""
    if rho.size == rho.shape[0]:
        return DEFERRED_REFERENCE if unbounded else DEFERRED
    return REFERENCE if unbounded else HEADS


def known_lost(link: Link, value: Any, leaf: Array, steps: int) -> Lost | None:
    """What one leaf loses to a decay whose value is known, even if all else is traced; else None."""
    if value is None or not at_hand(value):
        return None
    with jax.ensure_compile_time_eval():
        rho = np.asarray(value.values if isinstance(value, PerStep) else [value], compute_dtype(leaf))
    return _lost_at(rho, link, steps)


def most_lost(link: Link, value: Any, leaf: Array, steps: int) -> Lost | None:
    """What one leaf loses to a decay at most, if that is traced and comes from a bounded domain; else None."""
    raw = value.values if isinstance(value, PerStep) else value
    low = lowest(raw)
    if low is None:
        return None
    rest = raw.shape[1:] if isinstance(value, PerStep) else raw.shape
    return _lost_at(np.full((1, *rest), low, compute_dtype(leaf)), link, steps)


def _lost_at(rho: np.ndarray, link: Link, steps: int) -> Lost:
    """rho: [steps | 1, ...]."""
    n = known_numerator(rho, link.denominator)
    least = n.reshape(n.shape[0], -1).min(axis=1, initial=link.denominator)
    return lost_by(_buffer(rho, unbounded=False), np.broadcast_to(least, (steps,)), link)


def lost_by(buffer: Buffer, n: np.ndarray, link: Link) -> Lost:
    """n: its smallest numerator at each step, int64 [steps]."""
    bits = math.log2(link.denominator / n.min(initial=link.denominator))
    return Lost(buffer.words_needed(n, link.denominator), bits)


def statistics_in(blocks: tuple[Block, ...]) -> bool:
    """Whether a rule reads what the running statistics have come to."""
    return any(STATISTICS in reads for block in blocks for reads in block.reads if block.of_parameters)
