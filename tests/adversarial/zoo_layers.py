"""Layers that images pass: convolutions, pooling, resampling; and every normalization."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.ndimage
from zoo import Draw, Problem, cross_entropy, entry, mse, squares

import hypergrad as hg


LAYOUT = ("NHWC", "HWIO", "NHWC")


def convolve(x: jax.Array, kernel: jax.Array, padding: str = "SAME", **options: Any) -> jax.Array:
    options = {"window_strides": (1, 1), **options}
    return jax.lax.conv_general_dilated(x, kernel, padding=padding, dimension_numbers=LAYOUT, **options)


def pooled(x: jax.Array) -> jax.Array:
    """The mean over 2 x 2, by a reshape."""
    n, height, width, channels = x.shape
    return jnp.mean(x.reshape(n, height // 2, 2, width // 2, 2, channels), axis=(2, 4))


def two_convolutions(draw: Draw, activation: Any) -> Problem:
    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        for kernel, bias in (("k1", "b1"), ("k2", "b2")):
            x = pooled(activation(convolve(x, p[kernel]) + p[bias]))
        return cross_entropy(x.reshape(x.shape[0], -1) @ p["out"], y) + theta * squares(p)

    params = {
        "k1": draw(3, 3, 3, 4, scale=0.25), "b1": draw(4, scale=0.1), "k2": draw(3, 3, 4, 8, scale=0.2),
        "b2": draw(8, scale=0.1), "out": draw(32, 3, scale=0.2),
    }  # fmt: skip
    return Problem(loss, params, draw.number(1e-2), (draw.rows(4, 8, 8, 3), draw.integers(3, 4)))


@entry(alone=True)
def convolutions_silu(draw: Draw) -> Problem:
    return two_convolutions(draw, jax.nn.silu)


@entry(alone=True)
def convolutions_mish(draw: Draw) -> Problem:
    return two_convolutions(draw, jax.nn.mish)


@entry()
def strange_convolutions(draw: Draw) -> Problem:
    """Strided, dilated, depthwise and transposed, one after the other."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        x = jnp.tanh(convolve(x, p["strided"], window_strides=(2, 2)))
        x = jnp.tanh(theta * convolve(x, p["dilated"], rhs_dilation=(2, 2)))
        x = jax.nn.gelu(convolve(x, p["depthwise"], feature_group_count=2))
        x = jax.lax.conv_transpose(x, p["transposed"], (2, 2), "SAME")
        return mse(x, y)

    params = {
        "strided": draw(3, 3, 1, 2, scale=0.4), "dilated": draw(2, 2, 2, 2, scale=0.4),
        "depthwise": draw(2, 2, 1, 4, scale=0.4), "transposed": draw(2, 2, 4, 1, scale=0.4),
    }  # fmt: skip
    return Problem(loss, params, draw.number(1.1), (draw.rows(3, 6, 6, 1), draw.rows(3, 6, 6, 1)))


@entry(smooth=False)
def max_pooling(draw: Draw) -> Problem:
    """`reduce_window`, whose derivative chooses one entry of each window."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        x = convolve(x, p["kernel"]) + p["bias"]
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return mse(jnp.tanh(x).reshape(x.shape[0], -1) @ p["out"], y) + theta * squares(p)

    params = {"kernel": draw(3, 3, 1, 2, scale=0.4), "bias": draw(2, scale=0.1), "out": draw(18, scale=0.3)}
    return Problem(loss, params, draw.number(0.03), (draw.rows(4, 6, 6, 1), draw.rows(4)))


@entry()
def mean_pooling(draw: Draw) -> Problem:
    """`reduce_window` with a sum, windows that overlap, and a power mean of an exponent in theta."""

    def loss(p: Any, power: Any, batch: Any) -> jax.Array:
        x, y = batch
        x = jax.nn.softplus(convolve(x, p["kernel"]) + p["bias"]) ** power
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") / 9
        return mse((x ** (1 / power)).reshape(x.shape[0], -1) @ p["out"], y)

    params = {"kernel": draw(3, 3, 1, 2, scale=0.4), "bias": draw(2, scale=0.1), "out": draw(18, scale=0.3)}
    return Problem(loss, params, draw.number(2.0), (draw.rows(4, 6, 6, 1), draw.rows(4)), rate=0.1)


@entry(alone=True, smooth=False)
def rotated_images(draw: Draw) -> Problem:
    """An augmentation that is learned: the input is turned by an angle, with bilinear interpolation."""

    def turned(image: jax.Array, angle: jax.Array) -> jax.Array:
        rows, columns = jnp.meshgrid(jnp.arange(6) - 2.5, jnp.arange(6) - 2.5, indexing="ij")
        cosine, sine = jnp.cos(angle), jnp.sin(angle)
        places = [cosine * rows - sine * columns + 2.5, sine * rows + cosine * columns + 2.5]
        return jax.scipy.ndimage.map_coordinates(image, places, order=1, mode="constant")

    def loss(p: Any, angle: Any, batch: Any) -> jax.Array:
        images, y = batch
        x = jax.vmap(turned, (0, None))(images, angle).reshape(images.shape[0], -1)
        return cross_entropy(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"], y)

    params = {"w": draw(36, 4, scale=0.3), "b": draw(4, scale=0.1), "v": draw(4, 3, scale=0.5)}
    return Problem(loss, params, draw.number(0.3), (draw.rows(5, 6, 6), draw.integers(3, 5)))


@entry()
def resized_images(draw: Draw) -> Problem:
    """`jax.image.resize` up and down, by cubic and linear interpolation."""

    def loss(p: Any, blend: Any, batch: Any) -> jax.Array:
        x, y = batch
        n = x.shape[0]
        small, large = jax.image.resize(x, (n, 4, 4), "linear"), jax.image.resize(p["image"], (4, 4), "cubic")
        mixed = blend * small + (1 - blend) * jnp.tanh(large)
        return mse(jnp.tanh(mixed.reshape(n, -1) @ p["w"]) @ p["v"], y)

    params = {"image": draw(3, 3), "w": draw(16, 3, scale=0.4), "v": draw(3, scale=0.6)}
    return Problem(loss, params, draw.number(0.6), (draw.rows(5, 6, 6), draw.rows(5)))


def normed(draw: Draw, normalize: Any, **extra: jax.Array) -> Problem:
    """normalize(params, theta, hidden) between two layers of eight units."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        return mse(jnp.tanh(normalize(p, theta, x @ p["w"])) @ p["v"], y) + theta["l2"] * squares(p)

    params = {"w": draw(3, 8), "v": draw(8, scale=0.5), "scale": draw.full(1.0, 8), "shift": draw(8, scale=0.1)}
    theta = {"eps": draw.number(1e-2), "l2": draw.number(1e-2)}
    return Problem(loss, {**params, **extra}, theta, (draw.rows(6, 3), draw.rows(6)))


