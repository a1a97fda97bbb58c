"""The two passes of `Reversible`, run as what they are given allows: compiled and found again, from Python, or traced.

Invariant: whatever runs them, both compute the same gradients, or the reverse pass says that it did not find the start.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad import _programs as programs
from hypergrad._settings import own_settings
from hypergrad.adjoints import retry
from hypergrad.adjoints.backward import Pushed, Reversed, begin, finish
from hypergrad.adjoints.link import Cotangents
from hypergrad.adjoints.second_order import accumulator, chosen, merged
from hypergrad.adjoints.segments import Way, joined, replay, undo_segments
from hypergrad.adjoints.stored import Stacks, stack_segments, store_segments, undo_stacked, undo_stored
from hypergrad.adjoints.traced import batched_apart, once
from hypergrad.errors import Status
from hypergrad.exact import Mark
from hypergrad.optimizers.block import Floats, statistics_in
from hypergrad.optimizers.expand import concrete
from hypergrad.run.forward import Seen, forward, steps_of, steps_within
from hypergrad.run.plan import Plan, Span, marks, schedules
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Capacity, Noted, Outcome, assess, note, nothing_kept
from hypergrad.run.step import (
    State,
    capacity_of,
    final_values,
    initial_state,
    matches,
    matches_initial,
    with_words,
    without_words,
)
from hypergrad.run.stores import Words


class Wanted(NamedTuple):
    """What somebody differentiates, known when the program is built."""

    theta: tuple[bool, ...]  # of each leaf
    statistics: bool  # what they came to


class Ends(NamedTuple):
    """Where the reverse pass begins and what it must meet."""

    last: State
    middle: State | None  # before the last segment; None: the run is not cut
    kept: State | None  # before each of the others, stacked; None: these are not undone
    words: Words | Stacks | None  # of all segments, where they are stored elsewhere
    plan: Plan  # when buffers spill


def settled_driver(run: Run, *arrays: Any) -> Run:
    """The run with its driver decided, by whether these are known and nobody is tracing."""
    known = _known(arrays)
    if not known and run.store is not None:
        run = dataclasses.replace(run, traced=run.store.in_program)
    if run.driver == "either" and (known or run.store is None or run.traced):
        run = dataclasses.replace(run, driver="host" if known else "scan")
    if run.from_python and not known:
        twice = "" if run.source is None else " and hg.stacked"
        other = "hg.Reversible()" if run.store is not None else 'hg.Reversible(driver="scan")'
        cure = "" if run.source is not None else f", or take {other}"
        raise ValueError(
            'driver="host", buffer="gmpy2", buffer=hg.Disk(folder) and hg.host_batches run training from Python, which '
            f"cannot be traced by jax.jit or jax.vmap. Call it outside of them (hg.optimize(..., jit=False)){cure}. Nor can "
            f"it be differentiated a second time, as by jax.hessian: that takes hg.Unrolled(){twice}."
        )
    return run


def _known(arrays: Any) -> bool:
    return concrete((arrays, jnp.zeros(())))  # inside of jax.jit, what it makes is traced, whatever it is made of


def run_forward(run: Run, capacity: Capacity | None, inputs: Inputs) -> tuple[Outcome, Ends, Array | None]:
    """capacity: None to keep nothing of what decays lose, for a run that nobody reverses. Also the prints of batches."""
    run = settled_driver(run, inputs)
    if capacity is None:  # nothing is stored
        run = dataclasses.replace(run, store=None)
    with own_settings():
        if not _known(inputs):
            return once(batched_apart(_forward_pass, forward=True))(run, capacity, inputs)
        if not run.from_python:
            return programs.call(_forward_pass, (run, capacity), inputs)
        return _forward_pass(run, capacity, inputs)


def _forward_pass(run: Run, capacity: Capacity | None, inputs: Inputs) -> tuple[Outcome, Ends, Array | None]:
    plan, state = run.outside_loop(_begin, inputs.values, inputs.h, static=(capacity,))
    words: Words | Stacks | None = None
    middle = kept = None
    if run.store is not None and capacity is not None:
        store: Any = store_segments if run.from_python else stack_segments
        words, end, seen, noted = store(run, capacity, inputs, state, plan)
    else:
        kept, middle, end, seen, sizes = _in_segments(run, capacity, inputs, state, plan)
        noted = run.outside_loop(note, seen.losses, sizes, jnp.int32(0))
    arguments = inputs.values, inputs.h, plan, _integers(end), noted
    values, status = run.outside_loop(_outcome, *arguments, static=(capacity,))
    return Outcome(values, seen.losses, status, seen.metrics), Ends(end, middle, kept, words, plan), seen.batches


def _in_segments(
    run: Run, capacity: Capacity | None, inputs: Inputs, state: State, plan: Plan
) -> tuple[State | None, State | None, State, Seen, Array]:
    """(the states before the segments up to `Run.first`, the state there, and `forward` of all steps)."""
    if not run.first:
        return None, None, *forward(run, inputs, state, steps_of(run, inputs, [schedule.entries for schedule in plan]))
    count = run.segments[0] if run.segments else 1
    middle, kept, early = replay(run, inputs, plan, state, 0, count, run.first // count)
    last = middle if capacity is None else with_words(run, middle, capacity)
    end, *late = forward(run, inputs, last, steps_within(run, inputs, *_last_segment(run, plan)))
    return kept if run.segments else None, middle, end, *joined(early, tuple(late))


def _last_segment(run: Run, plan: Plan) -> tuple[list[Mark], Span]:
    return marks(plan, run.first // run.stride), Span(run.first, run.steps - run.first)


def _integers(state: State) -> State:
    """Without what decays have lost."""
    return [{name: slot._replace(digits=None) for name, slot in own.items()} for own in state]


def _begin(run: Run, capacity: Capacity | None, values: Any, h: Any) -> tuple[Any, State]:
    kept = nothing_kept(run) if capacity is None or run.first or run.store is not None else capacity
    return schedules(run, h), initial_state(run, values, kept)


def _outcome(
    run: Run, capacity: Capacity | None, values: Any, h: Any, plan: Any, end: State, noted: Noted
) -> tuple[list[Floats], Status]:
    status = assess(run, values, h, plan, end, noted, capacity or nothing_kept(run))
    return final_values(run, end), status


class Back(NamedTuple):
    """What a reverse pass comes to."""

    gradients: tuple[Any, Any, Any]  # of values, hyperparameters and theta
    found: (
        Array  # bool: of each block and link, whether the start was found again; and by the losses, the batches seen before
    )
    watched: dict[str, Any]  # what `Run.watch` asks for
    doubted: Array  # bool []: whether gradients had to be computed apart from their derivatives


def run_backward(run: Run, wanted: Wanted, *arguments: Any, again: Capacity | None = None) -> Back:
    """again: the words of the buffers, where the run was trained from Python."""
    run = settled_driver(run, arguments)
    with own_settings():
        if not _known(arguments):
            return once(batched_apart(_backward_traced, forward=False))(run, (wanted, again), *arguments)
        run = dataclasses.replace(run, asked=None)  # a program of its own gives them all
        if not run.from_python:
            return retry.known(run, lambda run: programs.call(_backward_pass, (run, wanted), *arguments))
        return retry.known(run, lambda run: _backward_pass(run, wanted, *arguments))


def _backward_traced(run: Run, static: tuple[Wanted, Capacity | None], *arguments: Any) -> Back:
    """What was trained from Python is trained again: inside of a program, a gradient has other bits than alone."""
    (wanted, again), (inputs, end, seen, dvalues, pushed) = static, arguments
    trained = jnp.bool_(True)
    if again is not None:
        outcome, end, _ = _forward_pass(run, again, inputs)
        seen, trained = seen._replace(losses=outcome.losses), outcome.status.ok
    attempt = lambda run, doubt: _backward_pass(run, wanted, inputs, end, seen, dvalues, pushed, doubt)  # noqa: E731
    back = retry.traced(run, attempt)
    return back._replace(found=back.found & trained)


def _backward_pass(
    run: Run,
    wanted: Wanted,
    inputs: Inputs,
    ends: Ends,
    seen: Seen,
    dvalues: list[Floats],
    pushed: Pushed,
    doubt: Array | None = None,
) -> Back:
    """doubt: as `begin` has it."""
    summed = tuple(w and not s for w, s in zip(wanted.theta, run.functions.theta.stepped, strict=True))
    zero = run.outside_loop(_begin_back, inputs, dvalues, static=(wanted, summed))
    consts, carry = begin(run, inputs, ends.last, zero, pushed, doubt)
    way = Way(run, wanted.theta, inputs, pushed, consts, seen, ends.plan, capacity_of(run, ends.last))
    met = None
    if isinstance(ends.words, Stacks):
        carry, of_steps = undo_stacked(way, ends.words, carry)
    elif ends.words is not None:
        carry, of_steps = undo_stored(way, ends.words, carry)
    elif run.first:
        carry, of_steps, met = _by_segments(way, ends, carry)
    else:
        carry, of_steps = way.undo(carry)
    back = finish(run, wanted.theta, inputs, zero, carry, of_steps[:2])
    without = back._replace(ct=back.ct._replace(h=[]), watched={})  # what passes through a program is there twice
    (dvalues, dtheta), found = run.outside_loop(_gradients, inputs, without, of_steps.same, met, static=(wanted,))
    return Back(
        (dvalues, back.ct.h, dtheta), found, back.watched, jnp.bool_(False) if back.doubted is None else back.doubted
    )


def _by_segments(way: Way, ends: Ends, carry: Any) -> tuple[Any, Any, Array]:
    """The last segment, from its end; then those before it, if they are to be undone. Also whether all states were met."""
    run = way.run
    before, span = _last_segment(run, way.plan)
    (state, *rest), found = way._replace(seen=span.of(way.seen)).undo_within(carry, before, span)
    assert ends.middle is not None
    met = matches(run, ends.middle, state)
    carry = (without_words(run, state), *rest)
    if run.segments:
        assert ends.kept is not None
        carry, early, met_early = undo_segments(way, run.segments, 0, run.first // run.segments[0], ends.kept, carry)
        found, met = joined(early, found), met & met_early
    return carry, found, met


def with_all_derivatives(run: Run, inputs: Inputs, end: State, plan: Plan, seen: Seen) -> Back:
    """The reverse pass from a known end, as if all that comes out had the cotangent 1 and all that goes in were wanted."""
    ones = jax.tree.map(jnp.ones_like, final_values(run, end))
    wanted = Wanted((True,) * len(inputs.theta), bool(run.statistics))
    return run_backward(
        run, wanted, inputs, Ends(end, None, None, None, plan), seen, ones, Pushed(jnp.ones_like(seen.losses))
    )


def _begin_back(run: Run, wanted: Wanted, summed: tuple[bool, ...], inputs: Inputs, dvalues: list[Floats]) -> Cotangents:
    """Of what comes out. summed: the leaves of theta whose cotangents add up over all steps."""
    followed = wanted.statistics or statistics_in(run.blocks)
    dz = [
        {name: d.astype(block.dtype) for name, d in own.items()} if block.of_parameters or followed else {}
        for block, own in zip(run.blocks, dvalues, strict=True)
    ]
    dtheta = [jnp.zeros(x.shape, accumulator(x)) for x in chosen(summed, inputs.theta)]
    return Cotangents(dz, [], dtheta)


def _gradients(
    run: Run, wanted: Wanted, inputs: Inputs, back: Reversed, same: Array, met: Array | None
) -> tuple[tuple[Any, Any], Array]:
    """Of values and theta; and `Back.found`. same: as `OfSteps` has it. met: of each block and link,
    whether the states between segments were."""
    if not run.undone:
        initial = matches_initial(run, inputs.values, back.start)
        met = initial if met is None else met & initial
    assert met is not None
    found = jnp.concatenate([met, same.all(0)])
    whole: list[Floats] = [{} for _ in back.ct.z] if run.undone else back.ct.z  # not of what came before
    of_each = zip(inputs.values, whole, strict=True)
    dvalues = [{k: dz[k].astype(x.dtype) if dz else jnp.zeros_like(x) for k, x in own.items()} for own, dz in of_each]
    dtheta = merged(wanted.theta, back.ct.theta, jax.tree.map(jnp.zeros_like, inputs.theta))
    dtheta = [d.astype(x.dtype) for d, x in zip(dtheta, inputs.theta, strict=True)]
    return (dvalues, dtheta), found
