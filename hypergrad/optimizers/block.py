"""Blocks: what one chain of links moves, one leaf of the parameters or several small ones side by side.

Invariant: `block.split(block.join(leaves))` are the leaves of the block; all that is decided about a block is decided once,
at set-up, and is part of its value.

What costs by the piece (a kernel, its compilation, a schedule) costs once for leaves that lie side by side.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr

from hypergrad._bounds import lowest
from hypergrad._isolation import only_products
from hypergrad._mended import mending
from hypergrad._placement import at_hand, may_be_divided
from hypergrad.exact import DEFERRED, DEFERRED_REFERENCE, HEADS, REFERENCE, Buffer, default_fraction_bits, known_numerator
from hypergrad.optimizers.chain import GRADIENT, PARAMS, STATISTICS, Link, View, as_float, check_fits, foreign
from hypergrad.optimizers.expand import Field, Hypers, compute_dtype, shared_value
from hypergrad.optimizers.partition import Stack
from hypergrad.schedules import PerStep


LARGE = 1 / 8  # of all parameters: a leaf of more than that stays by itself, since every step copies those that do not
WIDE_RANGE_BITS = 8  # sums of squares up to 2^22 for float32 parameters

Floats = dict[str, Any]  # of one block: link -> array; also the tree of new statistics, by their name


class Lost(NamedTuple):
    """What the values of a link lose to a decay."""

    words: int  # at all steps, as the buffer keeps them
    bits: float  # the most at one step


@dataclasses.dataclass(frozen=True)
class Block:
    """What one chain moves; hashable."""

    leaves: tuple[int, ...]  # of the parameters, or of the statistics, in the order in which they lie
    shapes: tuple[tuple[int, ...], ...]
    flat: bool  # whether they lie in one vector; else the block is one leaf and has its shape
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
    def shape(self) -> tuple[int, ...]:
        return (sum(map(math.prod, self.shapes)),) if self.flat else self.shapes[0]

    @property
    def of_parameters(self) -> bool:
        return self.chain[-1].name == PARAMS

    def moved(self) -> "Block":
        """What its increments are traced with: equal for blocks that differ in where they lie and what they lose."""
        nothing: Any = {"leaves": (), "shapes": (self.shape,), "flat": False, "fraction_bits": (), "buffers": ()}
        return dataclasses.replace(self, **nothing, known=(), most=(), isolated=(), reads=())

    def join(self, leaves: list[Any]) -> Any:
        """All leaves of the tree -> the block's own as one array."""
        return self.joined([leaves[i] for i in self.leaves])

    def joined(self, own: list[Array]) -> Array:
        return jnp.concatenate([x.reshape(-1) for x in own]) if self.flat else own[0]

    def split(self, array: Array) -> list[Array]:
        """The inverse of `joined`, and of what is computed entry by entry from what it made."""
        return split_vectors([array], (self.shapes,))[0] if self.flat else [array]

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


@functools.partial(jax.jit, static_argnums=1, inline=True)
def split_vectors(arrays: list[Array], shapes: tuple[tuple[tuple[int, ...], ...] | None, ...]) -> list[list[Array]]:
    """Of each vector, the arrays that lie in it, one after the other; with None for shapes, an array as it is."""

    def split(x: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
        sizes = list(map(math.prod, shapes))
        parts = [x] if len(sizes) == 1 else jax.lax.split(x, sizes)  # the transpose of a concatenation
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    return [[x] if own is None else split(x, own) for x, own in zip(arrays, shapes, strict=True)]


def groups(
    stacks: list[Stack], fields: list[list[dict[str, Field]]], leaves: list[Array], elsewhere: bool
) -> list[tuple[int, ...]]:
    """Which leaves lie side by side: small ones of one dtype that share the rule and every hyperparameter, where it works
    entry by entry, and that are not divided over devices: side by side, each device would have all of them. elsewhere:
    whether it is to be the same on any number of devices, as what all leaves share is then added in one order."""
    total = sum(x.size for x in leaves)
    found: dict[Hashable, list[int]] = {}
    for i, (stack, own, x) in enumerate(zip(stacks, fields, leaves, strict=True)):
        alone = not stack.entrywise or x.size > LARGE * total or may_be_divided(x, elsewhere)
        values = [shared_value(field.values[i]) for layer in own for field in layer.values()]
        key = (i if alone else None, x.dtype, tuple(layer.path for layer in stack.layers), *values)
        found.setdefault(key, []).append(i)
    return list(map(tuple, found.values()))


def keeps_shape(own: tuple[int, ...], leaves: Sequence[Any], elsewhere: bool) -> bool:
    """Whether a block that might be a vector is none: an array divided along its second axis would be on every device."""
    return len(own) == 1 and may_be_divided(leaves[own[0]], elsewhere)


def block(
    leaves: tuple[int, ...],
    arrays: list[Array],
    chain: tuple[Link, ...],
    h: Hypers,
    *,
    flat: bool,
    entrywise: bool,
    fraction_bits: int | None,
    unbounded: bool,
    known: tuple[Lost | None, ...],
    most: tuple[Lost | None, ...],
) -> Block:
    """arrays: all leaves of the tree that the block is of."""
    first = arrays[leaves[0]]
    bits = default_fraction_bits(first.dtype) if fraction_bits is None else fraction_bits
    return Block(
        leaves,
        tuple(arrays[i].shape for i in leaves),
        flat,
        entrywise,
        chain,
        compute_dtype(first),
        np.dtype(first.dtype),
        tuple(bits - WIDE_RANGE_BITS if link.wide else bits for link in chain),
        tuple(_buffer(h[link.decay], unbounded) if link.decay else None for link in chain),
        known,
        most,
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
