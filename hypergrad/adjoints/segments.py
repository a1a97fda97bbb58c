"""A run cut into segments: states are kept between them, and words of one at a time.

Invariant: each segment is replayed from its state to the bits that the next began with, and reversed to its own; what fails
of either is in the certificate.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.adjoints.backward import Pushed, undo
from hypergrad.run.forward import Seen, Span, forward, steps_of
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Capacity
from hypergrad.run.step import State, matches, with_words, without_words


class Way(NamedTuple):
    """What all segments share on the way back."""

    run: Run
    wanted: tuple[bool, ...]
    inputs: Inputs
    entries: list[Any]  # of all steps, for each schedule
    pushed: Pushed
    consts: Any  # as `begin` gives them
    capacity: Capacity

    def undo(self, carry: Any, span: Span | None = None) -> tuple[Any, Any]:
        xs = steps_of(self.run, self.inputs, self.entries, span, self.pushed)
        return undo(self.run, self.wanted, self.consts, carry, xs)


def replay(
    run: Run, inputs: Inputs, entries: list[Any], state: State, first: Any, count: int, length: int
) -> tuple[State, State, tuple[Seen, Array]]:
    """`forward` over `count` segments of `length` steps, without words: (the end, the state before each, what was seen)."""

    def one(state: State, k: Array) -> tuple[State, tuple[State, tuple[Seen, Array]]]:
        xs = steps_of(run, inputs, entries, Span(first + k * length, length))
        end, seen, sizes = forward(run, inputs, state, xs)
        return end, (state, (seen, sizes))

    end, (starts, seen) = jax.lax.scan(one, state, jnp.arange(count, dtype=jnp.int32))
    return end, starts, step_by_step(seen)


def undo_segments(
    way: Way, segments: tuple[int, ...], first: Any, length: int, starts: State, carry: Any
) -> tuple[Any, Any, Array]:
    """Back to `first` over segments of `length` steps that begin in `starts`; segments: how many, and how each is cut.

    (What is carried, what is found of each step, of each block and link whether all states were met.)
    """

    def one(carry: Any, x: Any) -> tuple[Any, tuple[Any, Array]]:
        k, start = x
        carry, found, met = _undo_segment(way, segments[1:], first + k * length, length, start, carry)
        return carry, (found, met)

    numbered = jnp.arange(segments[0], dtype=jnp.int32), starts
    carry, (found, met) = jax.lax.scan(one, carry, numbered, reverse=True)
    return carry, step_by_step(found), met.all(0)


def _undo_segment(
    way: Way, segments: tuple[int, ...], first: Any, length: int, start: State, carry: Any
) -> tuple[Any, Any, Array]:
    run, (state, *rest) = way.run, carry
    if segments:
        length //= segments[0]
        _, starts, _ = replay(run, way.inputs, way.entries, start, first, segments[0], length)
        return undo_segments(way, segments, first, length, starts, carry)
    span = Span(first, length)
    xs = steps_of(run, way.inputs, way.entries, span)
    end = forward(run, way.inputs, with_words(run, start, way.capacity), xs)[0]
    (found_again, *rest), found = way.undo((end, *rest), span)
    met = matches(run, end, state) & matches(run, start, found_again)
    return (without_words(run, found_again), *rest), found, met


def step_by_step(seen: Any) -> Any:
    """[segments, steps, ...] -> [segments steps, ...]"""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)


def joined(early: Any, late: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), early, late)
