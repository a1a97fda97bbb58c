"""`check_reversal`: forward and back, without derivatives and with them, and where two passes first part."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _programs as programs
from hypergrad._meshes import in_automatic_axes
from hypergrad._problem import Problem
from hypergrad._set_up import set_up
from hypergrad._settings import own_settings
from hypergrad.adjoints import Reversible
from hypergrad.adjoints.passes import settled_driver, with_all_derivatives
from hypergrad.adjoints.retry import remembered
from hypergrad.adjoints.second_order import check_symmetric
from hypergrad.errors import OK, Status
from hypergrad.exact import all_of
from hypergrad.optimizers.chain import PARAMS
from hypergrad.run.fingerprints import print_of, state_prints
from hypergrad.run.forward import Seen, same_losses, steps_of, theta_of_step, train_step
from hypergrad.run.per_step import join_steps, split
from hypergrad.run.plan import by_link, schedules
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Capacity, assess, most_words, note
from hypergrad.run.step import Signals, State, final_values, initial_state, matches_initial, unstep


class Mismatch(NamedTuple):
    """Where a reverse pass first differed from the forward pass."""

    step: int  # the state before this step was not recovered
    place: str  # link and leaf, e.g. "velocity['w']"
    # "batch": `batches` gave another batch the second time; "gradient": the same batch, a gradient with other bits;
    # "derivative": the gradient has other bits beside its derivative alone, which hg.Reversible(isolate=True) prevents;
    # "loss": all came back, but another loss was seen on the way
    cause: str


class Certificate(NamedTuple):
    """What `check_reversal` found."""

    exact: bool  # every link back on its initial bits, every buffer empty, the same losses: with derivatives and without
    first_mismatch: Mismatch | None
    bits_per_parameter_step: float  # lost by decays and kept: in words, and what waits to become one
    ideal_bits_per_parameter_step: float  # mean of log2(1/decay)
    max_abs: float  # largest magnitude of any link at any step
    buffer_words: int  # 32-bit words per parameter spilled
    content_bits_per_parameter_step: float  # of the above, what is in buffers: words, and the mean length of heads
    isolated: bool = False  # whether gradients had to be compiled apart from their derivatives: one more a step


@in_automatic_axes
def check_reversal(
    loss: Callable[[Any, Any, Any], Array],
    params: Any,
    optimizer: Any,
    batches: Callable[[Array], Any],
    *,
    theta: Any = None,
    steps: int | None = None,
    state: dict[str, Any] | None = None,
    statistics: Any = None,
    microbatches: Any = None,
    adjoint: Reversible = Reversible(),  # noqa: B008 (frozen)
) -> Certificate:
    """Train, run backwards without derivatives and with all of them, compare every bit; returns a `Certificate`.

    The arguments of `hg.train`, concrete. Raises the `HypergradError` of a run that fails on its own (range, NaN), and one
    where the derivative of the loss's gradient is not what its program promises; a failed reversal is a result, not an
    error.
    """
    problem = Problem(loss, params, optimizer, batches, theta, steps, state, statistics, None, microbatches)
    run, inputs, _ = set_up(problem, adjoint)
    run = dataclasses.replace(settled_driver(run, inputs), watch="states", store=None)
    with own_settings():
        plan = run.outside_loop(schedules, inputs.h)
        words = int(most_words(plan))
        capacity = tuple(tuple(words if link.decay else None for link in block.chain) for block in run.blocks)
        make = functools.partial(programs.call, _there_and_back) if run.driver == "scan" else _from_python
        judged, end, there, plain = make((run, capacity), inputs)
        if int(judged.status.code) != OK:
            raise judged.status.worst().error()
        derived = with_all_derivatives(run, inputs, end, plan, there.seen)
    check_symmetric(derived.watched["asymmetry"], [block.leaf_dtype for block in run.of_parameters])
    mismatch = None
    if not judged.found.all():
        mismatch = _first_mismatch(run, there, plain, "gradient")
    elif not derived.found.all():
        mismatch = _first_mismatch(run, there, plain._replace(states=derived.watched["states"]), "derivative")
    bits, ideal, words = (x.item() for x in (judged.status.bits, judged.status.ideal_bits, judged.status.words))
    content, largest = float(judged.content), float(judged.largest)
    isolated = bool(derived.doubted) or remembered(run) != run
    return Certificate(mismatch is None, mismatch, bits, ideal, largest, words, content, isolated)


def _from_python(statics: tuple[Any, ...], *args: Any) -> Any:
    return _there_and_back(*statics, *args)


class _Pass(NamedTuple):
    """What one pass saw, step by step."""

    states: Array  # prints of the state before each: uint64 [steps, places]
    batches: Array  # prints: uint64 [steps]
    seen: Seen


class _Judged(NamedTuple):
    """Of training, and of its reversal without derivatives."""

    status: Status
    content: Any  # bits in the buffers
    largest: Array  # magnitude
    found: Array  # per place, whether it came back, by the same losses


def _there_and_back(run: Run, capacity: Capacity, inputs: Inputs) -> tuple[_Judged, State, _Pass, _Pass]:
    plan, first, largest_first = run.outside_loop(_begin, inputs, static=(capacity,))
    constant, _ = run.outside_loop(split, inputs.h)
    gradient = run.maybe_jit(run.gradient)
    theta, _ = run.functions.theta.parted(inputs.theta)
    consts = (constant, theta, inputs.frozen)
    xs = steps_of(run, inputs, [schedule.entries for schedule in plan])

    def forward(consts: Any, state: State, x: Any) -> Any:
        prints = state_prints(run, state), print_of(run.batch(consts[-1], x[0]))
        state, seen, _ = train_step(run, gradient, consts, state, x)
        return state, (_Pass(*prints, seen), _largest(run, state))

    def backward(consts: Any, state: State, x: Any) -> Any:
        constant, theta, frozen = consts
        t, ((stepped, theta_stepped), _), entries = x
        batch, losses = run.batch(frozen, t), []
        theta, _ = theta_of_step(run, t, theta, theta_stepped, frozen, batch)

        def again(w: list[Array]) -> Signals:
            value, g, statistics = run.isolated_gradient(gradient, t, w, theta, frozen, batch)
            losses.append(value)
            return run.signals(g, statistics, run.more_signals(t, w, theta, frozen, batch))

        state = unstep(run, t, state, join_steps(constant, stepped), by_link(run, entries), again)
        print_ = print_of(batch)
        return state, _Pass(state_prints(run, state), print_, Seen(losses[0], None if run.functions.sure else print_))

    end, (there, largest) = run.loop(forward, consts, first, xs)
    last, back = run.loop(backward, consts, end, xs, reverse=True)
    magnitudes = largest_first, largest
    judged = run.outside_loop(_judge, inputs, plan, end, last, there.seen, back.seen, magnitudes, static=(capacity,))
    return judged, end, there, back


def _begin(run: Run, capacity: Capacity, inputs: Inputs) -> tuple[Any, State, Array]:
    first = initial_state(run, inputs.values, capacity)
    return schedules(run, inputs.h), first, _largest(run, first)


def _judge(
    run: Run,
    capacity: Capacity,
    inputs: Inputs,
    plan: Any,
    end: State,
    last: State,
    seen: Seen,
    again: Seen,
    magnitudes: Any,
) -> _Judged:
    status = assess(run, inputs.values, inputs.h, plan, end, note(run, seen.losses, None, 0), capacity)
    found = matches_initial(run, inputs.values, last) & all_of(same_losses(seen.losses, again.losses))
    first, largest = magnitudes
    return _Judged(status, _content(run, inputs, plan, end), jnp.maximum(first, largest.max()), found)


def _largest(run: Run, state: State) -> Array:
    """max |z| of all links: float32 []."""
    floats = [x for own in final_values(run, state) for x in own.values()]
    return jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in floats]).max()


def _content(run: Run, inputs: Inputs, plan: Any, end: State) -> Any:
    """Bits per parameter and step that the integers in all buffers are long."""
    total: Any = 0.0
    for block, values, slots, own in zip(run.blocks, inputs.values, end, by_link(run, plan), strict=True):
        for link in block.chain:
            if link.decay:
                total += float(values[link.name].size) * block.buffer(link).length(
                    slots[link.name].digits, own[link.name].end.words
                )
    return total / sum(inputs.values[j][PARAMS].size for j in run.parameters) / run.steps


def _first_mismatch(run: Run, there: _Pass, back: _Pass, cause: str) -> Mismatch:
    states, batches = (np.asarray(x) != np.asarray(y) for x, y in zip(there[:2], back[:2], strict=True))
    if not states.any():
        step = int(np.flatnonzero(batches)[-1]) if batches.any() else 0
        return Mismatch(step, "the losses", "batch" if batches.any() else "loss")
    step = int(np.flatnonzero(states.any(axis=1))[-1])
    return Mismatch(step, run.labels.places[int(np.argmax(states[step]))], "batch" if batches[step] else cause)
