"""One training step on the grid, and its exact inverse, block by block.

Invariant: `unstep(step(state, s), s) == state`, bit for bit, where both directions compute the same signals at the old
parameters.

The running statistics move first, so that a link may read what they have come to; they are undone last.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad._isolation import isolated, isolated_once
from hypergrad.exact import DeferredEntry, Fixed, Heads, all_of, numerator
from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import GRADIENT, PARAMS, STATISTICS, Link
from hypergrad.optimizers.expand import Hypers
from hypergrad.run.spec import Run


class Slot(NamedTuple):
    """One link of one block: its integers, and what its decay has lost of them."""

    value: Fixed
    digits: Any  # as the link's buffer keeps them; None where nothing decays


Slots = dict[str, Slot]  # of one block, by link
State = list[Slots]  # of training, all of it: of each block
Entries = list[dict[str, Any]]  # of each block: what the buffer of a decaying link must know at this step
Signals = list[dict[str, Array]]  # of each block: what the increments of its links are given as g


def step(run: Run, t: Array, state: State, h: list[Hypers], entries: Entries, signals: Signals) -> State:
    """z_k <- rho_k z_k + increment_k for the links k = 1..K of each block, those of the statistics first."""
    state = list(state)

    def move(j: int, links: Sequence[Link], signals: Signals) -> None:
        for link in links:
            update = increment(run, j, link, t, state, h, signals)
            state[j] = state[j] | {link.name: advance(run.blocks[j], link, t, state[j], h[j], entries[j], update)}

    for j in run.statistics:
        move(j, run.blocks[j].chain, signals)
    for j in run.parameters:
        move(j, run.blocks[j].chain[: run.early[j]], signals)
    signals = transformed(run, t, state, h, signals)
    for j in run.parameters:
        move(j, run.blocks[j].chain[run.early[j] :], signals)
    return state


def unstep(
    run: Run, t: Array, state: State, h: list[Hypers], entries: Entries, signals: Callable[[list[Array]], Signals]
) -> State:
    """The inverse of `step`: links in reverse order, the signals computed once the parameters are back."""
    state = list(state)
    nothing: Signals = [{} for _ in run.blocks]

    def undo(j: int, link: Link, known: Signals) -> None:
        update = increment(run, j, link, t, state, h, known)
        state[j] = state[j] | {link.name: retreat(run.blocks[j], link, state[j], h[j], entries[j], update)}

    for j in run.parameters:
        undo(j, run.blocks[j].chain[-1], nothing)
    raw = signals(parameters(run, t, state))
    known = transformed(run, t, state, h, raw)
    for j in run.parameters:
        for link in reversed(run.blocks[j].chain[run.early[j] : -1]):
            undo(j, link, known)
    for j in run.parameters:
        for link in reversed(run.blocks[j].chain[: run.early[j]]):
            undo(j, link, raw)
    for j in run.statistics:
        for link in reversed(run.blocks[j].chain):
            undo(j, link, raw)
    return state


def increment(run: Run, j: int, link: Link, t: Array, state: State, h: list[Hypers], signals: Signals) -> Array | None:
    """What a link of a block adds at the present values; None: nothing."""
    return increment_at(run.blocks[j], link, t, h[j], readable(run, j, link, state), signals[j].get(link.signal))


def rests(link: Link) -> bool:
    """Whether a link keeps its value. One that only decays adds 0, by which a record of an overflow stays as it is."""
    return link.increment is None and not link.decay


def increment_at(block: Block, link: Link, t: Array, h: Hypers, read: Floats, g: Array | None) -> Array | None:
    """`increment` at what `readable` gives: the same bits in every pass."""
    if rests(link):
        return None
    one = lambda h, read, g: block.increment(link, h, read, g)  # noqa: E731
    return isolated(t, one, h, read, g) if block.isolated[block.chain.index(link)] else one(h, read, g)


def advance(block: Block, link: Link, t: Array, slots: Slots, h: Hypers, entries: Any, update: Array | None) -> Slot:
    """z <- rho z + update."""
    value, digits = old, _ = slots[link.name]
    if link.decay:
        args = _numerator(link, h, entries[link.name]), link.denominator, entries[link.name]
        digits, value = block.buffer(link).multiply_by(digits, value, *args)
    if update is not None:
        value = value.add(update, block.bits(link), t, old)
    return Slot(value, digits)


def retreat(block: Block, link: Link, slots: Slots, h: Hypers, entries: Any, update: Array | None) -> Slot:
    """The inverse of `advance`: its lines in reverse order."""
    value, digits = slots[link.name]
    if update is not None:
        value = value.subtract(update, block.bits(link))
    if link.decay:
        args = _numerator(link, h, entries[link.name]), link.denominator, entries[link.name]
        digits, value = block.buffer(link).divide_by(digits, value, *args)
    return Slot(value, digits)


def _numerator(link: Link, h: Hypers, entry: Any) -> Array | None:
    """Of each weight's own decay; one that is deferred has all that it needs in its entry."""
    return None if isinstance(entry, DeferredEntry) else numerator(h[str(link.decay)], link.denominator)


