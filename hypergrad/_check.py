"""`check_reversal`: forward and back, without derivatives and with them, and where two passes first part."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _programs as programs
from hypergrad._settings import own_settings
from hypergrad._train import set_up
from hypergrad.adjoints import Reversible
from hypergrad.adjoints.apart import remembered
from hypergrad.adjoints.passes import settled_driver, with_all_derivatives
from hypergrad.adjoints.second_order import check_symmetric
from hypergrad.errors import OK, Status
from hypergrad.exact import all_of
from hypergrad.loop.forward import Seen, train_step
from hypergrad.loop.prints import print_of, state_prints
from hypergrad.loop.problem import Inputs, Problem, begun, intact, join_steps, schedules, split, turns_of
from hypergrad.loop.status import assess, most_words
from hypergrad.loop.step import Exact, unfollow, unstep
from hypergrad.optimizers.chain import PARAMS


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
    adjoint: Reversible = Reversible(),  # noqa: B008 (frozen)
) -> Certificate:
    """Train, run backwards without derivatives and with all of them, compare every bit; returns a `Certificate`.

    The arguments of `hg.train`, concrete. Raises the `HypergradError` of a run that fails on its own (range, NaN), and one
    where the derivative of the loss's gradient is not what its program promises; a failed reversal is a result, not an
    error.
    """
    problem, inputs, _ = set_up(loss, params, optimizer, batches, theta, steps, state, adjoint, True, statistics)
    problem = dataclasses.replace(settled_driver(problem, inputs), watch="states")
    with own_settings():
        plan = problem.beside(schedules, inputs.h)
        capacity = {link.name: int(most_words(plan)) for _, link, _ in problem.links(inputs.h)}
        statics = problem, tuple(capacity.items())
        run = functools.partial(programs.call, _there_and_back) if problem.driver == "scan" else _from_python
        judged, end, there, plain = run(statics, inputs)
        if int(judged.status.code) != OK:
            raise judged.status.worst().error()
        derived = with_all_derivatives(problem, inputs, end, there.seen)
    check_symmetric(derived.watched["asymmetry"], problem.rule.param_dtypes)
    mismatch = None
    if not judged.found.all():
        mismatch = _first_mismatch(problem, there, plain, "gradient")
    elif not derived.found.all():
        mismatch = _first_mismatch(problem, there, plain._replace(states=derived.watched["states"]), "derivative")
    bits, ideal, words = (x.item() for x in (judged.status.bits, judged.status.ideal_bits, judged.status.words))
    content, largest = float(judged.content), float(judged.largest)
    isolated = bool(derived.doubted) or remembered(problem) != problem
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


def _there_and_back(problem: Problem, capacity: tuple[Any, ...], inputs: Inputs) -> tuple[_Judged, Exact, _Pass, _Pass]:
    plan, first, largest_first = problem.beside(_begin, inputs, static=(capacity,))
    constant, stepped = problem.beside(split, inputs.h)
    gradient = problem.maybe_jit(problem.gradient)
    consts = (constant, inputs.theta, inputs.frozen)
    xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns_of(plan))

    def forward(consts: Any, state: Exact, x: Any) -> Any:
        prints = state_prints(problem, state), print_of(problem.batch(consts[-1], x[0]))
        state, seen, _ = train_step(problem, gradient, consts, state, x)
        return state, (_Pass(*prints, seen), _largest(problem, state))

    def backward(consts: Any, state: Exact, x: Any) -> Any:
        constant, theta, frozen = consts
        t, stepped, turns = x
        h, rates = problem.parts(join_steps(constant, stepped))
        batch = problem.batch(frozen, t)

        def again(w: list[Array]) -> list[Array]:
            value, g, evidence = problem.gradient_apart(gradient, t, w, theta, frozen, batch)
            found.append((value, evidence))
            return g

        found: list[tuple[Array, list[Array]]] = []
        state = unstep(problem.rule, t, state, h, turns, again)
        loss, evidence = found[-1]
        state = unfollow(problem.statistics, t, state, rates, turns, evidence)
        print_ = print_of(batch)
        return state, _Pass(state_prints(problem, state), print_, Seen(loss, None if problem.functions.sure else print_))

    end, (there, largest) = problem.run(forward, consts, first, xs)
    last, back = problem.run(backward, consts, end, xs, reverse=True)
    magnitudes = largest_first, largest
    judged = problem.beside(_judge, inputs, plan, end, last, there.seen, back.seen, magnitudes, static=(capacity,))
    return judged, end, there, back


def _begin(problem: Problem, capacity: tuple[Any, ...], inputs: Inputs) -> tuple[Any, Exact, Array]:
    first = begun(problem, inputs.values, dict(capacity))
    return schedules(problem, inputs.h), first, _largest(problem, first)


def _judge(
    problem: Problem,
    capacity: Any,
    inputs: Inputs,
    plan: Any,
    end: Exact,
    last: Exact,
    seen: Seen,
    again: Seen,
    magnitudes: Any,
) -> _Judged:
    status = assess(problem, inputs.values, inputs.h, plan, end.z, seen.losses, dict(capacity))
    found = intact(problem, inputs.values, last) & all_of(seen.losses == again.losses)
    first, largest = magnitudes
    return _Judged(status, _content(problem, inputs, plan, end), jnp.maximum(first, largest.max()), found)


def _largest(problem: Problem, state: Exact) -> Array:
    """max |z| of all links: float32 []."""
    floats = [x for rule in problem.rules for link in rule.chain for x in rule.decoded(state.z, link)]
    return jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in floats]).max()


def _content(problem: Problem, inputs: Inputs, plan: Any, end: Exact) -> Any:
    """Bits per parameter and step that the integers in all buffers are long."""
    total: Any = 0.0
    for rule, link, _ in problem.links(inputs.h):
        if link.decay:
            rows = zip(inputs.values[link.name], rule.kept(link), end.buffers[link.name], plan[link.name], strict=True)
            total += sum(x.size * keep.length(buffer, s.words) for x, keep, buffer, s in rows)
    return total / sum(x.size for x in inputs.values[PARAMS]) / problem.steps


def _first_mismatch(problem: Problem, there: _Pass, back: _Pass, cause: str) -> Mismatch:
    states, batches = (np.asarray(x) != np.asarray(y) for x, y in zip(there[:2], back[:2], strict=True))
    if not states.any():
        step = int(np.flatnonzero(batches)[-1]) if batches.any() else 0
        return Mismatch(step, "the losses", "batch" if batches.any() else "loss")
    step = int(np.flatnonzero(states.any(axis=1))[-1])
    return Mismatch(step, problem.labels.places[int(np.argmax(states[step]))], "batch" if batches[step] else cause)
