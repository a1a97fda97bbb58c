"""The two passes of `Reversible`, run as what they are given allows: compiled and found again, from Python, or traced.

Invariant: whatever runs them, both compute the same gradients, or the reverse pass says that it did not find the start.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _programs as programs
from hypergrad._report import current_ledger
from hypergrad._settings import own_settings
from hypergrad.adjoints import apart
from hypergrad.adjoints.backward import Reversed, reverse
from hypergrad.adjoints.link import Cotangents
from hypergrad.adjoints.second_order import accumulator, chosen, merged
from hypergrad.adjoints.traced import batched_apart, once
from hypergrad.exact import PUBLIC_WORD_BITS, WORD_BITS, all_of
from hypergrad.loop import shelf
from hypergrad.loop.forward import Seen, forward
from hypergrad.loop.problem import Inputs, Problem, begun, intact, schedules, turns_of
from hypergrad.loop.status import Outcome, assess
from hypergrad.loop.step import Exact
from hypergrad.optimizers.expand import concrete, link_numerators


Capacity = tuple[tuple[str, int], ...] | None  # words of the buffer of each link that decays; None: nothing is kept


class Wanted(NamedTuple):
    """What somebody differentiates, known when the program is built."""

    theta: tuple[bool, ...]  # of each leaf
    statistics: bool  # what they came to


def settled_driver(problem: Problem, *arrays: Any) -> Problem:
    """The problem with its driver decided, by whether these are known and nobody is tracing."""
    known = _known(arrays)
    if problem.driver == "either":
        return dataclasses.replace(problem, driver="host" if known else "scan")
    if problem.driver != "scan" and not known:
        cure = "" if problem.source is not None else ', or take hg.Reversible(driver="scan")'
        raise ValueError(
            'driver="host", buffer="host" or "gmpy2", and hg.host_batches run training from Python, which cannot be traced '
            f"by jax.jit or jax.vmap. Call it outside of them (hg.optimize(..., jit=False)){cure}."
        )
    return problem


def _known(arrays: Any) -> bool:
    return concrete((arrays, jnp.zeros(())))  # inside of jax.jit, what it makes is traced, whatever it is made of


def run_forward(problem: Problem, capacity: Capacity, inputs: Inputs) -> tuple[Outcome, Exact, Array | None]:
    problem = settled_driver(problem, inputs)
    with own_settings():
        if not _known(inputs):
            return once(batched_apart(_forward_pass, forward=True))(problem, capacity, inputs)
        if problem.driver == "scan":
            return programs.call(_forward_pass, (problem, capacity), inputs)
        return _forward_pass(problem, capacity, inputs)


def _forward_pass(problem: Problem, capacity: Capacity, inputs: Inputs) -> tuple[Outcome, Exact, Array | None]:
    """Also the prints of batches."""
    plan, state = problem.beside(_begin, inputs.values, inputs.h, static=(capacity,))
    if problem.shelved and capacity is not None:
        shelves = {name: [shelf.Shelf() for _ in leaves] for name, leaves in plan.items()}
        pause, capacity = shelf.keep(plan, shelves), None
        end, seen, sizes = forward(problem, inputs, state, shelf.unslotted(turns_of(plan)), pause)
        end = shelf.shelved(end, plan, shelves)
    else:
        end, seen, sizes = forward(problem, inputs, state, turns_of(plan))
    outcome = problem.beside(_outcome, inputs.values, inputs.h, plan, end.z, seen.losses, sizes, static=(capacity,))
    return outcome, end, seen.batches


def _begin(problem: Problem, capacity: Capacity, values: Any, h: Any) -> tuple[Any, Exact]:
    return schedules(problem, h), begun(problem, values, _words(problem, capacity))


def _outcome(
    problem: Problem, capacity: Any, values: Any, h: Any, plan: Any, z: Any, losses: Array, sizes: Array
) -> Outcome:
    status = assess(problem, values, h, plan, z, losses, _words(problem, capacity), sizes)
    return Outcome({link.name: rule.decoded(z, link) for rule, link, _ in problem.links(h)}, losses, status)


def _words(problem: Problem, capacity: Capacity) -> dict[str, int | None]:
    return {**{link.name: None for rule in problem.rules for link in rule.chain}, **dict(capacity or ())}


class Back(NamedTuple):
    """What a reverse pass comes to."""

    gradients: tuple[Any, Any, Any]  # of values, hyperparameters and theta
    found: Array  # bool [places + 2]: whether the start was found again, by the losses and by the batches seen before
    watched: dict[str, Any]  # what `Problem.watch` asks for
    doubted: Array  # bool []: whether gradients had to be computed apart from their derivatives


def run_backward(problem: Problem, wanted: Wanted, *arguments: Any, again: Capacity = None) -> Back:
    """again: the words of the buffers, where the run was trained from Python."""
    problem = settled_driver(problem, arguments)
    with own_settings():
        if not _known(arguments):
            return once(batched_apart(_backward_traced, forward=False))(problem, (wanted, again), *arguments)
        if problem.driver == "scan":
            return apart.known(problem, lambda p: programs.call(_backward_pass, (p, wanted), *arguments))
        return apart.known(problem, lambda p: _backward_pass(p, wanted, *arguments))


def _backward_traced(problem: Problem, static: tuple[Wanted, Capacity], *arguments: Any) -> Back:
    """What was trained from Python is trained again: inside of a program, a gradient has other bits than alone."""
    (wanted, again), (inputs, end, seen, dvalues, dlosses) = static, arguments
    trained = jnp.bool_(True)
    if again is not None:
        outcome, end, _ = _forward_pass(problem, again, inputs)
        seen, trained = seen._replace(losses=outcome.losses), outcome.status.ok
    run = lambda p, doubt: _backward_pass(p, wanted, inputs, end, seen, dvalues, dlosses, doubt)  # noqa: E731
    back = apart.traced(problem, run)
    return back._replace(found=back.found & trained)


def _backward_pass(
    problem: Problem,
    wanted: Wanted,
    inputs: Inputs,
    end: Exact,
    seen: Seen,
    dvalues: Any,
    dlosses: Any,
    doubt: Array | None = None,
) -> Back:
    """doubt: as `reverse` has it."""
    plan, zero = problem.beside(_begin_back, inputs, dvalues, static=(wanted,))
    turns, pause = turns_of(plan), None
    if problem.shelved:
        end, shelves = shelf.unshelved(end)
        turns, pause = shelf.unslotted(turns), shelf.bring(plan, shelves)
    back = reverse(problem, inputs, end, turns, zero, dlosses, wanted.theta, pause, doubt)
    gradients, found = problem.beside(_gradients, inputs, back, seen, static=(wanted,))
    return Back(gradients, found, back.watched, jnp.bool_(False) if back.doubted is None else back.doubted)


def with_all_derivatives(problem: Problem, inputs: Inputs, end: Exact, seen: Seen) -> Back:
    """The reverse pass from a known end, as if all that comes out had the cotangent 1 and all that goes in were wanted."""
    floats = {link.name: rule.decoded(end.z, link) for rule, link, _ in problem.links(inputs.h)}
    ones = jax.tree.map(jnp.ones_like, floats)
    wanted = Wanted((True,) * len(inputs.theta), bool(problem.statistics))
    return run_backward(problem, wanted, inputs, end, seen, ones, jnp.ones_like(seen.losses))


def _begin_back(problem: Problem, wanted: Wanted, inputs: Inputs, dvalues: Any) -> tuple[Any, Cotangents]:
    """When buffers spill, and the cotangents of what comes out."""
    dz = {}
    for rule in problem.rules if wanted.statistics else (problem.rule,):
        for link in rule.chain:
            dz[link.name] = [d.astype(t) for d, t in zip(dvalues[link.name], rule.dtypes, strict=True)]
    dtheta = [jnp.zeros(x.shape, accumulator(x)) for x in chosen(wanted.theta, inputs.theta)]
    dh = [{k: jnp.zeros_like(x) for k, x in hj.items()} for hj in inputs.h]
    return schedules(problem, inputs.h), Cotangents(dz, dh, dtheta)


def _gradients(
    problem: Problem, wanted: Wanted, inputs: Inputs, back: Reversed, seen: Seen
) -> tuple[tuple[Any, Any, Any], Array]:
    """Of values, hyperparameters and theta; and `Back.found`."""
    losses = all_of(_same(seen.losses, back.seen.losses, problem.rule.isolate))
    batches = jnp.bool_(True)
    if seen.batches is not None and back.seen.batches is not None:
        batches = all_of(jnp.equal(seen.batches, back.seen.batches))
    found = jnp.concatenate([intact(problem, inputs.values, back.start), jnp.stack([losses, batches])])
    dvalues = {**jax.tree.map(jnp.zeros_like, inputs.values), **back.ct.z}
    dvalues = jax.tree.map(lambda d, x: d.astype(x.dtype), dvalues, inputs.values)
    dtheta = merged(wanted.theta, back.ct.theta, jax.tree.map(jnp.zeros_like, inputs.theta))
    dtheta = [d.astype(x.dtype) for d, x in zip(dtheta, inputs.theta, strict=True)]
    return (dvalues, back.ct.h, dtheta), found


def _same(losses: Array, again: Array, exactly: bool) -> Array:
    """Whether both passes saw the same losses: bit for bit, or where they come from beside a derivative half of their
    digits.

    A batch may differ where the gradient does not.
    """
    if exactly:
        return jnp.equal(losses, again)
    tolerance = float(jnp.finfo(losses.dtype).eps) ** 0.5
    return jnp.abs(losses - again) <= tolerance * jnp.maximum(jnp.abs(losses), jnp.abs(again))


def capacities(problem: Problem, h: Any, capacity: int | None) -> Capacity:
    """Words of the buffer per parameter to allocate, for each link that decays."""
    own = PUBLIC_WORD_BITS // WORD_BITS
    at_least = own * ledger.capacity if (ledger := current_ledger()) else 0
    guess = lambda link: max(math.ceil(problem.steps * link.bits_a_step / WORD_BITS), at_least)  # noqa: E731  until told
    result = {}
    for (rule, link, part), known in zip(problem.links(h), problem.words, strict=True):
        if link.decay and problem.shelved:
            result[link.name] = shelf.CAPACITY
        elif link.decay and capacity is not None:
            result[link.name] = own * capacity
        elif link.decay and known is not None:
            result[link.name] = known
        elif link.decay:
            exact = (
                [_exact_words(problem, link, *row) for row in zip(rule.kept(link), part, strict=True)] if concrete(h) else []
            )
            result[link.name] = max(exact, default=guess(link))
    return tuple(sorted(result.items()))


def _exact_words(problem: Problem, link: Any, keep: Any, hj: Any) -> int:
    return keep.words_needed(np.asarray(link_numerators(link, hj, problem.steps)), link.denominator)
