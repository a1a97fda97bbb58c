"""What walks along a sequence: attention, recurrent cells by `lax.scan`, loops of a fixed length, differential equations."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.ode import odeint
from zoo import Draw, Problem, cross_entropy, entry, mse, squares


def sequences(draw: Draw) -> tuple[jax.Array, jax.Array]:
    return draw.rows(3, 5, 4), draw.rows(3)


@entry()
def rotary_attention(draw: Draw) -> Problem:
    """Causal, with rotary embeddings whose base frequency is learned."""

    def rotated(x: jax.Array, frequency: jax.Array) -> jax.Array:
        angles = jnp.arange(x.shape[1])[:, None] * frequency ** jnp.arange(2)
        first, second = jnp.split(x, 2, axis=-1)
        cosine, sine = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)

    def loss(p: Any, frequency: Any, batch: Any) -> jax.Array:
        x, y = batch
        q, k, v = (x @ p[name] for name in "qkv")
        scores = jnp.einsum("nia,nja->nij", rotated(q, frequency), rotated(k, frequency)) / 2
        scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), scores, -jnp.inf)
        return mse(jnp.mean(x + jax.nn.softmax(scores) @ v, axis=1) @ p["out"], y)

    params = {"q": draw(4, 4, scale=0.5), "k": draw(4, 4, scale=0.5), "v": draw(4, 4, scale=0.5), "out": draw(4)}
    return Problem(loss, params, draw.number(0.5), sequences(draw), rate=0.1)


@entry(smooth=False, tolerance=1e-5)  # its softmax is float32 whatever it is given
def fused_attention(draw: Draw) -> Problem:
    """`jax.nn.dot_product_attention` with two heads, a bias in theta and lengths that differ."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y, lengths = batch
        heads = (jnp.einsum("nta,ahd->nthd", x, p[name]) for name in "qkv")
        bias = -theta * jnp.abs(jnp.arange(5)[:, None] - jnp.arange(5))
        mixed = jax.nn.dot_product_attention(*heads, bias=bias[None, None], key_value_seq_lengths=1 + lengths)
        return mse(jnp.mean(mixed.reshape(*x.shape), axis=1) @ p["out"], y)

    params = {**{name: draw(4, 2, 2, scale=0.5) for name in "qkv"}, "out": draw(4)}
    return Problem(loss, params, draw.number(0.3), (*sequences(draw), draw.integers(5, 3)), rate=0.1)


@entry()
def gru(draw: Draw) -> Problem:
    def loss(p: Any, leak: Any, batch: Any) -> jax.Array:
        x, y = batch

        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            reset, update = jnp.split(jax.nn.sigmoid(x @ p["wx"] + h @ p["wh"] + p["b"]), 2, axis=-1)
            new = jnp.tanh(x @ p["nx"] + (reset * h) @ p["nh"])
            return leak * ((1 - update) * new + update * h), None

        last, _ = jax.lax.scan(cell, jnp.zeros((3, 3), x.dtype), x.swapaxes(0, 1))
        return mse(last @ p["out"], y)

    params = {
        "wx": draw(4, 6, scale=0.4), "wh": draw(3, 6, scale=0.4), "b": draw(6, scale=0.1), "nx": draw(4, 3, scale=0.4),
        "nh": draw(3, 3, scale=0.4), "out": draw(3),
    }  # fmt: skip
    return Problem(loss, params, draw.number(0.95), sequences(draw))


