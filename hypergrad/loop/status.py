"""How a run went: what its magnitudes, losses, decays and words say, as one `Status`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hypergrad.errors import BUFFER_FULL, DECAY, NON_FINITE, OK, RANGE, Status
from hypergrad.exact import PUBLIC_WORD_BITS, WORD_BITS, Schedule, is_nan_mark
from hypergrad.loop.problem import Problem
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
    magnitudes: Array,
    losses: Array,
    capacity: dict[str, int | None],
) -> Status:
    """The first thing that went wrong, or OK. Call it inside `jax.enable_x64(True)`."""
    codes = [_decays(problem, h), _values(problem, magnitudes, losses), _words(plan, capacity)]
    code, step, place, value = codes[-1]
    for c, s, p, v in reversed(codes[:-1]):
        code, step = jnp.where(c != OK, c, code), jnp.where(c != OK, s, step)
        place, value = jnp.where(c != OK, p, place), jnp.where(c != OK, v, value)
    bits, ideal = _bits(problem, values, h, plan)
    words = -(-most_words(plan) * WORD_BITS // PUBLIC_WORD_BITS)
    as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    as_float = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    return Status(
        as_int(code), as_int(step), as_int(place), as_float(value), words, as_float(bits), as_float(ideal),
        problem.labels.places, problem.labels.limits,
    )  # fmt: skip


def _decays(problem: Problem, h: Hypers) -> tuple[Any, Any, Any, Any]:
    code, step, place, value = jnp.int32(OK), jnp.int32(-1), jnp.int32(-1), jnp.float32(0)
    places = ((link, hj) for _, link, part in problem.links(h) for hj in part)
    for index, (link, hj) in enumerate(places, len(problem.labels.limits)):
        if link.decay:
            bad, s, v = first_bad_decay(link, hj)
            code, step = jnp.where(bad, DECAY, code), jnp.where(bad, s, step)
            place, value = jnp.where(bad, index, place), jnp.where(bad, v, value)
    return code, step, place, value


def _values(problem: Problem, magnitudes: Array, losses: Array) -> tuple[Any, Any, Any, Any]:
    # Row 0 is the start, which is reported as step -1; row t + 1 is what step t left.
    # The last column is that of the losses, which may have any size.
    limits = jnp.asarray((*problem.labels.limits, 1), jnp.float32)
    infinite = jnp.append(jnp.float32(0), (~jnp.isfinite(losses)).astype(jnp.float32))
    shown = jnp.concatenate([magnitudes, infinite[:, None]], axis=1)
    first = first_true(~(shown < limits).reshape(-1))
    row, column = first // limits.size, first % limits.size
    value, limit = shown.reshape(-1)[first], limits[column]
    of_loss = column == limits.size - 1
    code = jnp.where(of_loss | is_nan_mark(value, limit), NON_FINITE, RANGE)
    return jnp.where(value < limit, OK, code), row - 1, jnp.where(of_loss, -1, column), value


def _words(plan: dict[str, list[Schedule]], capacity: dict[str, int | None]) -> tuple[Any, Any, Any, Any]:
    full = jnp.bool_(False)
    for name, leaves in plan.items():
        if (limit := capacity[name]) is not None:
            full |= jnp.stack([s.words for s in leaves]).max() > limit
    return jnp.where(full, BUFFER_FULL, OK), jnp.int32(-1), jnp.int32(-1), jnp.float32(0)


def most_words(plan: dict[str, list[Schedule]]) -> Array:
    words = [s.words for leaves in plan.values() for s in leaves]
    return jnp.stack(words).max() if words else jnp.int32(0)


def _bits(problem: Problem, values: Values, h: Hypers, plan: dict[str, list[Schedule]]) -> tuple[Any, Any]:
    """Per parameter and step, over all that decays: kept (words, and what waits to become one), log2(1/rho)."""
    stored = ideal = jnp.float32(0)
    parameters = sum(x.size for x in values["params"])
    for _, link, part in problem.links(h):
        for j, s in enumerate(plan.get(link.name, ())):
            weight = values[link.name][j].size / parameters
            rho = part[j][link.decay].astype(jnp.float32)
            stored += weight * (WORD_BITS * s.words + s.held) / problem.steps
            ideal += weight * jnp.mean(-jnp.log2(rho))
    return stored, ideal
