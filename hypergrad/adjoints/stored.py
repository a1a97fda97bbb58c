"""A run whose words are stored elsewhere, segment by segment: Python between segments, or one program over all of them.

Invariant: each segment is undone with the words that it left, bit for bit.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.adjoints.backward import Pushed
from hypergrad.adjoints.segments import OfSteps, Way, joined, step_by_step
from hypergrad.exact import WORD_BITS, Mark
from hypergrad.run.forward import Seen, forward, steps_within
from hypergrad.run.plan import Plan, Span, by_link, marks
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Capacity, Noted, note, noted_in_all
from hypergrad.run.step import State, refilled, with_words, without_words, words_of
from hypergrad.run.stores import Pieces, Words


def store_segments(
    run: Run,
    capacity: Capacity,
    inputs: Inputs,
    state: State,
    plan: Plan,
    look: Callable[[int, State], Any] = lambda *_: None,
) -> tuple[Words, State, Seen, Noted]:
    """`forward` of all steps, and where the words of its segments are. look: at the first step of each, and the state
    before it."""
    assert run.store is not None
    pieces, used = Pieces(), _used(run, plan)
    words = run.store.words(*_announced(run, state, used))
    try:
        for k, (first, length, counts) in enumerate(zip(*spans(run), used, strict=True)):
            look(first, state)
            arguments = inputs, marks(plan, k), state, jnp.int32(first)
            state, stacks, *seen = run.segment(_train_segment, *arguments, static=(capacity, length))
            words.put(first, length, stacks, counts)
            pieces.append(tuple(seen))
        words.settle()
    except BaseException:
        words.drop()
        raise
    of_steps, noted = pieces.joined()
    return words, state, of_steps, run.outside_loop(noted_in_all, noted)


def undo_stored(way: Way, words: Words, carry: Any) -> tuple[Any, OfSteps]:
    """The way back over all of them: what is carried, and what is found of each step."""
    run, pieces = way.run, Pieces()
    for k, span in reversed(list(enumerate(map(Span, *spans(run))))):
        kept = span.of(way.seen), marks(way.plan, k), words.take(span.first)
        arguments = way.inputs, way.pushed, way.consts, *kept, carry, jnp.int32(span.first)
        carry, found = run.segment(_undo_segment, *arguments, static=(way.wanted, span.length))
        pieces.append(found)
    return carry, pieces.joined(reverse=True)


class Stacks(NamedTuple):
    """What a program keeps of its segments in host memory, which it reaches by itself."""

    equal: tuple[list[Array], Seen]  # of segments of one length: words of each buffer, and losses, [segments, ...]
    rest: tuple[list[Array], Seen] | None  # of a shorter one after them


def stack_segments(
    run: Run, capacity: Capacity, inputs: Inputs, state: State, plan: Plan
) -> tuple[Stacks, State, Seen, Noted]:
    """`store_segments`, inside of a program."""
    count, rest = divmod(run.steps, run.stride)

    def train(state: State, k: Any, length: int) -> tuple[State, list[Array], Seen, Noted]:
        return _train_segment(run, capacity, length, inputs, marks(plan, k), state, jnp.asarray(k * run.stride, jnp.int32))

    def one(state: State, k: Array) -> tuple[State, Any]:
        state, stacks, seen, noted = train(state, k, run.stride)
        return state, (_moved((stacks, seen), jax.memory.Space.Host), (seen, noted))

    state, (equal, found) = jax.lax.scan(one, state, jnp.arange(count, dtype=jnp.int32))
    found, last = step_by_step(found), None
    if rest:
        state, stacks, late, noted = train(state, count, rest)
        found, last = joined(found, (late, noted)), _moved((stacks, late), jax.memory.Space.Host)
    seen, noted = found
    return Stacks(equal, last), state, seen, noted_in_all(run, noted)


def undo_stacked(way: Way, kept: Stacks, carry: Any) -> tuple[Any, OfSteps]:
    """`undo_stored`, inside of a program."""
    run, late = way.run, None
    count, rest = divmod(run.steps, run.stride)

    def back(carry: Any, k: Any, length: int, kept: tuple[list[Array], Seen]) -> tuple[Any, OfSteps]:
        shared, (words, seen), first = (way.inputs, way.pushed, way.consts), kept, jnp.asarray(k * run.stride, jnp.int32)
        return _undo_segment(run, way.wanted, length, *shared, seen, marks(way.plan, k), words, carry, first)

    if kept.rest is not None:
        carry, late = back(carry, count, rest, _moved(kept.rest, jax.memory.Space.Device))

    def one(carry: Any, x: tuple[Array, Any]) -> tuple[Any, OfSteps]:
        return back(carry, x[0], run.stride, _moved(x[1], jax.memory.Space.Device))

    carry, found = jax.lax.scan(one, carry, (jnp.arange(count, dtype=jnp.int32), kept.equal), reverse=True)
    early = step_by_step(found)
    return carry, early if late is None else joined(early, late)


def _moved(tree: Any, to: Any) -> Any:
    """One by one: under `jax.vmap`, JAX puts several only where all of them are batched."""
    return jax.tree.map(lambda x: jax.device_put(x, to), tree)


def _train_segment(
    run: Run, capacity: Capacity, length: int, inputs: Inputs, before: list[Mark], state: State, first: Array
) -> tuple[State, list[Array], Seen, Noted]:
    xs = steps_within(run, inputs, before, Span(first, length))
    end, seen, sizes = forward(run, inputs, with_words(run, state, capacity), xs)
    noted = run.outside_loop(note, seen.losses, sizes, first)
    return without_words(run, end), words_of(run, end), seen, jax.tree.map(lambda x: x[None], noted)


def _undo_segment(
    run: Run,
    wanted: tuple[bool, ...],
    length: int,
    inputs: Inputs,
    pushed: Pushed,
    consts: Any,
    seen: Seen,
    before: list[Mark],
    words: list[Any],
    carry: Any,
    first: Array,
) -> tuple[Any, OfSteps]:
    """The inverse of `_train_segment`, with the cotangents."""
    state, *rest = carry
    way, span = Way(run, wanted, inputs, pushed, consts, seen), Span(first, length)
    (state, *rest), found = way.undo_within((refilled(run, state, words), *rest), before, span)
    return (without_words(run, state), *rest), found


def spans(run: Run) -> tuple[list[int], list[int]]:
    """(the first step of each segment, how many it has)"""
    firsts = run.emptied
    return firsts, [b - a for a, b in itertools.pairwise([*firsts, run.steps])]


def buffers_of(run: Run, state: State) -> dict[str, tuple[int, ...]]:
    """Names of all buffers, and the shapes of their words: what a link holds may have another shape than its block."""
    links = [(j, link) for j, block in enumerate(run.blocks) for link in block.chain if link.decay]
    return {f"{j}-{link.name}": state[j][link.name].value.shape for j, link in links}


def _announced(run: Run, state: State, used: list[list[int]]) -> tuple[dict[str, tuple[int, ...]], int]:
    """(`buffers_of`, bytes of all words)"""
    buffers = buffers_of(run, state)
    sizes = [math.prod(shape) * WORD_BITS // 8 for shape in buffers.values()]
    return buffers, int(sum(np.dot(row, sizes) for row in used))


def _used(run: Run, plan: Plan) -> list[list[int]]:
    """Of each segment, the words of each buffer."""
    counts = [np.append(np.asarray(s.before.words), np.asarray(s.end.words)) for s in plan if s.before is not None]
    own = by_link(run, [np.diff(count) for count in counts])
    rows = [own[j][link.name] for j, block in enumerate(run.blocks) for link in block.chain if link.decay]
    return np.transpose(rows).tolist() if rows else [[] for _ in run.emptied]
