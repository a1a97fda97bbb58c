"""`Unrolled` and `Checkpointed`: the derivative of the same fixed-point map by JAX's own reverse mode.

Invariant: the carry holds every link twice, as integers and as a float `shadow` whose value is the decoded integers and
whose derivative is that of the real update. No derivative code is shared with `Reversible`: this is its oracle.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from hypergrad import _programs as programs
from hypergrad._settings import own_settings
from hypergrad.adjoints.second_order import accumulator
from hypergrad.exact import decode, substitute
from hypergrad.loop.drivers import in_kernels
from hypergrad.loop.problem import Inputs, Problem, begun, join_steps, schedules, split_steps, turns_of
from hypergrad.loop.small import sizes
from hypergrad.loop.status import Outcome, assess
from hypergrad.loop.step import Exact, Values, advance, increment, increments, isolated, transformed
from hypergrad.optimizers.chain import PARAMS


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Store every step of the same training run and differentiate through it, as often as one likes.

    Memory grows with steps times activations; the road for second derivatives and for tests. Outside of jax.jit it is
    compiled whole, once per loss function.
    """

    fraction_bits: int | None = None
    driver_name = "scan"
    buffer = "device"
    isolate = False
    progress = None

    def run(self, problem: Problem, inputs: Inputs) -> Outcome:
        return _run(problem, None, inputs)


@dataclasses.dataclass(frozen=True)
class Checkpointed:
    """Store `checkpoints` states of the same training run and replay the stretches between them.

    checkpoints: how many; None: about sqrt(steps), which stores least. Memory: (checkpoints + steps / checkpoints) states
    and one step's activations. Differentiable any number of times.
    """

    checkpoints: int | None = None
    fraction_bits: int | None = None
    driver_name = "scan"
    buffer = "device"
    isolate = False
    progress = None

    def __post_init__(self) -> None:
        if self.checkpoints is not None and (not isinstance(self.checkpoints, int) or self.checkpoints < 1):
            raise ValueError(f"`checkpoints` must be None or an integer of at least 1; got {self.checkpoints!r}.")

    def run(self, problem: Problem, inputs: Inputs) -> Outcome:
        checkpoints = min(self.checkpoints or max(round(math.sqrt(problem.steps)), 1), problem.steps)
        return _run(problem, checkpoints, inputs)


def _run(problem: Problem, checkpoints: int | None, inputs: Inputs) -> Outcome:
    """`_training`, compiled whole: outside of `jit`, a derivative would be one small program per operation."""
    make = lambda: jax.jit(functools.partial(_training, problem, checkpoints))  # noqa: E731
    return programs.kept((_training, problem.bare(), checkpoints), make)(inputs)


def _training(problem: Problem, checkpoints: int | None, inputs: Inputs) -> Outcome:
    rule = problem.rule
    scan = functools.partial(_checkpointed_scan, checkpoints=checkpoints) if checkpoints else jax.lax.scan
    with own_settings():
        plan = schedules(problem, jax.lax.stop_gradient(inputs.h))
        capacity: dict[str, int | None] = {link.name: None for _, link, _ in problem.links(inputs.h)}
        state = begun(problem, jax.lax.stop_gradient(inputs.values), capacity)
        constant, stepped = split_steps(inputs.h, problem.steps)
        wide_theta = [x.astype(accumulator(x)) for x in inputs.theta]  # in which a scan sums its cotangents

        def body(carry: tuple[Exact, Values], x: Any) -> tuple[tuple[Exact, Values], Any]:
            state, shadow = carry
            t, stepped, turns = x
            t = in_kernels(t, (inputs, stepped, turns))
            all_h = join_steps(constant, stepped)
            h, _ = problem.parts(all_h)
            decoded = rule.decoded(state.z, rule.chain[-1])
            w = [substitute(s.astype(d.dtype), d) for s, d in zip(shadow[PARAMS], decoded, strict=True)]
            batch = problem.batch(inputs.frozen, t)
            theta = [x.astype(like.dtype) for x, like in zip(wide_theta, inputs.theta, strict=True)]
            value, g, seen = _same_bits(t, problem.gradient, rule.layout.split(w), theta, inputs.frozen, batch)
            gradient = g = problem.joined(t, g)
            if rule.transforms:
                wide_w = [substitute(*a) for a in zip(shadow[PARAMS], rule.floats(state.z, rule.chain[-1]), strict=True)]
                g = _same_bits(t, functools.partial(transformed, rule), h, wide_w, g)
            for owner, link, part in problem.links(all_h):
                told = g if owner is rule else seen
                others = [{k.name: shadow[k.name][j] for k in owner.chain if k is not link} for j in owner.leaves]
                updates = [increment(link, part[j], others[j], told[j]) for j in owner.leaves]
                h_now, told_now = jax.lax.stop_gradient((part, told))
                exact = increments(owner, link, t, state.z, h_now, None if link.name == PARAMS else told_now)
                state = advance(owner, link, t, state, h_now, turns, exact)
                floats = owner.floats(state.z, link)
                rho = [hj[link.decay] if link.decay else 1 for hj in part]
                real = [r * s + u for r, s, u in zip(rho, shadow[link.name], updates, strict=True)]
                shadow = {**shadow, link.name: [substitute(*a) for a in zip(real, floats, strict=True)]}
            return (state, shadow), (value, sizes(t, _stopped(gradient)))

        first = {
            link.name: [
                substitute(x.astype(t), decode(z, b, t))
                for x, z, b, t in zip(
                    inputs.values[link.name], state.z[link.name], owner.bits(link), owner.dtypes, strict=True
                )
            ]
            for owner, link, _ in problem.links(inputs.h)
        }
        xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns_of(plan))
        (end, shadow), (losses, seen) = scan(body, (state, first), xs)
        values = {**shadow, PARAMS: []}
        for s, d in zip(shadow[PARAMS], rule.decoded(end.z, rule.chain[-1]), strict=True):
            values[PARAMS].append(substitute(s.astype(d.dtype), d))
        status = assess(problem, inputs.values, inputs.h, plan, end.z, losses, capacity, seen)
        return Outcome(values, losses, jax.lax.stop_gradient(status))


def _same_bits(t: jax.Array, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), with the bits of the forward pass of `Reversible`, where it is isolated."""
    return jax.tree.map(substitute, function(*args), isolated(t, function, *_stopped(args)))


def _stopped(args: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, args)


def _checkpointed_scan(body: Any, carry: Any, xs: Any, checkpoints: int) -> tuple[Any, Any]:
    """`lax.scan` that keeps `checkpoints` carries, and inside the stretch being replayed one carry a step."""
    inner = functools.partial(jax.lax.scan, jax.checkpoint(body))
    steps = jax.tree.leaves(xs)[0].shape[0]
    length = steps // checkpoints
    whole = length * checkpoints
    grouped = jax.tree.map(lambda x: x[:whole].reshape(checkpoints, length, *x.shape[1:]), xs)
    carry, ys = jax.lax.scan(jax.checkpoint(inner), carry, grouped)
    carry, rest = inner(carry, jax.tree.map(lambda x: x[whole:], xs))
    return carry, jax.tree.map(lambda y, r: jnp.concatenate([y.reshape(whole, *y.shape[2:]), r]), ys, rest)
