"""Every activation of `jax.nn`: each on a few hidden units of its own, its input scaled by a slope in theta."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from zoo import Draw, Problem, entry, mse, squares


Function = Callable[[jax.Array], jax.Array]


def hidden_units(draw: Draw, *functions: Function) -> Problem:
    """One hidden layer of two units for each function."""
    units = 2 * len(functions)

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        parts = jnp.split(theta["slope"] * (x @ p["w"] + p["b"]), len(functions), axis=-1)
        mixed = jnp.concatenate([f(part) for f, part in zip(functions, parts, strict=True)], axis=-1)
        return mse(mixed @ p["v"], y) + theta["l2"] * squares(p)

    params = {"w": draw(3, units), "b": draw(units, scale=0.3), "v": draw(units, scale=0.5)}
    theta = {"slope": draw.number(1.2), "l2": draw.number(1e-2)}
    return Problem(loss, params, theta, (draw.rows(6, 3), draw.rows(6)), rate=0.1)


@entry()
def sigmoidal_activations(draw: Draw) -> Problem:
    nn = jax.nn
    return hidden_units(draw, nn.sigmoid, nn.soft_sign, nn.log_sigmoid, nn.tanh, jnp.arctan)


@entry()
def softplus_activations(draw: Draw) -> Problem:
    nn = jax.nn
    return hidden_units(draw, nn.softplus, nn.squareplus, nn.silu, nn.swish, nn.mish)


@entry()
def exponential_activations(draw: Draw) -> Problem:
    nn = jax.nn
    exact, rough = lambda x: nn.gelu(x, approximate=False), lambda x: nn.gelu(x, approximate=True)
    return hidden_units(draw, nn.elu, nn.celu, nn.selu, exact, rough, lambda x: nn.log1mexp(nn.softplus(x) + 0.1))


@entry(smooth=False)
def piecewise_activations(draw: Draw) -> Problem:
    nn = jax.nn
    return hidden_units(draw, nn.relu, nn.relu6, nn.leaky_relu, nn.hard_tanh, nn.identity, jnp.abs)


@entry(smooth=False)
def hard_activations(draw: Draw) -> Problem:
    nn = jax.nn
    return hidden_units(draw, nn.hard_sigmoid, nn.hard_silu, nn.hard_swish, nn.sparse_plus, nn.sparse_sigmoid)


@entry()
def normalized_activations(draw: Draw) -> Problem:
    """Those that see all units at once."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        hidden = x @ p["w"] + p["b"]
        spread = jax.nn.standardize(hidden, epsilon=1e-3)
        chosen = jax.nn.softmax(theta["heat"] * hidden) + jax.nn.log_softmax(hidden)
        whole = jax.nn.logsumexp(hidden, axis=-1, b=jnp.arange(1, 7)) + jax.nn.logmeanexp(spread, axis=-1)
        return mse((jax.nn.glu(spread) @ p["v"][:3]) + (chosen @ p["v"]) + whole, y)

    params = {"w": draw(3, 6), "b": draw(6, scale=0.1), "v": draw(6, scale=0.5)}
    return Problem(loss, params, {"heat": draw.number(1.5)}, (draw.rows(6, 3), draw.rows(6)), rate=0.1)


@entry()
def learned_swish(draw: Draw) -> Problem:
    """x sigmoid(beta x), with a beta for each unit in theta; a gated product after it (SwiGLU)."""

    def loss(p: Any, beta: Any, batch: Any) -> jax.Array:
        x, y = batch
        up, gate = x @ p["up"], x @ p["gate"]
        return mse((up * gate * jax.nn.sigmoid(beta * gate)) @ p["down"], y)

    params = {"up": draw(3, 4, scale=0.7), "gate": draw(3, 4, scale=0.7), "down": draw(4, scale=0.6)}
    return Problem(loss, params, draw.number([0.5, 1.0, 1.5, 2.0]), (draw.rows(6, 3), draw.rows(6)), rate=0.1)
