"""Exactly reversible multiplication by n/d (thesis, Algorithm 7) with an information buffer on the device, at every step.

For decays of which each weight has its own; others wait (exact/deferred.py).

Invariant: `divide_by(*multiply_by(buffer, c, ...), ...) == (buffer, c)`, bit for bit.

The buffer of Algorithm 7 is one unbounded integer i per parameter. Here it is a head (uint32) and a stack of 16-bit
words. The top of the stack always mirrors the low 16 bits of the head; to spill a word is to shift it out of the head and
to leave its mirror behind. When that must happen depends on n_1..n_T alone:

    grown(bound) = (bound d + d - 1) div n      the largest value that any head of the leaf can hold after this step
    if grown(bound) >= 2^32: spill, bound <- bound div 2^16
    bound <- grown(bound)

so the schedule is computed before the loop, and both passes read it. One word a step is enough for n >= d / 2^16: what is
left after a spill is below 2^16, and (2^16 - 1) d + d - 1 < 2^32 n.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal, jaxpr_as_fun

from hypergrad.exact.limbs import Value, join, over, split, times
from hypergrad.exact.ratio import divide


WORD_BITS = 16
HEAD_BITS = 32
PUBLIC_WORD_BITS = 32  # what users count words by


class Turn(NamedTuple):
    """What a step must know beforehand: scalars, or arrays with a leading step axis."""

    n: Array  # int64, the leaf's smallest numerator
    spills: Array  # bool, whether a word leaves the heads
    slot: Array  # int32, the number of words spilled before
    step: Array | int = 0  # int32; the same for the whole batch under vmap, whatever else differs

    def unslotted(self) -> "Turn":
        """The same for a stack of one word."""
        return self._replace(slot=jnp.zeros_like(self.slot))


class Buffer(NamedTuple):
    """Lost digits of one leaf of one link."""

    head: Array  # uint32, the parameter's shape
    stack: Array | None  # uint16 [capacity + 1, ...]; None drops the words (a run that will not be reversed)


def empty_buffer(shape: tuple[int, ...], capacity: int | None) -> Buffer:
    """`capacity`: words per parameter; one slot more is allocated, for the mirror."""
    stack = None if capacity is None else jnp.zeros((capacity + 1, *shape), jnp.uint16)
    return Buffer(jnp.zeros(shape, jnp.uint32), stack)


def is_empty(buffer: Buffer) -> Array:
    """Parameter by parameter: bool [...]."""
    return buffer.head == 0


def length(buffer: Buffer, words: Array) -> Array:
    """Bits that the integers of Algorithm 7 are long, their mean: those of the words spilled and of what is in each head."""
    return WORD_BITS * words + jnp.mean((HEAD_BITS - jax.lax.clz(buffer.head)).astype(jnp.float32))


def multiply_by(buffer: Buffer, c: Value, n: Array, denominator: int, turn: Turn) -> tuple[Buffer, Value]:
    """c <- c n/d, the digit lost kept in the buffer (Algorithm 7).

    c: int64 [...] or `Wide`; n: int64 [] or [...], max(1, d / 2^16) <= n <= d; d = `denominator`, a power of two.
    """
    k = _log2(denominator)
    i = behind_branch(turn.step >= 0, functools.partial(_next_head, k), buffer.head, c, n, turn.spills)
    c, digit = split(c, k)
    c = times(c, n, _mod(digit - i.astype(jnp.int64) * n, k))  # l. 4-5: c = c div d, c = c n + i mod n
    return _mirror(Buffer(i, buffer.stack), turn), c


def divide_by(buffer: Buffer, c: Value, n: Array, denominator: int, turn: Turn) -> tuple[Buffer, Value]:
    """The inverse of `multiply_by`: its lines in reverse order."""
    k, multiple = _log2(denominator), buffer.head.astype(jnp.int64) * n
    c, digit = over(c, n, functools.partial(behind_branch, turn.step >= 0))
    c = join(c, _mod(multiple + digit, k), k)  # l. 4-5
    i = _last_head(k, multiple, c)
    return _unspill(Buffer(i, buffer.stack), turn), c


def _next_head(k: int, i: Array, c: Value, n: Array, spills: Array) -> Array:
    """l. 2, 3, 6: i = i d + c mod d, i = i div n."""
    i = jnp.where(spills, i >> WORD_BITS, i)  # the word is in the stack already
    return divide((i.astype(jnp.int64) << k) | split(c, k)[1], n)[0].astype(jnp.uint32)


def _last_head(k: int, multiple: Array, c: Value) -> Array:
    """Its inverse, from i n and the old c: i = i n + digit, i = i div d."""
    return ((multiple + _mod(split(c, k)[1] - multiple, k)) >> k).astype(jnp.uint32)


def _mod(x: Array, k: int) -> Array:
    """x mod 2^k. A remainder by n <= 2^k is known from its last k bits: those of what it is the difference of."""
    return x & (2**k - 1)


def behind_branch(taken: Array | bool, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), computed apart and stored, and zeros if not `taken`: bool [].

    XLA simplifies and contracts float expressions by their context, so that the same expression can have other bits in
    another program, barriers or not, and it computes again what it could store. A branch is a boundary that it respects.
    """
    arrays, rest = eqx.partition(args, eqx.is_array)
    traced, like = jax.make_jaxpr(lambda *a: function(*eqx.combine(a, rest)), return_shape=True)(*arrays)
    jaxpr, leaves = traced.jaxpr, jax.tree.leaves(arrays)
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *leaves], strict=True))
    results = [None if isinstance(v, Literal) else known.get(v) for v in jaxpr.outvars]  # what is computed: not what came in
    computed = [i for i, x in enumerate(results) if x is None]
    some = lambda *a: [x for i, x in enumerate(jaxpr_as_fun(traced)(*a)) if i in computed]  # noqa: E731
    nothing = lambda *_: [jnp.zeros(traced.out_avals[i].shape, traced.out_avals[i].dtype) for i in computed]  # noqa: E731
    for i, x in zip(computed, jax.lax.cond(taken, some, nothing, *leaves), strict=True):
        results[i] = x
    return jax.tree.unflatten(jax.tree.structure(like), results)


