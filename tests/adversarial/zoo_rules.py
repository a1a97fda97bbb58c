"""Derivative rules of the user's own that bend the gradient: reversed, scaled, clipped, aligned with other weights.

What training follows is then not the gradient of anything, and its Jacobian is not symmetric: the hypergradient needs the
transposed one. As functions of the parameters these rules are smooth, so the derivative is that of the run, and differences
of the run say so.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from zoo import Draw, Problem, entry, mlp, mse, squares

import hypergrad as hg


@jax.custom_vjp
def turned(x: jax.Array, strength: jax.Array) -> jax.Array:
    """x, whose cotangent is turned around (Ganin and Lempitsky 2015)."""
    del strength
    return x


turned.defvjp(lambda x, s: (x, s), lambda s, ct: (-s * ct, jnp.zeros_like(s)))


@jax.custom_vjp
def limited(x: jax.Array, bound: jax.Array) -> jax.Array:
    """x, whose cotangent is cut to [-bound, bound]."""
    del bound
    return x


limited.defvjp(lambda x, c: (x, c), lambda c, ct: (jnp.clip(ct, -c, c), jnp.zeros_like(c)))


@jax.custom_vjp
def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """x, whose cotangent is multiplied."""
    del factor
    return x


scaled.defvjp(lambda x, s: (x, s), lambda s, ct: (s * ct, jnp.zeros_like(s)))


def features(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"])


def bent(draw: Draw, rule: Any, theta: float, rate: float = 0.3) -> Problem:
    """rule(hidden, theta) between the two layers of a network."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        return mse(jnp.sin(rule(features(p, x), theta)) @ p["v"], y)

    return Problem(loss, mlp(draw), draw.number(theta), (draw.rows(6, 3), draw.rows(6)), rate=rate)


@entry(own_rule=True)
def gradient_reversal(draw: Draw) -> Problem:
    """Adversarial domains: the features are to hide what a second head looks for."""

    def loss(p: Any, strength: Any, batch: Any) -> jax.Array:
        x, y, domain = batch
        hidden = features(p, x)
        logits = turned(hidden, strength) @ p["d"]
        return mse(hidden @ p["v"], y) + jnp.mean(optax.sigmoid_binary_cross_entropy(logits, domain > 0))

    params = {**mlp(draw), "d": draw(5, scale=0.6)}
    return Problem(loss, params, draw.number(0.7), (draw.rows(6, 3), draw.rows(6), draw.rows(6)))


@entry(own_rule=True, smooth=False)
def gradient_clipped_inside(draw: Draw) -> Problem:
    return bent(draw, limited, 0.08)


@entry(own_rule=True)
def gradient_scaled(draw: Draw) -> Problem:
    return bent(draw, scaled, 0.4)


@entry(own_rule=True)
def wrong_constant(draw: Draw) -> Problem:
    """A mistake: the backward rule is three times the derivative."""

    @jax.custom_vjp
    def cube(x: jax.Array) -> jax.Array:
        return x**3

    cube.defvjp(lambda x: (cube(x), x), lambda x, ct: (9 * x**2 * ct,))
    return bent(draw, lambda x, theta: x + theta * cube(x), 0.5, rate=0.1)


@entry(own_rule=True)
def normalized_cotangent(draw: Draw) -> Problem:
    """`jax.custom_gradient`: each example's cotangent gets the same length."""

    @jax.custom_gradient
    def same_length(x: jax.Array, length: jax.Array) -> Any:
        def back(ct: jax.Array) -> Any:
            return length * ct / jnp.sqrt(jnp.sum(ct * ct, axis=-1, keepdims=True) + 1e-4), jnp.zeros_like(length)

        return x, back

    return bent(draw, same_length, 0.05)


@entry(own_rule=True)
def feedback_alignment(draw: Draw) -> Problem:
    """Lillicrap et al. 2016: the way back goes through fixed random weights in place of the transposed ones."""
    feedback = draw(4, 5, scale=0.6)

    @jax.custom_vjp
    def layer(x: jax.Array, w: jax.Array, strength: jax.Array) -> jax.Array:
        del strength
        return x @ w

    def back(saved: Any, ct: jax.Array) -> Any:
        x, strength = saved
        return strength * ct @ feedback, x.T @ ct, jnp.zeros_like(strength)

    layer.defvjp(lambda x, w, s: (x @ w, (x, s)), back)

    def loss(p: Any, strength: Any, batch: Any) -> jax.Array:
        x, y = batch
        return mse(jnp.tanh(layer(features(p, x), p["m"], strength)) @ p["v"], y)

    params = {"w": draw(3, 5, scale=0.7), "b": draw(5, scale=0.1), "m": draw(5, 4, scale=0.6), "v": draw(4)}
    return Problem(loss, params, draw.number(0.8), (draw.rows(6, 3), draw.rows(6)))


