"""How a run went: what its last values, losses, decays and words say, as one `Status`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.errors import BUFFER_FULL, DECAY, NON_FINITE, OK, RANGE, Status
from hypergrad.exact import PUBLIC_WORD_BITS, STEPS, WORD_BITS, Schedule, first_lost
from hypergrad.loop.problem import Problem
from hypergrad.loop.small import Small, too_small
from hypergrad.loop.step import Hypers, Values
from hypergrad.optimizers.expand import first_bad_decay, first_true


class Outcome(NamedTuple):
    """What every adjoint returns: final floats of all links, losses [steps], and how it went."""

    values: dict[str, list[Array]]
    losses: Array
    status: Status


def assess(
    problem: Problem,
    values: Values,
    h: Hypers,
    plan: dict[str, list[Schedule]],
    end: Values,
    losses: Array,
    capacity: dict[str, int | None],
    sizes: Array | None = None,
) -> Status:
    """The first thing that went wrong, or OK. Call it inside `jax.enable_x64(True)`. end: the last integers of all links;
    sizes: of gradients, as `hypergrad.loop.small` takes them."""
    found = [_decays(problem, h), _values(problem, end, losses), _words(plan, capacity)]
    code, step, place, value = functools.reduce(_first, [x for x in found if x is not None])
    bits, ideal = _bits(problem, values, h, plan)
    words = -(-most_words(plan) * WORD_BITS // PUBLIC_WORD_BITS)
    nothing = Small(jnp.int32(-1), jnp.float32(0))
    small = nothing if sizes is None else too_small(problem, values, h, end, sizes)
    as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    as_float = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    return Status(
        as_int(code), as_int(step), as_int(place), as_float(value), words, as_float(bits), as_float(ideal),
        problem.labels.places, problem.labels.limits, jnp.bool_(False), *small, jnp.float32(0),
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


def _decays(problem: Problem, h: Hypers) -> Found | None:
    """The last decay out of its interval; None if all were known, and looked at, when the program was built."""
    found = None
    rows = zip(problem.links(h), problem.words, strict=True)
    places = [(link, known, hj) for (_, link, part), known in rows for hj in part]
    for index, (link, known, hj) in enumerate(places, len(problem.labels.places) - len(places)):
        if link.decay and known is None:
            bad, step, value = first_bad_decay(link, hj)
            found = _first(Found(jnp.where(bad, DECAY, OK), step, index, value), found or Found(OK))
    return found


def _values(problem: Problem, values: Values, losses: Array) -> Found:
    """The first value that left its grid, or loss that is no number: at one step the value, as losses come of values."""
    found, places, before = [], [], 0
    for rule in problem.rules:
        for link in rule.chain:
            found += [first_lost(z) for z in values[link.name]]
            places += [before + rule.layout.owner(j, found[j - len(rule.leaves)].entry) for j in rule.leaves]
            before += len(rule.layout.shapes)
    steps = jnp.stack([lost.step for lost in found])
    first = jax.lax.argmin(steps, 0, jnp.int32)
    step, value = steps[first], jnp.stack([lost.magnitude for lost in found])[first]
    code = jnp.where(step == STEPS, OK, jnp.where(jnp.isfinite(value), RANGE, NON_FINITE))
    bad = first_true(~jnp.isfinite(losses))
    of_loss = ~jnp.isfinite(losses[bad]) & (bad < step)
    return Found(
        jnp.where(of_loss, NON_FINITE, code),
        jnp.where(of_loss, bad, step),
        jnp.where(of_loss, -1, jnp.stack(places)[first]),
        jnp.where(of_loss, losses[bad].astype(jnp.float32), value),
    )


def _words(plan: dict[str, list[Schedule]], capacity: dict[str, int | None]) -> Found:
    full = jnp.bool_(False)
    for name, leaves in plan.items():
        if (limit := capacity[name]) is not None:
            full |= jnp.stack([s.words for s in leaves]).max() > limit
    return Found(jnp.where(full, BUFFER_FULL, OK))


def most_words(plan: dict[str, list[Schedule]]) -> Array:
    words = [s.words for leaves in plan.values() for s in leaves]
    return jnp.stack(words).max() if words else jnp.int32(0)


def _bits(problem: Problem, values: Values, h: Hypers, plan: dict[str, list[Schedule]]) -> tuple[Any, Any]:
    """Per parameter and step, over all that decays: kept (words, and what waits to become one), log2(1/rho)."""
    stored = ideal = jnp.float32(0)
    parameters = sum(x.size for x in values["params"]) or 1
    for _, link, part in problem.links(h):
        for j, s in enumerate(plan.get(link.name, ())):
            weight = values[link.name][j].size / parameters
            rho = part[j][link.decay].astype(jnp.float32)
            stored += weight * (WORD_BITS * s.words + s.held) / problem.steps
            ideal += weight * jnp.mean(-jnp.log2(rho))
    return stored, ideal
