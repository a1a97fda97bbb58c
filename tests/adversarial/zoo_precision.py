"""Losses that compute in 16 bits, and parameters that have no more: the roads agree to what 16 bits resolve.

A derivative of rounded numbers is rounded too, and in another order on each road.
"""

from typing import Any

import jax
import jax.numpy as jnp
from zoo import Draw, Problem, entry, mlp, mse, net


def rough(draw: Draw, dtype: Any, scale: float = 1.0) -> Problem:
    """Computes in dtype; the loss is scaled there and back, as float16 asks for."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        small, x, heat = jax.tree.map(lambda w: w.astype(dtype), (p, batch[0], theta))
        prediction = scale * (heat * net(small, x, jax.nn.silu))
        return mse(prediction.astype(jnp.float32) / scale, batch[1].astype(jnp.float32))

    return Problem(loss, mlp(draw), draw.number(1.2), (draw.rows(6, 3), draw.rows(6)))


def narrow(draw: Draw, dtype: Any) -> Problem:
    """Parameters of dtype; what is computed with them is float32."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        p = jax.tree.map(lambda w: w.astype(jnp.float32), p)
        return mse(net(p, x.astype(jnp.float32)) * theta.astype(jnp.float32), y.astype(jnp.float32))

    params = jax.tree.map(lambda w: w.astype(dtype), mlp(draw))
    return Problem(loss, params, draw.number(1.2), (draw.rows(6, 3), draw.rows(6)))


@entry(smooth=False, tolerance=0.1)
def computes_in_bfloat16(draw: Draw) -> Problem:
    return rough(draw, jnp.bfloat16)


@entry(smooth=False, tolerance=0.02)
def computes_in_float16(draw: Draw) -> Problem:
    return rough(draw, jnp.float16, scale=64.0)


@entry(smooth=False, tolerance=0.05)
def parameters_in_bfloat16(draw: Draw) -> Problem:
    return narrow(draw, jnp.bfloat16)


@entry(smooth=False, tolerance=0.01)
def parameters_in_float16(draw: Draw) -> Problem:
    return narrow(draw, jnp.float16)


@entry(smooth=False, tolerance=1e-4)
def mixed_dtypes(draw: Draw) -> Problem:
    """One leaf float32 and the others in the dtype asked for; a matrix product that accumulates in float32."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        hidden = jnp.matmul(x.astype(jnp.float32), p["w"], preferred_element_type=jnp.float32)
        hidden = jnp.tanh(hidden.astype(x.dtype) + p["b"])
        return mse(jax.lax.dot(hidden, p["v"], precision=jax.lax.Precision.HIGHEST) * theta, y)

    params = mlp(draw)
    params["w"] = params["w"].astype(jnp.float32)
    return Problem(loss, params, draw.number(1.2), (draw.rows(6, 3), draw.rows(6)))
