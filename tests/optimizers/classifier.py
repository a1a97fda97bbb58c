"""A small classifier that all rules train, and what optax makes of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hypergrad as hg


def params(dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.3, dtype)  # noqa: E731
    return {"w1": draw(6, 12), "b1": jnp.zeros(12, dtype), "w2": draw(12, 4), "b2": jnp.zeros(4, dtype)}


def loss(p: Any, _: Any, batch: Any) -> jax.Array:
    x, y = batch
    scores = jnp.tanh(x @ p["w1"] + p.get("b1", 0)) @ p["w2"] + p.get("b2", 0)
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def batches(dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(1)
    return hg.full_batch((jnp.asarray(rng.normal(size=(32, 6)), dtype), jnp.asarray(rng.integers(0, 4, 32), jnp.int32)))


def by_optax(optimizer: optax.GradientTransformation, steps: int, start: Any = None) -> tuple[Any, jax.Array]:
    """(parameters, losses)"""
    data, start = batches(), params() if start is None else start

    def step(carry: Any, t: jax.Array) -> Any:
        p, state = carry
        value, g = jax.value_and_grad(loss)(p, None, data(t))
        updates, state = optimizer.update(g, state, p)
        return (optax.apply_updates(p, updates), state), value

    run = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), jnp.arange(steps)))
    (p, _), losses = run(start)
    return p, losses


def on_grid(decay: float, denominator: int = 2**16) -> float:
    """As a decay is used."""
    return round(decay * denominator) / denominator
