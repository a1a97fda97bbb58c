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
    momentum: float = 0.9


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
    def body(carry: Any, x: Any) -> Any:
        w, v = carry
        t, a = x
        g = jax.grad(task.loss)(w, task.batch(t))
        v = jax.tree.map(lambda v, g: task.momentum * v - (1 - task.momentum) * g, v, g)
        w = jax.tree.map(lambda w, v: w + a * v, w, v)
        return (w, v), None

    start = (task.params, jax.tree.map(jnp.zeros_like, task.params))
    (w, _), _ = scan(body, start, (jnp.arange(task.steps), learning_rates))
    return w
