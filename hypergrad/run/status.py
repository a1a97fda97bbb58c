"""How a run went: what its last values, losses, decays and words say, as one `Status`.

Invariant: what went wrong first is what is told, whichever adjoint ran.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.errors import BUFFER_FULL, DECAY, NON_FINITE, OK, RANGE, Status
from hypergrad.exact import PUBLIC_WORD_BITS, STEPS, WORD_BITS, Overflow
from hypergrad.optimizers.block import Floats
from hypergrad.optimizers.chain import PARAMS, Link
from hypergrad.optimizers.expand import Hypers, decay_interval, first_bad_decay, first_true, outside
from hypergrad.run.plan import Plan, RunSchedule, by_link, sources
from hypergrad.run.spec import Run
from hypergrad.run.step import State
from hypergrad.run.underflow import Underflow, underflow


Capacity = tuple[tuple[int | None, ...], ...]  # words of the buffer of each block and link; None: nothing is kept


class Outcome(NamedTuple):
    """What every adjoint returns: final floats of all links, losses [steps], how it went, and what was measured."""

    values: list[Floats]  # of each block
    losses: Array
    status: Status
    metrics: Any = ()  # scalars of each step: [steps]


class Noted(NamedTuple):
    """What steps in a row say of themselves."""

    step: Array  # int32 []: the first whose loss is no number, if there is one
    loss: Array  # that; else a finite one
    sizes: Array | None  # of the gradient, the largest of each part, as `hypergrad.run.underflow` takes them


def note(_: Run, losses: Array, sizes: Array | None, first: Any) -> Noted:
    """Of the steps from `first` on; sizes: [steps, parts of all blocks]."""
    bad = first_true(~jnp.isfinite(losses))
    return Noted(first + bad, losses[bad], None if sizes is None else sizes.max(axis=0))


def noted_in_all(_: Run, noted: Noted) -> Noted:
    """Of spans in order, with a leading axis."""
    bad = first_true(~jnp.isfinite(noted.loss))
    return Noted(noted.step[bad], noted.loss[bad], None if noted.sizes is None else noted.sizes.max(axis=0))


def nothing_kept(run: Run) -> Capacity:
    return tuple((None,) * len(block.chain) for block in run.blocks)


def places_of(run: Run) -> list[list[int]]:
    """Of each block and link, where its leaves begin in `Labels.places`."""
    result, before = [], 0
    for block in run.blocks:
        result.append([before + k * len(block.leaves) for k in range(len(block.chain))])
        before += len(block.chain) * len(block.leaves)
    return result


def assess(
    run: Run,
    values: list[Floats],
    h: list[Hypers],
    plan: Plan,
    end: State,
    noted: Noted,
    capacity: Capacity,
) -> Status:
    """The first thing that went wrong, or OK. Call it inside `jax.enable_x64(True)`."""
    full = _words(run, plan, capacity)
    found = [_decays(run, h), _values(run, end, noted), full]
    code, step, place, value = functools.reduce(_first, [x for x in found if x is not None])
    bits, ideal = _bits(run, values, h, plan)
    words = jnp.where(full.code == OK, most_words(plan), _enough(run, plan))
    words = -(-words * WORD_BITS // PUBLIC_WORD_BITS)
    small = Underflow(jnp.int32(-1), jnp.float32(0))
    if noted.sizes is not None:
        small = underflow(run, values, h, end, noted.sizes, places_of(run))
    as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    as_float = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    return Status(
        as_int(code), as_int(step), as_int(place), as_float(value), as_int(words), as_float(bits), as_float(ideal),
        run.labels.places, run.labels.limits, jnp.bool_(False), *small, jnp.float32(0), run.labels.approximate,
        0 if run.microbatches is None else run.microbatches.count,
    )  # fmt: skip


class Found(NamedTuple):
    """What one check says."""

    code: Any
    step: Any = -1
    place: Any = -1
    value: Any = 0.0


def _first(x: Found, y: Found) -> Found:
    """x if it found something, else y."""
    return Found(*(jnp.where(x.code != OK, a, b) for a, b in zip(x, y, strict=True)))


def _decays(run: Run, h: list[Hypers]) -> Found | None:
    """The first decay out of its interval; None if all were known, and looked at, when the program was built."""
    rows = [
        (link, index, known, own)
        for block, row, own in zip(run.blocks, run.shared, h, strict=True)
        for link, index, known in zip(block.chain, row, block.known, strict=True)
    ]
    asked: dict[int, tuple[int, Link, Hypers]] = {}  # of each schedule, the first link that has it
    for place, (link, index, known, own) in enumerate(rows, len(run.labels.places) - len(rows)):
        if index is not None and known is None:
            asked.setdefault(index, (place, link, own))
    if not asked:
        return None
    places, links, rates = zip(*asked.values(), strict=True)
    steps, values = map(jnp.stack, zip(*map(first_bad_decay, links, rates), strict=True))
    bad = outside(values, *np.transpose([decay_interval(link) for link in links]))
    first = first_true(bad)
    return Found(jnp.where(bad.any(), DECAY, OK), steps[first], jnp.asarray(places, jnp.int32)[first], values[first])


def _values(run: Run, end: State, noted: Noted) -> Found:
    """The first value that left its grid, or loss that is no number: at one step the value, as losses come of values."""
    records, entries, starts, leaves = [], [], [], []
    for block, slots, own in zip(run.blocks, end, places_of(run), strict=True):
        for link, place in zip(block.chain, own, strict=True):
            record, entry = slots[link.name].value.first_record()
            records.append(record)
            entries.append(entry)
            starts.append(place)
            leaves.append(block.ends)
    overflow = Overflow.of(jnp.stack(records), jnp.stack(entries))
    first = jax.lax.argmin(overflow.step, 0, jnp.int32)
    step, value, entry = (x[first] for x in overflow)
    ends = np.full((len(leaves), max(map(len, leaves))), np.iinfo(np.int32).max, np.int32)
    for row, of_block in zip(ends, leaves, strict=True):
        row[: len(of_block)] = of_block
    leaf = jnp.asarray(starts, jnp.int32)[first] + jnp.sum(entry >= jnp.asarray(ends)[first], dtype=jnp.int32)
    code = jnp.where(step == STEPS, OK, jnp.where(jnp.isfinite(value), RANGE, NON_FINITE))
    of_loss = ~jnp.isfinite(noted.loss) & (noted.step < step)
    return Found(
        jnp.where(of_loss, NON_FINITE, code),
        jnp.where(of_loss, noted.step, step),
        jnp.where(of_loss, -1, leaf),
        jnp.where(of_loss, noted.loss.astype(jnp.float32), value),
    )


def _words(run: Run, plan: Plan, capacity: Capacity) -> Found:
    full = jnp.bool_(False)
    for block, own, rooms in zip(run.blocks, by_link(run, plan), capacity, strict=True):
        for link, room in zip(block.chain, rooms, strict=True):
            if link.name in own and room is not None:
                full |= _most_of_a_segment(run, own[link.name]) > room
    return Found(jnp.where(full, BUFFER_FULL, OK))


def _most_of_a_segment(run: Run, schedule: RunSchedule) -> Array:
    """Words that leave between two steps before which stacks are empty."""
    if schedule.before is None:
        return schedule.end.words
    words = jnp.diff(jnp.append(schedule.before.words, schedule.end.words))
    return words[-len(run.emptied) :].max()


def _enough(run: Run, plan: Plan) -> Array:
    """Words for all steps of which the share of a segment holds those of the fullest."""
    fullest = [_most_of_a_segment(run, schedule) for schedule in plan]
    return -(-jnp.stack(fullest).max().astype(jnp.int64) * run.steps // run.longest) if fullest else jnp.int64(0)


def most_words(plan: Plan) -> Array:
    words = [schedule.end.words for schedule in plan]
    return jnp.stack(words).max() if words else jnp.int32(0)


def _bits(run: Run, values: list[Floats], h: list[Hypers], plan: Plan) -> tuple[Any, Any]:
    """Per parameter and step, over all that decays: kept (words, and what waits to become one), log2(1/rho)."""
    stored = ideal = jnp.float32(0)
    weights = [0.0] * len(plan)
    parameters = sum(values[j][PARAMS].size for j in run.parameters) or 1
    for block, x, row in zip(run.blocks, values, run.shared, strict=True):
        for link, index in zip(block.chain, row, strict=True):
            if index is not None:
                weights[index] += x[link.name].size / parameters
    for (block, link, own), weight, schedule in zip(sources(run, h), weights, plan, strict=True):
        rho, end = own[str(link.decay)].astype(jnp.float32), schedule.end
        stored += weight * (WORD_BITS * end.words + block.buffer(link).residual_bits(end)) / run.steps
        ideal += weight * jnp.mean(-jnp.log2(rho))
    return stored, ideal
