"""Rules for what has no derivative: rounding, thresholds, spikes and draws, with the derivative of something near them.

Differences of such a run mean nothing, since what it computes is a staircase. `hg.Unrolled` is the judge.
"""

from typing import Any

import jax
import jax.numpy as jnp
from zoo import Draw, Problem, cross_entropy, entry, mlp, mse, uniform


def quantized(draw: Draw, quantize: Any, theta: float = 0.25) -> Problem:
    """quantize(weights, theta) before each of two layers."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        hidden = jnp.tanh(x @ quantize(p["w"], theta) + p["b"])
        return mse(theta * hidden @ quantize(p["v"], theta), y)

    return Problem(loss, mlp(draw), draw.number(theta), (draw.rows(6, 3), draw.rows(6)))


@jax.custom_vjp
def rounded(x: jax.Array) -> jax.Array:
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


@jax.custom_jvp
def floored(x: jax.Array) -> jax.Array:
    return jnp.floor(x)


floored.defjvps(lambda t, out, x: t)


@entry(own_rule=True, smooth=False)
def straight_through_by_vjp(draw: Draw) -> Problem:
    return quantized(draw, lambda w, theta: rounded(w / theta) * theta)


@entry(own_rule=True, smooth=False)
def straight_through_by_jvp(draw: Draw) -> Problem:
    return quantized(draw, lambda w, theta: floored(w / theta) * theta)


@entry(smooth=False)
def straight_through_by_stopping(draw: Draw) -> Problem:
    return quantized(draw, lambda w, theta: w + jax.lax.stop_gradient(jnp.round(w / theta) * theta - w))


@entry(own_rule=True, smooth=False)
def binarized_weights(draw: Draw) -> Problem:
    """Signs of the weights; the cotangent passes where they are small (Courbariaux et al. 2016)."""

    @jax.custom_vjp
    def sign(w: jax.Array) -> jax.Array:
        return jnp.where(w >= 0, 1, -1).astype(w.dtype)

    sign.defvjp(lambda w: (sign(w), w), lambda w, ct: (jnp.where(jnp.abs(w) <= 1, ct, 0),))
    return quantized(draw, lambda w, theta: theta * sign(w), 0.6)


@entry(own_rule=True, smooth=False)
def learned_step_size(draw: Draw) -> Problem:
    """LSQ (Esser et al. 2020): the step of the quantizer is a parameter, with a cotangent of its own."""

    @jax.custom_vjp
    def quantize(w: jax.Array, step: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(w / step), -3, 3) * step

    def back(saved: Any, ct: jax.Array) -> Any:
        w, step = saved
        inside = jnp.abs(w / step) <= 3
        of_step = jnp.where(inside, jnp.round(w / step) - w / step, jnp.clip(w / step, -3, 3))
        return jnp.where(inside, ct, 0), jnp.sum(ct * of_step) / jnp.sqrt(3.0 * w.size).astype(w.dtype)

    quantize.defvjp(lambda w, step: (quantize(w, step), (w, step)), back)

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        hidden = jnp.tanh(x @ quantize(p["w"], p["step"]) + p["b"])
        return mse(theta * hidden @ quantize(p["v"], 2 * p["step"]), y)

    params = {**mlp(draw), "step": draw.number(0.2)}
    return Problem(loss, params, draw.number(1.2), (draw.rows(6, 3), draw.rows(6)), rate=0.1)


def spiking(draw: Draw, spike: Any) -> Problem:
    """Leaky neurons over time; spike(potential, sharpness) is a threshold."""

    def loss(p: Any, sharpness: Any, batch: Any) -> jax.Array:
        x, y = batch

        def step(potential: jax.Array, x: jax.Array) -> Any:
            potential = 0.8 * potential + x @ p["w"] + p["b"]
            fired = spike(potential - 0.5, sharpness)
            return potential - fired, fired

        _, fired = jax.lax.scan(step, jnp.zeros((3, 5), x.dtype), x)
        return mse(jnp.mean(fired, axis=0) @ p["v"], y)

    return Problem(loss, mlp(draw), draw.number(4.0), (draw.rows(4, 3, 3), draw.rows(3)))


@entry(own_rule=True, smooth=False)
def spikes_by_vjp(draw: Draw) -> Problem:
    @jax.custom_vjp
    def spike(x: jax.Array, sharpness: jax.Array) -> jax.Array:
        return (x > 0).astype(x.dtype)

    def back(saved: Any, ct: jax.Array) -> Any:
        x, sharpness = saved
        s = jax.nn.sigmoid(sharpness * x)
        return ct * sharpness * s * (1 - s), jnp.zeros_like(sharpness)

    spike.defvjp(lambda x, k: (spike(x, k), (x, k)), back)
    return spiking(draw, spike)


@entry(own_rule=True, smooth=False)
def spikes_by_jvp(draw: Draw) -> Problem:
    @jax.custom_jvp
    def spike(x: jax.Array, sharpness: jax.Array) -> jax.Array:
        return (x > 0).astype(x.dtype)

    @spike.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        x, sharpness = primals
        return spike(x, sharpness), tangents[0] / (1 + sharpness * jnp.abs(x)) ** 2

    return spiking(draw, spike)


@entry(smooth=False)
def gumbel_softmax(draw: Draw) -> Problem:
    """Straight through a draw (Jang et al. 2017): one-hot on the way out, soft on the way back; the key is in the batch."""

    def loss(p: Any, heat: Any, batch: Any) -> jax.Array:
        x, y, key = batch
        logits = jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]
        noise = -jnp.log(-jnp.log(uniform(key, logits)))
        soft = jax.nn.softmax((logits + noise) / heat)
        hard = jax.nn.one_hot(jnp.argmax(soft, axis=-1), 4, dtype=soft.dtype)
        return mse((soft + jax.lax.stop_gradient(hard - soft)) @ p["u"], y)

    params = {**mlp(draw, 3, 4, 4), "u": draw(4)}
    return Problem(loss, params, draw.number(0.8), (draw.rows(5, 3), draw.rows(5), draw.keys()))


@entry(own_rule=True, smooth=False)
def vector_quantization(draw: Draw) -> Problem:
    """The nearest of a few codes, straight through by a rule; the weight of commitment in theta (VQ-VAE, 2017)."""

    @jax.custom_vjp
    def nearest(z: jax.Array, codes: jax.Array) -> jax.Array:
        return codes[jnp.argmin(jnp.sum((z[:, None] - codes) ** 2, axis=-1), axis=-1)]

    nearest.defvjp(lambda z, codes: (nearest(z, codes), codes), lambda codes, ct: (ct, jnp.zeros_like(codes)))

    def loss(p: Any, commitment: Any, batch: Any) -> jax.Array:
        x, y = batch
        z = jnp.tanh(x @ p["w"])
        codes = nearest(z, p["codes"])
        chosen = p["codes"][jnp.argmin(jnp.sum((z[:, None] - p["codes"]) ** 2, axis=-1), axis=-1)]
        pull = mse(jax.lax.stop_gradient(z), chosen) + commitment * mse(z, jax.lax.stop_gradient(chosen))
        return cross_entropy(jnp.sin(codes) @ p["v"], y) + pull

    params = {"w": draw(3, 3, scale=0.7), "codes": draw(4, 3, scale=0.5), "v": draw(3, 3)}
    return Problem(loss, params, draw.number(0.25), (draw.rows(6, 3), draw.integers(3, 6)))
