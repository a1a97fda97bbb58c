"""Models that are more than a stack of layers: generative ones, sets, kernels, and what draws random numbers on the way."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.stats
import optax
from zoo import Draw, Problem, entry, mlp, mse, net, normal, squares, uniform


@entry()
def dropout(draw: Draw) -> Problem:
    """Bernoulli and Gaussian dropout, the key in the batch; the strength of the second in theta."""

    def loss(p: Any, strength: Any, batch: Any) -> jax.Array:
        x, y, key = batch
        first, second = jax.random.split(key)
        hidden = jnp.tanh(x @ p["w"] + p["b"])
        hidden = jnp.where(jax.random.bernoulli(first, jnp.float32(0.7), hidden.shape), hidden / 0.7, 0)
        return mse((hidden * (1 + strength * normal(second, hidden))) @ p["v"], y)

    return Problem(loss, mlp(draw), draw.number(0.4), (draw.rows(6, 3), draw.rows(6), draw.keys()))


@entry()
def autoencoder(draw: Draw) -> Problem:
    """A variational one: reparametrized normal draws, and the weight of the divergence in theta."""

    def loss(p: Any, beta: Any, batch: Any) -> jax.Array:
        x, key = batch
        mean, log_scale = jnp.split(jnp.tanh(x @ p["enc"]) @ p["heads"], 2, axis=-1)
        z = mean + jnp.exp(log_scale) * normal(key, mean)
        divergence = jnp.sum((mean**2 + jnp.exp(2 * log_scale) - 1) / 2 - log_scale, axis=-1)
        return jnp.mean(jnp.sum((jnp.tanh(z @ p["dec"]) - x) ** 2, axis=-1) + beta * divergence)

    params = {"enc": draw(4, 3, scale=0.5), "heads": draw(3, 4, scale=0.4), "dec": draw(2, 4, scale=0.5)}
    return Problem(loss, params, draw.number(0.5), (draw.rows(5, 4), draw.keys()), rate=0.1)


@entry()
def coupling_flow(draw: Draw) -> Problem:
    """Two affine coupling layers, a logit transform and a change of variables; a prior scale in theta."""

    def loss(p: Any, scale: Any, batch: Any) -> jax.Array:
        z, total = batch, 0.0
        for name in ("one", "two"):
            still, moved = jnp.split(z, 2, axis=-1)
            log_s, shift = jnp.split(jnp.tanh(still @ p[name]["w"]) @ p[name]["v"], 2, axis=-1)
            log_s = jnp.tanh(log_s)
            z = jnp.concatenate([moved * jnp.exp(log_s) + shift, still], axis=-1)
            total += jnp.sum(log_s, axis=-1)
        prior = jax.scipy.stats.norm.logpdf(z, scale=scale).sum(axis=-1)
        return -jnp.mean(prior + total)

    layer = lambda: {"w": draw(2, 3, scale=0.5), "v": draw(3, 4, scale=0.4)}  # noqa: E731
    return Problem(loss, {"one": layer(), "two": layer()}, draw.number(1.3), draw.rows(6, 4), rate=0.1)


@entry()
def mixture_density(draw: Draw) -> Problem:
    def loss(p: Any, floor: Any, batch: Any) -> jax.Array:
        x, y = batch
        logits, means, raw = jnp.split(net(p, x), 3, axis=-1)
        scales = floor + jax.nn.softplus(raw)
        parts = jax.scipy.stats.norm.logpdf(y[:, None], means, scales)
        return -jnp.mean(jax.nn.logsumexp(jax.nn.log_softmax(logits) + parts, axis=-1))

    return Problem(loss, mlp(draw, 3, 4, 6), draw.number(0.3), (draw.rows(6, 3), draw.rows(6)), rate=0.1)


@entry()
def deep_sets(draw: Draw) -> Problem:
    """Sums over members of a set, some of them masked; the exponent of the set's size in theta."""

    def loss(p: Any, power: Any, batch: Any) -> jax.Array:
        x, sizes, y = batch
        mask = (jnp.arange(4) < 1 + sizes[:, None]).astype(x.dtype)
        pooled = jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) * mask[..., None], axis=1) / mask.sum(axis=1)[:, None] ** power
        return mse(jnp.sin(pooled) @ p["v"], y)

    data = (draw.rows(5, 4, 3), draw.integers(4, 5), draw.rows(5))
    return Problem(loss, mlp(draw), draw.number(0.7), data)