@entry()
def lstm(draw: Draw) -> Problem:
    """With a forget bias in theta; reversed, two steps unrolled at a time, and rematerialized."""

    def loss(p: Any, forget: Any, batch: Any) -> jax.Array:
        x, y = batch

        @jax.checkpoint
        def cell(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            i, f, o, u = jnp.split(jnp.concatenate([x, h], axis=-1) @ p["w"] + p["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f + forget) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((3, 2), x.dtype)
        _, states = jax.lax.scan(cell, (zero, zero), x.swapaxes(0, 1), reverse=True, unroll=2)
        return mse(jnp.mean(states, axis=0) @ p["out"], y)

    params = {"w": draw(6, 8, scale=0.4), "b": draw(8, scale=0.1), "out": draw(2)}
    return Problem(loss, params, draw.number(1.0), sequences(draw))


@entry()
def iterated_map(draw: Draw) -> Problem:
    """`lax.fori_loop` of a fixed length: an unrolled network with tied weights, its step size in theta."""

    def loss(p: Any, size: Any, batch: Any) -> jax.Array:
        x, y = batch
        z = jax.lax.fori_loop(0, 4, lambda i, z: z + size * jnp.tanh(z @ p["w"] + x + i * p["b"]), jnp.zeros_like(x))
        return mse(z @ p["out"], y)

    params = {"w": draw(3, 3, scale=0.5), "b": draw(3, scale=0.1), "out": draw(3)}
    return Problem(loss, params, draw.number(0.3), (draw.rows(4, 3), draw.rows(4)))


@entry()
def linear_recurrence(draw: Draw) -> Problem:
    """A diagonal state space model by `lax.associative_scan`."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        decay = jnp.exp(-theta * jax.nn.softplus(p["decay"]))
        inputs = x @ p["in"]
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        _, states = jax.lax.associative_scan(combine, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1)
        return mse(jnp.tanh(states[:, -1]) @ p["out"], y)

    params = {"decay": draw(4), "in": draw(4, 4, scale=0.4), "out": draw(4)}
    return Problem(loss, params, draw.number(0.5), sequences(draw))


@entry()
def runge_kutta(draw: Draw) -> Problem:
    """A neural differential equation: fixed steps of fourth order, their size in theta."""

    def loss(p: Any, size: Any, batch: Any) -> jax.Array:
        x, y = batch
        field = lambda z: jnp.tanh(z @ p["w"] + p["b"]) @ p["v"]  # noqa: E731

        def step(z: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            k1 = field(z)
            k2 = field(z + size / 2 * k1)
            k3 = field(z + size / 2 * k2)
            k4 = field(z + size * k3)
            z = z + size / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return z, z

        _, path = jax.lax.scan(step, x, None, length=3)
        return mse(path, y)

    params = {"w": draw(2, 4, scale=0.7), "b": draw(4, scale=0.1), "v": draw(4, 2, scale=0.6)}
    return Problem(loss, params, draw.number(0.4), (draw.rows(4, 2), draw.rows(3, 4, 2)))


# The adjoint equation is solved to the same tolerance as the equation: a gradient to that precision, which is no gradient
# of anything by the last digits.
@entry(smooth=False, own_rule=True)
def adaptive_ode(draw: Draw) -> Problem:
    """`jax.experimental.ode.odeint`: steps of a size of its own, and a custom derivative by the adjoint equation."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        field = lambda z, t, p, damping: jnp.tanh(z @ p["w"]) - damping * z * (1 + 0 * t)  # noqa: E731
        times = jnp.array([0.0, 0.5, 1.0], x.dtype)
        path = odeint(field, x, times, {"w": p["w"]}, theta, rtol=1e-3, atol=1e-3, mxstep=20)
        return mse(path[1:] @ p["out"], y)

    params = {"w": draw(2, 2, scale=0.7), "out": draw(2)}
    return Problem(loss, params, draw.number(0.5), (draw.rows(2), draw.rows(2)), rate=0.1)


@entry()
def equinox_gru(draw: Draw) -> Problem:
    """`eqx.nn.GRUCell` under `lax.scan`, and `eqx.nn.Linear`; half a module as parameters."""
    model = (eqx.nn.GRUCell(4, 3, key=jax.random.key(0)), eqx.nn.Linear(3, 2, key=jax.random.key(1)))
    shapes, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        cell, readout = eqx.combine(p, static)
        run = lambda x: jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(3, x.dtype), x)[0]  # noqa: E731
        return cross_entropy(jax.vmap(readout)(jax.vmap(run)(x)), y) + theta * squares(p)

    params = jax.tree.map(lambda w: draw(*w.shape, scale=0.4), shapes)
    return Problem(loss, params, draw.number(0.03), (draw.rows(3, 5, 4), draw.integers(2, 3)))


@entry()
def equinox_attention(draw: Draw) -> Problem:
    """`eqx.nn.MultiheadAttention` with biases, and `eqx.nn.LayerNorm`, under `vmap`."""
    attention = eqx.nn.MultiheadAttention(2, 4, use_query_bias=True, use_output_bias=True, key=jax.random.key(0))
    model = (eqx.nn.LayerNorm(4), attention)
    shapes, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        norm, attend = eqx.combine(p, static)

        def one(x: jax.Array) -> jax.Array:
            z = jax.vmap(norm)(x)
            return jnp.mean(jnp.sin(x + theta * attend(z, z, z)))

        return mse(jax.vmap(one)(x), y)

    params = jax.tree.map(lambda w: draw(*w.shape, scale=0.4), shapes)
    return Problem(loss, params, draw.number(0.7), sequences(draw))