def readable(run: Run, j: int, link: Link, state: State) -> Floats:
    """What the increments of a link read: other links of its block, and the new statistics."""
    block = run.blocks[j]
    names = block.reads[block.chain.index(link)]
    read: Floats = {k.name: decoded(block, k, state[j]) for k in block.chain if k.name in names}
    if STATISTICS in names and block.of_parameters:
        read[STATISTICS] = run.statistics_tree_of(
            [decoded(run.blocks[i], run.blocks[i].chain[0], state[i]) for i in run.statistics]
        )
    return read


def decoded(block: Block, link: Link, slots: Slots) -> Array:
    """A link's values as increments compute with them."""
    return slots[link.name].value.decode(block.bits(link), block.dtype)


def seen_outside(block: Block, link: Link, slots: Slots) -> Array:
    """A link's values as the world sees them: the parameters in their own dtype."""
    dtype = block.leaf_dtype if link.name == PARAMS else block.dtype
    return slots[link.name].value.decode(block.bits(link), dtype)


def parameters(run: Run, t: Array, state: State) -> list[Array]:
    """What the loss takes, leaf by leaf. Isolated, so that it is stored.

    In the open, XLA:CPU would decode a bias again for each row that it is added to, and its library for sums would pull the
    decoding in, its constant as an array.
    """
    values = [{PARAMS: state[j][PARAMS]._replace(digits=None)} for j in run.parameters]

    def outside(values: list[Slots]) -> list[Array]:
        return [seen_outside(b, b.chain[-1], z) for b, z in zip(run.of_parameters, values, strict=True)]

    if run.splits_apart:
        return run.split_apart(t, isolated(t, outside, values))
    return isolated(t, lambda values: run.split(outside(values)), values)


def wide_parameters(run: Run, state: State) -> list[Array]:
    """The parameters of each block, in the accumulators' dtypes."""
    return [decoded(run.blocks[j], run.blocks[j].chain[-1], state[j]) for j in run.parameters]


def transformed(run: Run, t: Array, state: State, h: list[Hypers], signals: Signals) -> Signals:
    """The signals, the gradient as the chains see it: with the same bits in every pass."""
    if not run.transforms:
        return signals
    of_parameters, g = [h[j] for j in run.parameters], [signals[j][GRADIENT] for j in run.parameters]
    g = isolated(t, run.transformed, of_parameters, wide_parameters(run, state), g, early_values(run, state))
    return [{**own, GRADIENT: g[j]} if j in run.parameters else own for j, own in enumerate(signals)]


def early_values(run: Run, state: State) -> list[Floats]:
    """Of each block of the parameters, the links that are `Run.early`, as transformations read them."""
    return [
        {link.name: decoded(block, link, state[j]) for link in block.chain[: run.early[j]]}
        for j, block in enumerate(run.of_parameters)
    ]


def initial_state(run: Run, values: list[Floats], capacity: tuple[tuple[int | None, ...], ...]) -> State:
    """The state that holds these floats and has lost nothing yet. capacity: words of each block's and link's buffer."""
    state: State = []
    for block, own, words in zip(run.blocks, values, capacity, strict=True):
        slots = {}
        for link, room in zip(block.chain, words, strict=True):
            value = _stored(link, lambda x, block=block, link=link: _on_grid(block, link, x), own[link.name])
            slots[link.name] = Slot(value, block.buffer(link).empty(value.high, room) if link.decay else None)
        state.append(slots)
    return state


