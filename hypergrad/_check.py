"""`check_reversal`: forward and back without derivatives, and where the two passes first part."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._train import set_up
from hypergrad.adjoints import Reversible
from hypergrad.adjoints.reversible import settled_driver
from hypergrad.errors import OK
from hypergrad.exact import Scaled
from hypergrad.loop.forward import train_step
from hypergrad.loop.problem import Inputs, Problem, begun, intact, join_steps, schedules, split, turns_of
from hypergrad.loop.status import assess, most_words
from hypergrad.loop.step import Exact, Rule, unfollow, unstep
from hypergrad.optimizers.chain import PARAMS


class Mismatch(NamedTuple):
    """Where the reverse pass first differed from the forward pass."""

    step: int  # the state before this step was not recovered
    place: str  # link and leaf, e.g. "velocity['w']"
    cause: str  # "batch": `batches` gave another batch the second time; "gradient": same batch, other gradient bits


class Certificate(NamedTuple):
    """What `check_reversal` found."""

    exact: bool  # every link back on its initial bits, every buffer empty
    first_mismatch: Mismatch | None
    bits_per_parameter_step: float  # lost by decays and kept: in words, and what waits to become one
    ideal_bits_per_parameter_step: float  # mean of log2(1/decay)
    max_abs: float  # largest magnitude of any link at any step
    buffer_words: int  # 32-bit words per parameter spilled
    content_bits_per_parameter_step: float  # of the above, what is in buffers: words, and the mean length of heads


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
    """Train, run backwards, compare every bit: the arguments of `hg.train`, concrete; returns a `Certificate`.

    Raises the `HypergradError` of a run that fails on its own (range, NaN); a failed reversal is a result, not an error.
    """
    problem, inputs, _ = set_up(loss, params, optimizer, batches, theta, steps, state, adjoint, True, statistics)
    problem = settled_driver(problem, inputs)
    with jax.enable_x64(True):
        plan = problem.beside(schedules, inputs.h)
        capacity = {link.name: int(most_words(plan)) for _, link, _ in problem.links(inputs.h)}
        run = _there_and_back if problem.driver != "scan" else jax.jit(_there_and_back, static_argnums=(0, 1))
        (status, content, largest, back_on_bits), there, back = run(problem, tuple(capacity.items()), inputs)
    if int(status.code) != OK:
        raise status.worst().error()
    exact = bool(back_on_bits.all())
    mismatch = None if exact else _first_mismatch(problem, *(jax.tree.map(np.asarray, x) for x in (there, back)))
    bits, ideal, words = float(status.bits), float(status.ideal_bits), int(status.words)
    return Certificate(exact, mismatch, bits, ideal, float(largest), words, float(content))


class _Trace(NamedTuple):
    """Fingerprints of every step: of the state before it [steps, places], of its batch [steps]."""

    state: Array
    batch: Array


def _there_and_back(problem: Problem, capacity: tuple[Any, ...], inputs: Inputs) -> Any:
    plan, first, largest_first = problem.beside(_begin, inputs, static=(capacity,))
    constant, stepped = problem.beside(split, inputs.h)
    gradient = problem.maybe_jit(problem.gradient)
    consts = (constant, inputs.theta, inputs.frozen)
    xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns_of(plan))

    def forward(consts: Any, state: Exact, x: Any) -> Any:
        prints = _state_print(problem, state), _batch_print(problem, consts[-1], x[0])
        state, loss = train_step(problem, gradient, consts, state, x)
        return state, (*prints, loss, _largest(problem, state))

    def backward(consts: Any, state: Exact, x: Any) -> Any:
        constant, theta, frozen = consts
        t, stepped, turns = x
        h, rates = problem.parts(join_steps(constant, stepped))
        batch = problem.batch(frozen, t)

        def again(w: list[Array]) -> list[Array]:
            value, g, seen = problem.apart(t, gradient, w, theta, frozen, batch)
            found.append((value, seen))
            return problem.joined(t, g)

        found: list[tuple[Array, list[Array]]] = []
        state = unstep(problem.rule, t, state, h, turns, again)
        loss, seen = found[-1]
        state = unfollow(problem.statistics, t, state, rates, turns, seen)
        return state, (_state_print(problem, state), _batch_print(problem, frozen, t), loss)

    end, (states, batches, losses, largest) = problem.run(forward, consts, first, xs)
    last, (back_states, back_batches, again) = problem.run(backward, consts, end, xs, reverse=True)
    magnitudes = largest_first, largest
    judged = problem.beside(_judged, inputs, plan, end, last, losses, again, magnitudes, static=(capacity,))
    return judged, _Trace(states, batches), _Trace(back_states, back_batches)


def _begin(problem: Problem, capacity: tuple[Any, ...], inputs: Inputs) -> tuple[Any, Exact, Array]:
    first = begun(problem, inputs.values, dict(capacity))
    return schedules(problem, inputs.h), first, _largest(problem, first)


def _judged(
    problem: Problem,
    capacity: Any,
    inputs: Inputs,
    plan: Any,
    end: Exact,
    last: Exact,
    losses: Array,
    again: Array,
    magnitudes: Any,
) -> tuple[Any, ...]:
    """(status, bits in the buffers, largest magnitude, per place whether it came back)."""
    status = assess(problem, inputs.values, inputs.h, plan, end.z, losses, dict(capacity))
    exact = intact(problem, inputs.values, last) & jnp.isfinite(again).all()
    first, largest = magnitudes
    return status, _content(problem, inputs, plan, end), jnp.maximum(first, largest.max()), exact


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


def _first_mismatch(problem: Problem, there: Any, back: Any) -> Mismatch:
    differs = there.state != back.state
    step = int(np.flatnonzero(differs.any(axis=1))[-1]) if differs.any() else 0
    place = int(np.argmax(differs[step]))
    cause = "batch" if there.batch[step] != back.batch[step] else "gradient"
    return Mismatch(step, problem.labels.places[place], cause)


def _state_print(problem: Problem, state: Exact) -> Array:
    return jnp.stack(
        [_prints(x) for rule in problem.rules for link in rule.chain for x in _leaves(rule, state.z[link.name])]
    )


def _leaves(rule: Rule, z: list[Any]) -> list[Any]:
    integers = [jax.tree.leaves(x.z if isinstance(x, Scaled) else x) for x in z]
    columns = [rule.layout.split(list(column)) for column in zip(*integers, strict=True)]
    return list(zip(*columns, strict=True))


def _batch_print(problem: Problem, frozen: list[Any], t: Array) -> Array:
    with jax.enable_x64(problem.x64):
        batch = problem.assemble.batch(frozen, t)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = [jax.random.key_data(x) if is_key(x) else jnp.asarray(x) for x in jax.tree.leaves(batch)]
    return _prints(leaves)


def _prints(tree: Any) -> Array:
    return sum((_print(x) for x in jax.tree.leaves(tree)), jnp.uint64(0))


def _print(x: Array) -> Array:
    """A position-dependent checksum of an array's bits: uint64 []."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).reshape(-1).astype(jnp.uint64)
    weights = jnp.arange(bits.size, dtype=jnp.uint64) * jnp.uint64(0x9E3779B97F4A7C15) | jnp.uint64(1)
    return jnp.sum(bits * weights)
