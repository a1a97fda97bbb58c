"""The same hypergradient written plainly in raw JAX: float training in a scan, differentiated in the usual ways.

Every function has the signature (task, hypers) -> hypergradient of the validation loss, or the loss for `plain`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import Array


class Task(NamedTuple):
    """A training run: everything but the way it is differentiated."""

    loss: Callable[[Any, Any], Array]  # (params, batch) -> scalar
    params: Any
    batch: Callable[[Array], Any]  # t -> batch
    validation: Callable[[Any], Array]  # params -> scalar
    steps: int
    rule: str = "sgd"  # a key of `RULES`


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


RULES = {"sgd": Rule(_zeros, _sgd), "adam": Rule(lambda params: (_zeros(params), _zeros(params)), _adam)}


def plain(task: Task, learning_rates: Array) -> Array:
    """Training alone: the unit of time of every other row."""
    return task.validation(_trained(task, learning_rates, jax.lax.scan))


def unrolled(task: Task, learning_rates: Array) -> Array:
    return jax.grad(lambda a: task.validation(_trained(task, a, jax.lax.scan)))(learning_rates)


def remat(task: Task, learning_rates: Array) -> Array:
    """Store every (w, v), recompute the activations."""
    scan = lambda body, carry, xs: jax.lax.scan(jax.checkpoint(body), carry, xs)  # noqa: E731
    return jax.grad(lambda a: task.validation(_trained(task, a, scan)))(learning_rates)


def sqrt_remat(task: Task, learning_rates: Array) -> Array:
    """Store sqrt(T) states, replay one stretch at a time."""

    def scan(body: Any, carry: Any, xs: Any) -> Any:
        length = math.isqrt(task.steps)
        grouped = jax.tree.map(lambda x: x.reshape(-1, length, *x.shape[1:]), xs)
        return jax.lax.scan(jax.checkpoint(functools.partial(jax.lax.scan, jax.checkpoint(body))), carry, grouped)

    return jax.grad(lambda a: task.validation(_trained(task, a, scan)))(learning_rates)


def equinox_checkpointed(task: Task, learning_rates: Array, checkpoints: int | None = 8) -> Array:
    """Online binomial checkpointing."""
    scan = functools.partial(eqxi.scan, kind="checkpointed", checkpoints=checkpoints)
    return jax.grad(lambda a: task.validation(_trained(task, a, scan)))(learning_rates)


def _trained(task: Task, learning_rates: Array, scan: Any) -> Any:
    rule = RULES[task.rule]

    def body(carry: Any, x: Any) -> Any:
        (w, state), (t, a) = carry, x
        return rule.update(w, state, jax.grad(task.loss)(w, task.batch(t)), a, t), None

    (w, _), _ = scan(body, (task.params, rule.start(task.params)), (jnp.arange(task.steps), learning_rates))
    return w
