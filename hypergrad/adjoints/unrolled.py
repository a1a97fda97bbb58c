"""`Unrolled` and `Checkpointed`: the derivative of the same fixed-point map by JAX's own reverse mode.

Invariant: the carry holds every link twice, as integers and as a float `shadow` whose value is the decoded integers and
whose derivative is that of the real update. No derivative code is shared with `Reversible`: this is its oracle.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad import _programs as programs
from hypergrad._integers import as_int
from hypergrad._isolation import isolated, kernel_by_kernel
from hypergrad._settings import own_settings
from hypergrad.adjoints.base import Adjoint, Cost
from hypergrad.adjoints.second_order import accumulator
from hypergrad.exact import substitute
from hypergrad.optimizers.block import Floats
from hypergrad.optimizers.chain import PARAMS, STATISTICS, Link
from hypergrad.optimizers.expand import Hypers
from hypergrad.run.forward import theta_of_step
from hypergrad.run.per_step import join_steps, split_steps
from hypergrad.run.plan import by_link, schedules
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Outcome, assess, note, nothing_kept
from hypergrad.run.step import (
    State,
    advance,
    decoded,
    early_values,
    final_values,
    increment,
    initial_state,
    replaced,
    seen_outside,
    wide_parameters,
)
from hypergrad.run.underflow import sizes


@dataclasses.dataclass(frozen=True)
class Unrolled(Adjoint):
    """Store every step of the same training run and differentiate through it, as often as one likes.

    Memory grows with steps times activations; the road for second derivatives and for tests. Outside of jax.jit it is
    compiled whole, once per loss function.
    """

    fraction_bits: int | None = None

    def run(self, run: Run, inputs: Inputs) -> Outcome:
        self.driver_for(run.source)  # whoever set it up: a scan would see the first batch alone
        return _run(run, None, inputs)

    def cost(self, steps: int) -> Cost:
        return Cost(time=4, states=4.0 * steps, activations=steps)


@dataclasses.dataclass(frozen=True)
class Checkpointed(Adjoint):
    """Store `checkpoints` states of the same training run and replay the stretches between them.

    checkpoints: how many; None: about sqrt(steps), which stores least. Memory: (checkpoints + steps / checkpoints) states
    and one step's activations. Differentiable any number of times.
    """

    checkpoints: int | None = None
    fraction_bits: int | None = None

    def __post_init__(self) -> None:
        if self.checkpoints is None:
            return
        count = as_int(self.checkpoints)
        if count is None or count < 1:
            raise ValueError(f"`checkpoints` must be None or an integer of at least 1; got {self.checkpoints!r}.")
        object.__setattr__(self, "checkpoints", count)

    def run(self, run: Run, inputs: Inputs) -> Outcome:
        self.driver_for(run.source)
        return _run(run, self._kept(run.steps), inputs)

    def cost(self, steps: int) -> Cost:
        kept = self._kept(steps)
        return Cost(time=5, states=4.0 * (kept + steps / kept), activations=1)

    def _kept(self, steps: int) -> int:
        return min(self.checkpoints or max(round(math.sqrt(steps)), 1), steps)


def _run(run: Run, checkpoints: int | None, inputs: Inputs) -> Outcome:
    """`_training`, compiled whole: outside of `jit`, a derivative would be one small program per operation."""
    make = lambda: jax.jit(functools.partial(_training, run, checkpoints))  # noqa: E731
    return programs.kept((_training, run.bare(), checkpoints), make)(inputs)


def _training(run: Run, checkpoints: int | None, inputs: Inputs) -> Outcome:
    scan = functools.partial(_checkpointed_scan, checkpoints=checkpoints) if checkpoints else jax.lax.scan
    with own_settings():
        plan = schedules(run, jax.lax.stop_gradient(inputs.h))
        capacity = nothing_kept(run)
        state = initial_state(run, jax.lax.stop_gradient(inputs.values), capacity)
        constant, stepped = split_steps(inputs.h, run.steps)
        theta, theta_stepped = run.functions.theta.parted(inputs.theta)
        same = Same(inputs, constant, theta, [x.astype(accumulator(x)) for x in theta])
        first = [
            {k.name: substitute(values[k.name].astype(b.dtype), decoded(b, k, slots)) for k in b.chain}
            for b, values, slots in zip(run.blocks, inputs.values, state, strict=True)
        ]
        xs = (jnp.arange(run.steps, dtype=jnp.int32), (stepped, theta_stepped), [schedule.entries for schedule in plan])
        (end, shadow), (losses, seen, metrics) = scan(functools.partial(_step, run, same), (state, first), xs)
        status = assess(run, inputs.values, inputs.h, plan, end, note(run, losses, seen, 0), capacity)
        return Outcome(_seen(run, end, shadow), losses, jax.lax.stop_gradient(status), metrics)


class Same(NamedTuple):
    """What all steps share."""

    inputs: Inputs
    h: list[Hypers]  # the part of it that is constant
    theta: list[Array]  # likewise
    wide_theta: list[Array]  # that, in the dtype in which a scan sums its cotangents


def _step(run: Run, same: Same, carry: tuple[State, list[Floats]], x: Any) -> tuple[tuple[State, list[Floats]], Any]:
    """`hypergrad.run.forward.train_step`, with the floats beside the integers that are differentiated."""
    state, shadow = carry
    t, (stepped, theta_stepped), entries = x
    t = kernel_by_kernel(t, (same.inputs, stepped, entries))
    h, frozen = join_steps(same.h, stepped), same.inputs.frozen
    outside = [seen_outside(b, b.chain[-1], state[j]) for j, b in enumerate(run.of_parameters)]
    w = run.split([substitute(shadow[j][PARAMS].astype(d.dtype), d) for j, d in enumerate(outside)])
    batch = run.batch(frozen, t)
    narrow = [x.astype(like.dtype) for x, like in zip(same.wide_theta, same.theta, strict=True)]
    theta, _ = theta_of_step(run, t, narrow, theta_stepped, frozen, batch)
    point = w, theta, frozen, batch
    value, g, seen = _same_bits(t, functools.partial(run.gradient, smooth=True), *point, exact=run.gradient)
    gradient = g = run.joined(t, g)
    smooth, exact = functools.partial(run.more_signals, t, smooth=True), functools.partial(run.more_signals, t)
    more = _same_bits(t, smooth, *point, exact=exact) if run.functions.signals else {}
    metrics = []
    if run.functions.metrics is not None:
        values = _seen(run, state, shadow)[: len(run.parameters)]
        metrics = _same_bits(t, functools.partial(run.metrics, t, apart=False), values, *point[1:])
    signals, entries = run.signals(g, seen, more), by_link(run, entries)
    early = [(j, run.blocks[j].chain[: run.early[j]]) for j in run.parameters]
    for j, links in (*((j, run.blocks[j].chain) for j in run.statistics), *early):
        for link in links:
            state, shadow = _both(run, j, link, t, state, shadow, h, entries, signals)
    if run.transforms:
        signals = run.signals(_transformed(run, t, state, shadow, h, g), seen, more)
    for j in run.parameters:
        for link in run.blocks[j].chain[run.early[j] :]:
            state, shadow = _both(run, j, link, t, state, shadow, h, entries, signals)
    return (state, shadow), (value, sizes(run, t, _stopped(gradient)), metrics)


def _transformed(run: Run, t: Array, state: State, shadow: list[Floats], h: list[Hypers], g: list[Array]) -> list[Array]:
    wide_w = [substitute(own[PARAMS], x) for own, x in zip(shadow, wide_parameters(run, state), strict=False)]
    read = zip(shadow, early_values(run, state), strict=False)
    early = [{name: substitute(own[name], x) for name, x in values.items()} for own, values in read]
    return _same_bits(t, run.transformed, [h[j] for j in run.parameters], wide_w, g, early)


def _seen(run: Run, state: State, shadow: list[Floats]) -> list[Floats]:
    """`final_values`, with the derivative of the shadow."""
    return [
        {name: substitute(own[name].astype(x.dtype), x) for name, x in values.items()}
        for own, values in zip(shadow, final_values(run, state), strict=True)
    ]


def _both(
    run: Run, j: int, link: Link, t: Array, state: State, shadow: list[Floats], h: Any, entries: Any, signals: Any
) -> tuple[State, list[Floats]]:
    """One link of one block: its integers, and its shadow of the same value and with the derivative of the real update."""
    block, own = run.blocks[j], shadow[j]
    told = signals[j].get(link.signal)
    known_h, known_signals = jax.lax.stop_gradient((h, signals))
    exact = increment(run, j, link, t, state, known_h, known_signals)
    state = replaced(state, j, {link.name: advance(block, link, t, state[j], known_h[j], entries[j], exact)})
    real = h[j][link.decay] * own[link.name] if link.decay else own[link.name]
    if link.increment is not None:
        others: Floats = {name: x for name, x in own.items() if name != link.name}
        if run.statistics and block.of_parameters:
            others[STATISTICS] = run.statistics_tree_of([shadow[i][STATISTICS] for i in run.statistics])
        real = real + block.increment(link, h[j], others, told)
    return state, replaced(shadow, j, {link.name: substitute(real, decoded(block, link, state[j]))})


def _same_bits(t: Array, function: Callable[..., Any], *args: Any, exact: Callable[..., Any] | None = None) -> Any:
    """function(*args), with the bits of the forward pass of `Reversible`, where it is isolated. exact: which has them."""
    return jax.tree.map(substitute, function(*args), isolated(t, exact or function, *_stopped(args)))


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
