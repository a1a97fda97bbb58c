"""The same hypergradient written plainly in raw JAX: float training in a scan, differentiated in the usual ways.

Every function has the signature (task, learning rates) -> hypergradient of the validation loss, or the loss for `plain`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array

from experiments.benchmarks import plain_shampoo
from experiments.benchmarks.workloads import Task


class Rule(NamedTuple):
    """An optimizer written plainly."""

    start: Callable[[Any], Any]  # params -> accumulators
    update: Callable[[Any, Any, Any, Array, Array], tuple[Any, Any]]  # w, accumulators, g, learning rate, t


def _sgd(w: Any, v: Any, g: Any, a: Array, t: Array) -> tuple[Any, Any]:
    v = jax.tree.map(lambda v, g: 0.9 * v - (1 - 0.9) * g, v, g)
    return jax.tree.map(lambda w, v: w + a * v, w, v), v


def _adam(w: Any, state: Any, g: Any, a: Array, t: Array) -> tuple[Any, Any]:
    m, s = state
    m = jax.tree.map(lambda m, g: 0.9 * m + (1 - 0.9) * g, m, g)
    s = jax.tree.map(lambda s, g: 0.999 * s + (1 - 0.999) * g**2, s, g)
    c1, c2 = 1 - 0.9 ** (t + 1.0), 1 - 0.999 ** (t + 1.0)
    root = lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)  # noqa: E731 (a finite derivative at 0)
    return jax.tree.map(lambda w, m, s: w - a * (m / c1) / (root(s / c2) + 1e-8), w, m, s), (m, s)


def _zeros(params: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, params)


def _of_optax(make: Callable[[], optax.GradientTransformation]) -> Rule:
    """make: with a learning rate of 1, that updates are proportional to."""

    def update(w: Any, state: Any, g: Any, a: Array, t: Array) -> tuple[Any, Any]:
        updates, state = make().update(g, state, w)
        return jax.tree.map(lambda w, u: w + a * u, w, updates), state

    return Rule(lambda params: make().init(params), update)


RULES = {
    "sgd": Rule(_zeros, _sgd),
    "adam": Rule(lambda params: (_zeros(params), _zeros(params)), _adam),
    "muon": _of_optax(lambda: optax.contrib.muon(1.0, nesterov=False, adam_weight_decay=0.0)),
    "shampoo": Rule(plain_shampoo.start, plain_shampoo.update),
}


def plain(task: Task, learning_rates: Array) -> Array:
    """Training alone: the unit of time of every other road."""
    return task.validation(_trained(task, learning_rates, jax.lax.scan))


def unrolled(task: Task, learning_rates: Array) -> Array:
    """Store every step with its activations."""
    return _differentiated(task, learning_rates, jax.lax.scan)


def remat(task: Task, learning_rates: Array) -> Array:
    """Store every (w, v), recompute the activations."""
    return _differentiated(task, learning_rates, functools.partial(_nested, (task.steps,)))


def sqrt_remat(task: Task, learning_rates: Array) -> Array:
    """Store sqrt(T) states, replay one stretch at a time."""
    return _differentiated(task, learning_rates, functools.partial(_nested, halves(task.steps)))


def tree(task: Task, learning_rates: Array, arity: int = 4) -> Array:
    """Cut training into `arity` pieces, each of them again and so on: O(log T) states, O(log T) replays."""
    return _differentiated(task, learning_rates, functools.partial(_nested, branches(task.steps, arity)))


def equinox_checkpointed(task: Task, learning_rates: Array, checkpoints: int | None = 8) -> Array:
    """Online binomial checkpointing; None: as many checkpoints as equinox takes, about sqrt(2 T)."""
    return _differentiated(task, learning_rates, functools.partial(eqxi.scan, kind="checkpointed", checkpoints=checkpoints))


def halves(steps: int) -> tuple[int, int]:
    """T as a product of two factors, as near to each other as can be."""
    first = max(k for k in range(1, math.isqrt(steps) + 1) if steps % k == 0)
    return first, steps // first


def branches(steps: int, arity: int) -> tuple[int, ...]:
    """T as a product of factors of at most `arity`, or of primes where those are larger."""
    factors, rest = [], steps
    while rest > 1:
        fitting = [k for k in range(2, arity + 1) if rest % k == 0]
        factors.append(max(fitting) if fitting else min(k for k in range(2, rest + 1) if rest % k == 0))
        rest //= factors[-1]
    return tuple(factors or [1])


def start(task: Task) -> Any:
    """The state before training: (params, accumulators)."""
    return task.params, RULES[task.rule].start(task.params)


def step(task: Task, state: Any, t: Array, a: Array) -> Any:
    w, accumulators = state
    return RULES[task.rule].update(w, accumulators, jax.grad(task.loss)(w, task.batch(t)), a, t)


def _differentiated(task: Task, learning_rates: Array, scan: Any) -> Array:
    return jax.grad(lambda a: task.validation(_trained(task, a, scan)))(learning_rates)


def _trained(task: Task, learning_rates: Array, scan: Any) -> Any:
    body = lambda state, x: (step(task, state, *x), None)  # noqa: E731
    (w, _), _ = scan(body, start(task), (jnp.arange(task.steps), learning_rates))
    return w


def _nested(shape: tuple[int, ...], body: Any, state: Any, xs: Any) -> Any:
    """A scan as `shape` scans inside each other; each stores the states that it enters a step with, and nothing else."""
    for _ in shape[1:]:
        body = functools.partial(jax.lax.scan, jax.checkpoint(body))
    return jax.lax.scan(jax.checkpoint(body), state, jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), xs))