@entry(own_rule=True)
def another_slope(draw: Draw) -> Problem:
    """`custom_jvp`: tanh on the way out, a wider bell as its derivative (Zenke and Ganguli 2018), the width in theta."""

    @jax.custom_jvp
    def activation(x: jax.Array, width: jax.Array) -> jax.Array:
        del width
        return jnp.tanh(x)

    @activation.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        x, width = primals
        return jnp.tanh(x), tangents[0] / (1 + width * x * x)

    def loss(p: Any, width: Any, batch: Any) -> jax.Array:
        x, y = batch
        return mse(jnp.sin(activation(x @ p["w"] + p["b"], width)) @ p["v"], y)

    return Problem(loss, mlp(draw), draw.number(0.5), (draw.rows(6, 3), draw.rows(6)))


@entry(own_rule=True)
def rule_in_a_recurrence(draw: Draw) -> Problem:
    """The cotangent is cut softly at each step of a scan, which is rematerialized."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def softly(power: int, h: jax.Array, bound: jax.Array) -> jax.Array:
        return h

    softly.defvjp(
        lambda power, h, bound: (h, bound),
        lambda power, bound, ct: (ct / (1 + (ct / bound) ** power) ** (1 / power), jnp.zeros_like(bound)),
    )

    def loss(p: Any, bound: Any, batch: Any) -> jax.Array:
        x, y = batch
        cell = jax.checkpoint(lambda h, x: (softly(2, jnp.tanh(x @ p["w"] + h @ p["u"]), bound), None))
        last, _ = jax.lax.scan(cell, jnp.zeros((4, 3), x.dtype), x)
        return mse(last @ p["v"], y)

    params = {"w": draw(3, 3, scale=0.6), "u": draw(3, 3, scale=0.6), "v": draw(3)}
    return Problem(loss, params, draw.number(0.1), (draw.rows(4, 4, 3), draw.rows(4)))


@entry(own_rule=True, smooth=False)
def rule_behind_a_branch(draw: Draw) -> Problem:
    """Gradient reversal under `vmap`, `cond` and an inner jit, for some of the batches only."""

    def loss(p: Any, strength: Any, batch: Any) -> jax.Array:
        x, which, y = batch
        back = jax.jit(jax.vmap(turned, (0, None)))
        hidden = features(p, x)
        hidden = jax.lax.cond(which > 0, lambda h: back(h, strength), lambda h: h, hidden)
        return mse(jnp.sin(hidden) @ p["v"], y)

    return Problem(loss, mlp(draw), draw.number(0.3), (draw.rows(6, 3), draw.integers(3), draw.rows(6)))


@entry(own_rule=True)
def equinox_rule(draw: Draw) -> Problem:
    """`eqx.filter_custom_vjp`: a pytree whose cotangents are damped where they are large."""

    @eqx.filter_custom_vjp
    def damped(given: Any) -> Any:
        return given[0]

    @damped.def_fwd
    def _(perturbed: Any, given: Any) -> Any:
        return given[0], None

    @damped.def_bwd
    def _(residuals: Any, ct: Any, perturbed: Any, given: Any) -> Any:
        strength = given[1]
        return jax.tree.map(lambda c: c / (1 + strength * c * c), ct), jnp.zeros_like(strength)

    def loss(p: Any, strength: Any, batch: Any) -> jax.Array:
        x, y = batch
        hidden, again = damped(((features(p, x), x @ p["w"]), strength))
        return mse(hidden @ p["v"] + again.sum(axis=-1), y)

    return Problem(loss, mlp(draw), draw.number(3.0), (draw.rows(6, 3), draw.rows(6)), rate=0.1)


@entry(own_rule=True)
def optax_scaled_gradient(draw: Draw) -> Problem:
    """`optax.scale_gradient` between a trunk and two heads."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        hidden = features(p, x)
        first, second = hidden @ p["v"], jnp.sin(optax.scale_gradient(hidden, -0.5)) @ p["d"]
        return mse(first, y) + theta * mse(second, y**2)

    params = {**mlp(draw), "d": draw(5, scale=0.6)}
    return Problem(loss, params, draw.number(0.5), (draw.rows(6, 3), draw.rows(6)), rate=0.1)


@entry(own_rule=True)
def rule_in_the_evidence(draw: Draw) -> Problem:
    """Running statistics of what a bent gradient flows through; the validation value reads them."""

    def loss(p: Any, strength: Any, batch: Any) -> Any:
        x, y = batch
        hidden = turned(features(p, x), strength)
        centre = hidden.mean(axis=0)
        return mse(jnp.sin(hidden - centre) @ p["v"], y) + 0.01 * squares(p), {"mean": scaled(centre, 2 * strength)}

    value = lambda trained: jnp.sum(jnp.sin(trained.statistics["mean"] + trained.params["b"]))  # noqa: E731
    statistics = hg.Statistics({"mean": draw.full(0.1, 5)}, decay=0.8)
    data = (draw.rows(6, 3), draw.rows(6))
    return Problem(loss, mlp(draw), draw.number(0.4), data, value, statistics)