def centred(x: jax.Array, eps: jax.Array, axis: Any) -> jax.Array:
    x = x - jnp.mean(x, axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + eps)


@entry()
def layer_norm(draw: Draw) -> Problem:
    return normed(draw, lambda p, theta, x: centred(x, theta["eps"], -1) * p["scale"] + p["shift"])


@entry()
def batch_norm(draw: Draw) -> Problem:
    return normed(draw, lambda p, theta, x: centred(x, theta["eps"], 0) * p["scale"] + p["shift"])


@entry()
def group_norm(draw: Draw) -> Problem:
    def normalize(p: Any, theta: Any, x: jax.Array) -> jax.Array:
        grouped = centred(x.reshape(-1, 4, 2), theta["eps"], -1)
        return grouped.reshape(x.shape) * p["scale"] + p["shift"]

    return normed(draw, normalize)


@entry()
def rms_norm(draw: Draw) -> Problem:
    def normalize(p: Any, theta: Any, x: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + theta["eps"]) * p["scale"] + p["shift"]

    return normed(draw, normalize)


@entry()
def weight_norm(draw: Draw) -> Problem:
    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        w = p["g"] * p["w"] / jnp.linalg.norm(p["w"], axis=0)
        return mse(jnp.tanh(theta * (x @ w)) @ p["v"], y)

    params = {"w": draw(3, 5), "g": draw.full(1.0, 5), "v": draw(5, scale=0.6)}
    return Problem(loss, params, draw.number(1.3), (draw.rows(6, 3), draw.rows(6)))


@entry(smooth=False)  # a stopped gradient: the derivative is that of JAX, not that of the run
def spectral_norm(draw: Draw) -> Problem:
    """Divided by the largest singular value, of two power iterations that are not differentiated."""

    def loss(p: Any, bound: Any, batch: Any) -> jax.Array:
        x, y = batch
        u = jnp.ones(5, x.dtype)
        for _ in range(2):
            v = p["w"] @ u
            u = p["w"].T @ (v / jnp.linalg.norm(v))
            u = u / jnp.linalg.norm(u)
        u, v = jax.lax.stop_gradient((u, v / jnp.linalg.norm(v)))
        return mse(jnp.tanh(x @ (bound * p["w"] / (v @ p["w"] @ u))) @ p["v"], y)

    params = {"w": draw(3, 5), "v": draw(5, scale=0.6)}
    return Problem(loss, params, draw.number(1.5), (draw.rows(6, 3), draw.rows(6)))


@entry()
def batch_norm_statistics(draw: Draw) -> Problem:
    """Running means of the batch's statistics, which the validation value reads."""

    def normalized(p: Any, x: jax.Array, used: Any = None) -> Any:
        hidden = x @ p["w"]
        found = {"mean": hidden.mean(axis=0), "var": hidden.var(axis=0)}
        used = found if used is None else used
        return jnp.tanh((hidden - used["mean"]) / jnp.sqrt(used["var"] + 1e-2) * p["scale"]) @ p["v"], found

    def loss(p: Any, theta: Any, batch: Any) -> Any:
        x, y = batch
        prediction, evidence = normalized(p, x)
        return mse(prediction, y) + theta * squares(p), evidence

    x, y = draw(6, 3), draw(6)
    value = lambda trained: mse(normalized(trained.params, x, trained.statistics)[0], y)  # noqa: E731
    params = {"w": draw(3, 4), "v": draw(4, scale=0.5), "scale": draw.full(1.0, 4)}
    statistics = hg.Statistics({"mean": draw.full(0.0, 4), "var": draw.full(1.0, 4)}, decay=0.9)
    return Problem(loss, params, draw.number(0.03), (draw.rows(6, 3), draw.rows(6)), value, statistics)
