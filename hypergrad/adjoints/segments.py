"""A run cut into segments: states are kept between them, and words of one at a time.

Invariant: each segment is replayed from its state to the bits that the next began with, and reversed to its own; what fails
of either is in the certificate.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.adjoints.backward import Pushed, undo
from hypergrad.exact import Mark, all_of
from hypergrad.optimizers.expand import Hypers
from hypergrad.run.forward import Seen, forward, same_losses, steps_of, steps_within
from hypergrad.run.plan import Plan, Span, marks
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Capacity
from hypergrad.run.step import State, matches, with_words, without_words


class Way(NamedTuple):
    """What all segments share on the way back."""

    run: Run
    wanted: tuple[bool, ...]
    inputs: Inputs
    pushed: Pushed
    consts: Any  # as `begin` gives them
    seen: Seen  # on the way out
    plan: Plan = []  # noqa: RUF012 (never changed)
    capacity: Capacity = ()

    def undo(self, carry: Any) -> tuple[Any, "OfSteps"]:
        """All steps of a run that is in one piece."""
        xs = steps_of(self.run, self.inputs, [schedule.entries for schedule in self.plan], self.pushed)
        return self._undo(carry, xs)

    def undo_within(self, carry: Any, before: list[Mark], span: Span) -> tuple[Any, "OfSteps"]:
        """Steps in a row. before: where schedules stand; `Way.seen` is of these steps alone."""
        carry, found = self._undo(carry, steps_within(self.run, self.inputs, before, span, self.pushed))
        dh, dtheta = found.cotangents
        return carry, found._replace(cotangents=(self.run.outside_loop(_added_up, dh), dtheta))

    def _undo(self, carry: Any, xs: Any) -> tuple[Any, "OfSteps"]:
        carry, (cotangents, again, watched) = undo(self.run, self.wanted, self.consts, carry, xs)
        return carry, OfSteps(cotangents, watched, self.run.outside_loop(_agree, self.seen, again))


class OfSteps(NamedTuple):
    """What the way back finds of steps in a row."""

    cotangents: Any  # of what has an axis of steps
    watched: dict[str, Any]
    same: Array  # bool [segments, 2]: whether the losses, and the batches, were those of the way out


def _added_up(run: Run, dh: list[Hypers]) -> list[Hypers]:
    """Of what blocks have in common the whole is that of the first, and the others have none: for many blocks, a cotangent
    of one rate for each step is more than all else.

    In the order in which JAX adds up what a run in one piece gives for one array: the same bits.
    """
    totals: dict[int, Array] = {}
    places: dict[int, tuple[int, str]] = {}
    result = [dict(own) for own in dh]
    for j, (own, common) in enumerate(zip(dh, run.common, strict=True)):
        for key, number in sorted(common):
            if key in own:
                totals[number] = totals[number] + own[key] if number in totals else own[key]
                places.setdefault(number, (j, key))
                del result[j][key]
    for number, (j, key) in places.items():
        result[j][key] = totals[number]
    return result


def _agree(run: Run, seen: Seen, again: Seen) -> Array:
    """A batch may differ where no gradient does."""
    batches = jnp.bool_(True)
    if seen.batches is not None and again.batches is not None:
        batches = all_of(jnp.equal(seen.batches, again.batches))
    return jnp.stack([all_of(same_losses(seen.losses, again.losses, run.isolate)), batches])[None]


def replay(
    run: Run, inputs: Inputs, plan: Plan, state: State, first: Any, count: int, length: int
) -> tuple[State, State, tuple[Seen, Array]]:
    """`forward` over `count` segments of `length` steps, without words: (the end, the state before each, what was seen)."""

    def one(state: State, k: Array) -> tuple[State, tuple[State, tuple[Seen, Array]]]:
        span = Span(first + k * length, length)
        xs = steps_within(run, inputs, marks(plan, span.first // run.stride), span)
        end, seen, sizes = forward(run, inputs, state, xs)
        return end, (state, (seen, sizes))

    end, (starts, seen) = jax.lax.scan(one, state, jnp.arange(count, dtype=jnp.int32))
    return end, starts, step_by_step(seen)


def undo_segments(
    way: Way, segments: tuple[int, ...], first: Any, length: int, starts: State, carry: Any
) -> tuple[Any, OfSteps, Array]:
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
        _, starts, _ = replay(run, way.inputs, way.plan, start, first, segments[0], length)
        return undo_segments(way, segments, first, length, starts, carry)
    span, before = Span(first, length), marks(way.plan, first // run.stride)
    xs = steps_within(run, way.inputs, before, span)
    end = forward(run, way.inputs, with_words(run, start, way.capacity), xs)[0]
    (found_again, *rest), found = way._replace(seen=span.of(way.seen)).undo_within((end, *rest), before, span)
    met = matches(run, end, state) & matches(run, start, found_again)
    return (without_words(run, found_again), *rest), found, met


def step_by_step(seen: Any) -> Any:
    """[segments, steps, ...] -> [segments steps, ...]"""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)


def joined(early: Any, late: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), early, late)