def unseen() -> Array:
    """True, which XLA does not see, and not batched under any vmap: for `behind_branch` outside of a loop. bool []."""
    return jax.lax.fori_loop(0, 2, lambda i, sum: sum + i, jnp.int32(0)) >= 0


def _unspill(buffer: Buffer, turn: Turn) -> Buffer:
    word = jax.lax.dynamic_index_in_dim(buffer.stack, turn.slot, 0, keepdims=False)
    head = jnp.where(turn.spills, (buffer.head << WORD_BITS) | word.astype(jnp.uint32), buffer.head)
    return buffer._replace(head=head)


def _mirror(buffer: Buffer, turn: Turn) -> Buffer:
    # Written at every step, whether or not the next one spills: cheaper than a branch, above all under vmap.
    if buffer.stack is None:
        return buffer
    top = turn.slot + turn.spills
    return buffer._replace(stack=jax.lax.dynamic_update_index_in_dim(buffer.stack, buffer.head.astype(jnp.uint16), top, 0))


class Schedule(NamedTuple):
    """When the buffer of one leaf spills, and what it holds at the end."""

    turns: Any  # `Turn` or `Deferral`, of arrays [steps]
    words: Array  # int32 []: words spilled per parameter
    held: Array  # float []: bits that wait to become words


def schedule(n: Array, denominator: int) -> Schedule:
    """Spills of a leaf: int64 [steps], the leaf's smallest numerator at each step (a bound for the others)."""

    def body(carry: tuple[Array, Array], n: Array) -> tuple[tuple[Array, Array], Turn]:
        (bound, slot), spills = _next_bound(*carry, n, denominator, jnp.where)
        return (bound, slot), Turn(n, spills, carry[1])

    (bound, words), turns = jax.lax.scan(body, (jnp.int64(0), jnp.int32(0)), n)
    held = jnp.log2(bound.astype(jnp.float32) + 1)
    return Schedule(turns._replace(step=jnp.arange(n.shape[0], dtype=jnp.int32)), words, held)


def words_needed(n: np.ndarray, denominator: int) -> int:
    """`schedule(n, denominator).words` for concrete numerators, in Python integers."""
    state = (0, 0)
    for numerator in np.asarray(n).tolist():
        state, _ = _next_bound(*state, numerator, denominator, lambda c, x, y: x if c else y)
    return state[1]


def _next_bound(bound: Any, slot: Any, n: Any, denominator: int, where: Callable[..., Any]) -> tuple[Any, Any]:
    """((bound, slot) after a multiplication by n/d, whether it spilled first); on arrays or on Python integers."""
    grown = lambda bound: (bound * denominator + denominator - 1) // n  # noqa: E731
    spills = grown(bound) >= 2**HEAD_BITS
    bound, slot = where(spills, bound >> WORD_BITS, bound), where(spills, slot + 1, slot)
    return (grown(bound), slot), spills


def _log2(denominator: int) -> int:
    return denominator.bit_length() - 1
