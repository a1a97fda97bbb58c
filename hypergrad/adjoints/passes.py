"""The two passes of `Reversible`, run as what they are given allows: compiled and found again, from Python, or traced.

Invariant: whatever runs them, both compute the same gradients, or the reverse pass says that it did not find the start.
"""

import dataclasses
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _programs as programs
from hypergrad._report import current_ledger
from hypergrad._settings import own_settings
from hypergrad.adjoints import retry
from hypergrad.adjoints.backward import Reversed, reverse
from hypergrad.adjoints.link import Cotangents
from hypergrad.adjoints.second_order import accumulator, chosen, merged
from hypergrad.adjoints.traced import batched_apart, once
from hypergrad.exact import PUBLIC_WORD_BITS, WORD_BITS, all_of
from hypergrad.optimizers.block import Block, Floats, statistics_in
from hypergrad.optimizers.chain import Link
from hypergrad.optimizers.expand import Hypers, concrete, link_numerators
from hypergrad.run import offload
from hypergrad.run.forward import Seen, forward
from hypergrad.run.spec import Inputs, Run, by_link, schedules
from hypergrad.run.status import Capacity, Outcome, Plan, assess, nothing_kept
from hypergrad.run.step import State, final_values, initial_state, matches, matches_initial


class Wanted(NamedTuple):
    """What somebody differentiates, known when the program is built."""

    theta: tuple[bool, ...]  # of each leaf
    statistics: bool  # what they came to


class Ends(NamedTuple):
    """Where the reverse pass begins and what it must meet."""

    last: State
    first: State | None  # None: what the run began with
    plan: Plan  # when buffers spill


def settled_driver(run: Run, *arrays: Any) -> Run:
    """The run with its driver decided, by whether these are known and nobody is tracing."""
    known = _known(arrays)
    if run.driver == "either":
        return dataclasses.replace(run, driver="host" if known else "scan")
    if run.driver != "scan" and not known:
        cure = "" if run.source is not None else ', or take hg.Reversible(driver="scan")'
        raise ValueError(
            'driver="host", buffer="host" or "gmpy2", and hg.host_batches run training from Python, which cannot be traced '
            f"by jax.jit or jax.vmap. Call it outside of them (hg.optimize(..., jit=False)){cure}."
        )
    return run


def _known(arrays: Any) -> bool:
    return concrete((arrays, jnp.zeros(())))  # inside of jax.jit, what it makes is traced, whatever it is made of


def run_forward(run: Run, capacity: Capacity | None, inputs: Inputs) -> tuple[Outcome, Ends, Array | None]:
    """capacity: None to keep nothing of what decays lose, for a run that nobody reverses. Also the prints of batches."""
    run = settled_driver(run, inputs)
    with own_settings():
        if not _known(inputs):
            return once(batched_apart(_forward_pass, forward=True))(run, capacity, inputs)
        if run.driver == "scan":
            return programs.call(_forward_pass, (run, capacity), inputs)
        return _forward_pass(run, capacity, inputs)


def _forward_pass(run: Run, capacity: Capacity | None, inputs: Inputs) -> tuple[Outcome, Ends, Array | None]:
    plan, state = run.outside_loop(_begin, inputs.values, inputs.h, static=(capacity,))
    middle = None
    if run.offload and capacity is not None:
        own = by_link(run, plan)
        stacks, capacity = offload.empty_stacks(own), None
        entries = [schedule.entries.unslotted() for schedule in plan]
        end, seen, sizes = forward(run, inputs, state, entries, offload.offload(own, stacks))
        integers = _integers(end)
        end = offload.detached(end, own, stacks)
    else:
        middle, end, seen, sizes = _in_two(run, inputs, state, [schedule.entries for schedule in plan])
        integers = _integers(end)
    outcome = run.outside_loop(_outcome, inputs.values, inputs.h, plan, integers, seen.losses, sizes, static=(capacity,))
    return outcome, Ends(end, middle, plan), seen.batches


def _in_two(run: Run, inputs: Inputs, state: State, entries: Any) -> tuple[State | None, State, Seen, Array]:
    """`forward`, and the state before `Run.first` where that is not the first step."""
    if not run.first:
        return None, *forward(run, inputs, state, entries)
    middle, *early = forward(run, inputs, state, entries, span=(0, run.first))
    end, *late = forward(run, inputs, middle, entries, span=(run.first, run.steps))
    seen, sizes = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), early, late)
    return middle, end, seen, sizes


def _integers(state: State) -> State:
    """Without what decays have lost."""
    return [{name: slot._replace(digits=None) for name, slot in own.items()} for own in state]


def _begin(run: Run, capacity: Capacity | None, values: Any, h: Any) -> tuple[Any, State]:
    return schedules(run, h), initial_state(run, values, capacity or nothing_kept(run))


def _outcome(
    run: Run, capacity: Capacity | None, values: Any, h: Any, plan: Any, end: State, losses: Array, sizes: Array
) -> Outcome:
    status = assess(run, values, h, plan, end, losses, capacity or nothing_kept(run), sizes)
    return Outcome(final_values(run, end), losses, status)


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
        if run.driver == "scan":
            return retry.known(run, lambda run: programs.call(_backward_pass, (run, wanted), *arguments))
        return retry.known(run, lambda run: _backward_pass(run, wanted, *arguments))


def _backward_traced(run: Run, static: tuple[Wanted, Capacity | None], *arguments: Any) -> Back:
    """What was trained from Python is trained again: inside of a program, a gradient has other bits than alone."""
    (wanted, again), (inputs, end, seen, dvalues, dlosses) = static, arguments
    trained = jnp.bool_(True)
    if again is not None:
        outcome, end, _ = _forward_pass(run, again, inputs)
        seen, trained = seen._replace(losses=outcome.losses), outcome.status.ok
    attempt = lambda run, doubt: _backward_pass(run, wanted, inputs, end, seen, dvalues, dlosses, doubt)  # noqa: E731
    back = retry.traced(run, attempt)
    return back._replace(found=back.found & trained)


