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

from hypergrad.adjoints.backward import Pushed, undo
from hypergrad.adjoints.segments import Way, joined, step_by_step
from hypergrad.exact import WORD_BITS
from hypergrad.run.forward import Seen, Span, forward, steps_of
from hypergrad.run.plan import Plan, by_link
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Capacity
from hypergrad.run.step import State, refilled, with_words, without_words, words_of
from hypergrad.run.stores import Words


def store_segments(
    run: Run,
    capacity: Capacity,
    inputs: Inputs,
    state: State,
    plan: Plan,
    look: Callable[[State], Any] = lambda _: None,
) -> tuple[Words, State, Seen, Array]:
    """`forward` of all steps, and where the words of its segments are. look: at the state before each."""
    assert run.store is not None
    entries, seen = [schedule.entries for schedule in plan], []
    used = _used(run, plan)
    words = run.store.words(*_announced(run, state, used))
    for first, length, counts in zip(*spans(run), used, strict=True):
        look(state)
        arguments = inputs, entries, state, jnp.int32(first)
        state, stacks, *found = run.segment(_train_segment, *arguments, static=(capacity, length))
        words.put(first, length, stacks, counts)
        seen.append(tuple(found))
    words.settle()
    return words, state, *jax.tree.map(lambda *x: jnp.concatenate(x), *seen)


def undo_stored(way: Way, words: Words, carry: Any) -> tuple[Any, Any]:
    """The way back over all of them: what is carried, and what is found of each step."""
    run, of_steps = way.run, []
    for first, length in reversed(list(zip(*spans(run), strict=True))):
        arguments = way.inputs, way.entries, way.pushed, way.consts, carry, words.take(first), jnp.int32(first)
        carry, found = run.segment(_undo_segment, *arguments, static=(way.wanted, length))
        of_steps.append(found)
    return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *reversed(of_steps))


class Stacks(NamedTuple):
    """Words in host memory that a program reaches by itself."""

    equal: list[Array]  # of segments of one length: [segments, capacity, ...] of each buffer
    rest: list[Array]  # of a shorter one after them; []: there is none


def stack_segments(
    run: Run, capacity: Capacity, inputs: Inputs, state: State, plan: Plan
) -> tuple[Stacks, State, Seen, Array]:
    """`store_segments`, inside of a program."""
    entries = [schedule.entries for schedule in plan]
    count, rest = divmod(run.steps, run.longest)

    def one(state: State, k: Array) -> tuple[State, tuple[list[Array], Any]]:
        first = k * run.longest
        state, stacks, *seen = _train_segment(run, capacity, run.longest, inputs, entries, state, first)
        return state, (jax.device_put(stacks, jax.memory.Space.Host), seen)

    state, (stacks, seen) = jax.lax.scan(one, state, jnp.arange(count, dtype=jnp.int32))
    seen = step_by_step(seen)
    if not rest:
        return Stacks(stacks, []), state, *seen
    first = jnp.int32(count * run.longest)
    state, last, *late = _train_segment(run, capacity, rest, inputs, entries, state, first)
    return Stacks(stacks, last), state, *joined(seen, late)


def undo_stacked(way: Way, words: Stacks, carry: Any) -> tuple[Any, Any]:
    """`undo_stored`, inside of a program."""
    run = way.run
    count, rest = divmod(run.steps, run.longest)
    given = way.inputs, way.entries, way.pushed, way.consts
    if rest:
        first = jnp.int32(count * run.longest)
        carry, late = _undo_segment(run, way.wanted, rest, *given, carry, words.rest, first)

    def one(carry: Any, x: tuple[Array, list[Array]]) -> tuple[Any, Any]:
        k, stacks = x[0], jax.device_put(x[1], jax.memory.Space.Device)
        return _undo_segment(run, way.wanted, run.longest, *given, carry, stacks, k * run.longest)

    carry, found = jax.lax.scan(one, carry, (jnp.arange(count, dtype=jnp.int32), words.equal), reverse=True)
    found = step_by_step(found)
    return carry, joined(found, late) if rest else found


def _train_segment(
    run: Run, capacity: Capacity, length: int, inputs: Inputs, entries: list[Any], state: State, first: Array
) -> tuple[State, list[Array], Seen, Array]:
    xs = steps_of(run, inputs, entries, Span(first, length))
    end, seen, sizes = forward(run, inputs, with_words(run, state, capacity), xs)
    return without_words(run, end), words_of(run, end), seen, sizes


def _undo_segment(
    run: Run,
    wanted: tuple[bool, ...],
    length: int,
    inputs: Inputs,
    entries: list[Any],
    pushed: Pushed,
    consts: Any,
    carry: Any,
    words: list[Any],
    first: Array,
) -> tuple[Any, Any]:
    """The inverse of `_train_segment`, with the cotangents."""
    state, *rest = carry
    xs = steps_of(run, inputs, entries, Span(first, length), pushed)
    (state, *rest), found = undo(run, wanted, consts, (refilled(run, state, words), *rest), xs)
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
    firsts = np.asarray(run.emptied)
    counts = [np.append(np.asarray(s.entries.slot)[firsts], np.asarray(s.words)) for s in plan]
    own = by_link(run, [np.diff(count) for count in counts])
    rows = [own[j][link.name] for j, block in enumerate(run.blocks) for link in block.chain if link.decay]
    return np.transpose(rows).tolist() if rows else [[] for _ in firsts]