@entry()
def kernel_ridge(draw: Draw) -> Problem:
    """Features learned through the closed form of a ridge regression with a Gaussian kernel; ridge and width in theta."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        z = jnp.tanh(x @ p["w"])
        near = jnp.exp(-theta["width"] * jnp.sum((z[:, None] - z[None]) ** 2, axis=-1))
        known = near[:4, :4] + theta["ridge"] * jnp.eye(4, dtype=x.dtype)
        return mse(near[4:, :4] @ jnp.linalg.solve(known, y[:4]), y[4:])

    theta = {"width": draw.number(0.7), "ridge": draw.number(0.3)}
    return Problem(loss, {"w": draw(3, 3, scale=0.6)}, theta, (draw.rows(7, 3), draw.rows(7)), rate=0.1)


@entry()
def random_features(draw: Draw) -> Problem:
    """Cosines of frequencies that are drawn by a fixed key, scaled by a bandwidth in theta."""

    def loss(p: Any, width: Any, batch: Any) -> jax.Array:
        x, y = batch
        key = jax.random.key(3)
        omega, phase = normal(key, jnp.ones((3, 6), x.dtype)), uniform(key, p)
        return mse(jnp.cos(width * x @ omega + 6 * phase) @ p + 0.1 * p.sum(), y) + 0.01 * p @ p

    return Problem(loss, draw(6), draw.number(0.8), (draw.rows(6, 3), draw.rows(6)))


@entry()
def equinox_mlp(draw: Draw) -> Problem:
    """`eqx.nn.MLP`, its static half closed over; a penalty for each weight in theta."""
    model = eqx.nn.MLP(3, "scalar", 4, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    shapes, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        penalties = jax.tree.map(lambda t, w: jnp.vdot(t, w * w), theta, p)
        return optax.squared_error(jax.vmap(eqx.combine(p, static))(x), y).mean() + sum(jax.tree.leaves(penalties))

    params = jax.tree.map(lambda w: draw(*w.shape, scale=0.5), shapes)
    theta = jax.tree.map(lambda w: draw.full(0.02, *w.shape), shapes)
    return Problem(loss, params, theta, (draw.rows(6, 3), draw.rows(6)))


@entry()
def learned_data(draw: Draw) -> Problem:
    """Nothing in theta but the training set itself: distilled images and soft labels."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        logits = net(p, theta["x"] + 0.1 * batch)
        return jnp.mean(optax.safe_softmax_cross_entropy(logits, jax.nn.softmax(theta["y"]))) + 0.02 * squares(p)

    return Problem(loss, mlp(draw, 3, 4, 3), {"x": draw(4, 3), "y": draw(4, 3)}, draw.rows(4, 3))


@entry()
def policy_gradient(draw: Draw) -> Problem:
    """Actions from the batch, weighed by how likely they are; weights of an entropy bonus and a value head in theta."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, reward, actions = batch
        *logits, value = jnp.moveaxis(net(p, x), -1, 0)
        chances = jax.nn.log_softmax(jnp.stack(logits, axis=-1))
        ratio = jnp.exp(jnp.take_along_axis(chances, actions[:, None], axis=1)[:, 0]) * 3
        advantage = reward - jax.lax.stop_gradient(jnp.mean(reward))
        bonus = -jnp.sum(jnp.exp(chances) * chances, axis=-1)
        return jnp.mean(theta["value"] * (value - reward) ** 2 - ratio * advantage - theta["entropy"] * bonus)

    theta = {"value": draw.number(0.5), "entropy": draw.number(0.1)}
    data = (draw.rows(6, 3), draw.rows(6), draw.integers(3, 6))
    return Problem(loss, mlp(draw, 3, 4, 4), theta, data, rate=0.1)