def with_words(run: Run, state: State, capacity: tuple[tuple[int | None, ...], ...]) -> State:
    """With empty stacks of so many words: the state before steps that are to be reversed to here."""

    def filled(block: Block, link: Link, slot: Slot, room: int | None) -> Slot:
        if not link.decay or room is None:
            return slot
        return slot._replace(digits=block.buffer(link).with_words(slot.digits, slot.value.high, room))

    return [
        {k.name: filled(block, k, slots[k.name], room) for k, room in zip(block.chain, words, strict=True)}
        for block, slots, words in zip(run.blocks, state, capacity, strict=True)
    ]


def capacity_of(run: Run, state: State) -> tuple[tuple[int | None, ...], ...]:
    """Words that each stack has room for."""
    return tuple(
        tuple(b.buffer(k).capacity(slots[k.name].digits) if k.decay else None for k in b.chain)
        for b, slots in zip(run.blocks, state, strict=True)
    )


def words_of(run: Run, state: State) -> list[Array]:
    """The stacks of all that decays, in the order of blocks and links."""
    return [slots[k.name].digits.stack for b, slots in zip(run.blocks, state, strict=True) for k in b.chain if k.decay]


def refilled(run: Run, state: State, words: Sequence[Any]) -> State:
    """The inverse of `words_of`, followed by `without_words`."""
    stacks = iter(words)
    back = lambda b, k, s: s._replace(digits=s.digits._replace(stack=next(stacks))) if k.decay else s  # noqa: E731
    return map_state(back, run, state)


def without_words(run: Run, state: State) -> State:
    """Without stacks: integers, and heads."""
    bare = lambda b, k, s: s if s.digits is None else s._replace(digits=b.buffer(k).without_words(s.digits))  # noqa: E731
    return map_state(bare, run, state)


def matches_initial(run: Run, values: list[Floats], state: State) -> Array:
    """Of each block and link, whether this is exactly the state that `initial_state` makes: bool [blocks' links]. The
    certificate.

    Leaves of one block share a flag, so the first of them is named; `check_reversal` finds the one.
    """
    flags = []
    for block, own, slots in zip(run.blocks, values, state, strict=True):
        for link in block.chain:
            same = lambda x, z, block=block, link=link: all_of(_on_grid(block, link, x).equals(z))  # noqa: E731
            back = _stored(link, same, own[link.name], slots[link.name].value)
            if link.decay:
                back &= all_of(block.buffer(link).is_empty(slots[link.name].digits))
            flags.append(back)
    return jnp.stack(flags)


def matches(run: Run, one: State, other: State) -> Array:
    """Of each block and link, whether two states are the same, what decays have lost included: bool [blocks' links]."""

    def same(x: Any, y: Any) -> Array:
        pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
        return functools.reduce(jnp.logical_and, (all_of(a == b) for a, b in pairs))

    pairs = [(one[j][link.name], other[j][link.name]) for j, block in enumerate(run.blocks) for link in block.chain]
    return jnp.stack([same(x._replace(digits=_heads(x.digits)), y._replace(digits=_heads(y.digits))) for x, y in pairs])


def _heads(digits: Any) -> Any:
    """Without the stack: words above its top are not cleared when they are taken back."""
    return digits.head if isinstance(digits, Heads) else None


def _on_grid(block: Block, link: Link, x: Array) -> Fixed:
    """Added to zero, which records what no grid value can represent."""
    zero = Fixed.zeros_like(x, link.wide)
    return (block.buffer(link).hold(zero) if link.decay else zero).add(x, block.bits(link))


def _stored(link: Link, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args); of parameters isolated, so that what they begin with is computed before, and once."""
    return isolated_once(function, *args) if link.name == PARAMS else function(*args)


def map_state(function: Callable[[Block, Link, Slot], Any], run: Run, state: State) -> list[dict[str, Any]]:
    """function(block, link, slot) of every link of every block."""
    return [
        {link.name: function(block, link, slots[link.name]) for link in block.chain}
        for block, slots in zip(run.blocks, state, strict=True)
    ]


def final_values(run: Run, state: State) -> list[Floats]:
    """What all links have come to, as the world sees it."""
    return map_state(lambda block, link, slot: seen_outside(block, link, {link.name: slot}), run, state)


def replaced(blocks: list[dict[str, Any]], j: int, new: dict[str, Any]) -> list[dict[str, Any]]:
    """The list with these entries of block j."""
    return [own | new if i == j else own for i, own in enumerate(blocks)]