def _backward_pass(
    run: Run,
    wanted: Wanted,
    inputs: Inputs,
    ends: Ends,
    seen: Seen,
    dvalues: list[Floats],
    dlosses: Any,
    doubt: Array | None = None,
) -> Back:
    """doubt: as `reverse` has it."""
    summed = tuple(w and not s for w, s in zip(wanted.theta, run.functions.theta.stepped, strict=True))
    zero = run.outside_loop(_begin_back, inputs, dvalues, static=(wanted, summed))
    entries, pause, end = [schedule.entries for schedule in ends.plan], None, ends.last
    if run.offload:
        end, stacks = offload.attached(end)
        pause = offload.fetch(by_link(run, ends.plan), stacks)
        entries = [entry.unslotted() for entry in entries]
    span = (run.first, run.steps) if run.first else None
    back = reverse(run, inputs, end, entries, zero, dlosses, wanted.theta, pause, doubt, span)
    gradients, found = run.outside_loop(_gradients, inputs, back, seen, ends.first, static=(wanted,))
    return Back(gradients, found, back.watched, jnp.bool_(False) if back.doubted is None else back.doubted)


def with_all_derivatives(run: Run, inputs: Inputs, end: State, plan: Plan, seen: Seen) -> Back:
    """The reverse pass from a known end, as if all that comes out had the cotangent 1 and all that goes in were wanted."""
    ones = jax.tree.map(jnp.ones_like, final_values(run, end))
    wanted = Wanted((True,) * len(inputs.theta), bool(run.statistics))
    return run_backward(run, wanted, inputs, Ends(end, None, plan), seen, ones, jnp.ones_like(seen.losses))


def _begin_back(run: Run, wanted: Wanted, summed: tuple[bool, ...], inputs: Inputs, dvalues: list[Floats]) -> Cotangents:
    """Of what comes out. summed: the leaves of theta whose cotangents add up over all steps."""
    followed = wanted.statistics or statistics_in(run.blocks)
    dz = [
        {name: d.astype(block.dtype) for name, d in own.items()} if block.of_parameters or followed else {}
        for block, own in zip(run.blocks, dvalues, strict=True)
    ]
    dtheta = [jnp.zeros(x.shape, accumulator(x)) for x in chosen(summed, inputs.theta)]
    return Cotangents(dz, jax.tree.map(jnp.zeros_like, inputs.h), dtheta)


def _gradients(
    run: Run, wanted: Wanted, inputs: Inputs, back: Reversed, seen: Seen, first: State | None
) -> tuple[tuple[Any, Any, Any], Array]:
    """Of values, hyperparameters and theta; and `Back.found`. first: the state to be met; None: what the run began with."""
    losses = all_of(_same(seen.losses[run.first :], back.seen.losses, run.isolate))
    batches = jnp.bool_(True)
    if seen.batches is not None and back.seen.batches is not None:
        batches = all_of(jnp.equal(seen.batches[run.first :], back.seen.batches))
    met = matches_initial(run, inputs.values, back.start) if first is None else matches(run, first, back.start)
    found = jnp.concatenate([met, jnp.stack([losses, batches])])
    known: list[Floats] = (
        [{} for _ in back.ct.z] if first is not None else back.ct.z
    )  # what came before is not differentiated
    of_each = zip(inputs.values, known, strict=True)
    dvalues = [{k: dz[k].astype(x.dtype) if dz else jnp.zeros_like(x) for k, x in own.items()} for own, dz in of_each]
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


def capacities(run: Run, h: list[Hypers], capacity: int | None) -> Capacity:
    """Words of the buffer per parameter to allocate, for each link that decays."""
    own = PUBLIC_WORD_BITS // WORD_BITS
    at_least = own * ledger.capacity if (ledger := current_ledger()) else 0
    guessed: dict[str, int] = {}  # bytes, by link

    def room(block: Block, link: Link, known: int | None, h: Hypers) -> int | None:
        if not link.decay:
            return None
        if run.offload:
            return offload.CAPACITY
        if capacity is not None:
            return own * capacity
        if known is not None:
            return known
        if concrete(h):
            return block.buffer(link).words_needed(np.asarray(link_numerators(link, h, run.steps)), link.denominator)
        words = max(math.ceil(run.steps * link.bits_a_step / WORD_BITS), at_least)  # until told
        guessed[link.name] = guessed.get(link.name, 0) + words * math.prod(block.shape) * WORD_BITS // 8
        return words

    found = tuple(
        tuple(room(block, link, known, hj) for link, known in zip(block.chain, block.words, strict=True))
        for block, hj in zip(run.blocks, h, strict=True)
    )
    if sum(guessed.values()) > MUCH:
        _say_how_much(run, guessed)
    return found


MUCH = 2**30  # bytes


def _say_how_much(run: Run, guessed: dict[str, int]) -> None:
    parts = ", ".join(f"{size / 2**30:.1f} GiB for `{name}`" for name, size in guessed.items())
    warnings.warn(
        f"decays are traced, so nobody knows yet how many digits {run.steps} steps of them lose. Room for many is set "
        f"aside: {parts}. Decays that are Python numbers take what they lose and no more. Else pass "
        "hg.Reversible(capacity=...), in 32-bit words a parameter, by what `Trained.buffer_words` of a shorter run says, in "
        "proportion to the steps; too few is an error that says how many. Outside of jax.jit, "
        'hg.Reversible(buffer="host") keeps digits in host memory.',
        stacklevel=2,
    )
