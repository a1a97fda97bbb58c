"""Losses that transform functions themselves: branches, loops, checkpoints, inner jits, and derivatives inside the loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from zoo import Draw, Problem, entry, mlp, mse, net, squares


@entry(smooth=False)
def branches(draw: Draw) -> Problem:
    """`lax.cond` on a value of the parameters, `lax.switch` on an integer of the batch."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, which, y = batch
        hidden = x @ p["w"] + p["b"]
        hidden = jax.lax.cond(jnp.mean(hidden) > 0, lambda z: jnp.tanh(theta * z), lambda z: z / (1 + z * z), hidden)
        hidden = jax.lax.switch(which, [jnp.sin, jax.nn.softplus, lambda z: theta * z], hidden)
        return mse(hidden @ p["v"], y)

    return Problem(loss, mlp(draw), draw.number(1.3), (draw.rows(6, 3), draw.integers(3), draw.rows(6)), rate=0.1)


@entry(smooth=False)
def batched_branches(draw: Draw) -> Problem:
    """A mixture of experts, each example by its own branch: `switch` under `vmap` becomes a selection."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, which, y = batch

        def one(x: jax.Array, which: jax.Array) -> jax.Array:
            experts = [lambda x, e=e: jnp.tanh(x @ p["w"][e]) * theta[e] for e in range(3)]
            return jax.lax.switch(which, experts, x) @ p["v"]

        return mse(jax.vmap(one)(x, which), y)

    params = {"w": draw(3, 3, 4, scale=0.6), "v": draw(4, scale=0.6)}
    data = (draw.rows(6, 3), draw.integers(3, 6), draw.rows(6))
    return Problem(loss, params, draw.number([0.7, 1.0, 1.3]), data)


@entry()
def rematerialized(draw: Draw) -> Problem:
    """`jax.checkpoint` with policies, nested, and with names."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        policies = jax.checkpoint_policies

        @functools.partial(jax.checkpoint, policy=policies.dots_with_no_batch_dims_saveable)
        def first(p: Any, x: jax.Array) -> jax.Array:
            return jnp.tanh(jax.checkpoint(lambda w, x: jax.nn.gelu(x @ w) * theta)(p["w"], x) + p["b"])

        @functools.partial(jax.checkpoint, policy=policies.save_only_these_names("kept"))
        def second(v: jax.Array, h: jax.Array) -> jax.Array:
            return jnp.sin(checkpoint_name(h * h, "kept")) @ v

        return mse(second(p["v"], first(p, x)), y)

    return Problem(loss, mlp(draw), draw.number(1.4), (draw.rows(6, 3), draw.rows(6)))


@entry()
def nested_jits(draw: Draw) -> Problem:
    """Jitted functions inside jitted functions, which close over arrays of JAX and of NumPy."""
    table, weights = jnp.asarray(draw(6, 5)), np.linspace(0.5, 1.5, 6)

    @jax.jit
    def features(p: Any, x: jax.Array) -> jax.Array:
        return jax.jit(jnp.tanh)(x @ p["w"] + table * p["b"])

    @functools.partial(jax.jit, static_argnames="power")
    def weighted(errors: jax.Array, theta: jax.Array, power: int) -> jax.Array:
        return jnp.mean(jnp.asarray(weights, errors.dtype) * errors**power) + theta * jnp.sum(table[0] ** 2)

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        return weighted(theta * features(p, x) @ p["v"] - y, theta, power=2)

    return Problem(jax.jit(loss), mlp(draw), draw.number(0.9), (draw.rows(6, 3), draw.rows(6)))


@entry()
def vmapped_models(draw: Draw) -> Problem:
    """An ensemble by `vmap` over parameters, over examples by `vmap` with axes, `lax.map`, `jnp.vectorize`."""

    def loss(p: Any, spread: Any, batch: Any) -> jax.Array:
        x, y = batch
        one = lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]  # noqa: E731
        found = jax.vmap(jax.vmap(one, (None, 0)), (0, None), out_axes=1)(p, x)
        mapped = jax.lax.map(lambda row: jnp.logaddexp(row[0], row[1]), found)
        bent = jnp.vectorize(lambda r, c: r @ c, signature="(k),(k)->()")(found, found)
        return mse(jnp.mean(found, axis=1), y) - spread * jnp.mean(jnp.var(found, axis=1)) + 0.01 * jnp.mean(mapped * bent)

    params = {"w": draw(2, 3, 4, scale=0.7), "b": draw(2, 4, scale=0.1), "v": draw(2, 4, scale=0.6)}
    return Problem(loss, params, draw.number(0.1), (draw.rows(6, 3), draw.rows(6)), rate=0.1)


@entry()
def gradient_penalty(draw: Draw) -> Problem:
    """`jax.grad` with respect to the input inside the loss, as Wasserstein critics have it."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        real, fake = batch
        critic = lambda x: net(p, x)  # noqa: E731
        slopes = jax.vmap(jax.grad(critic))((real + fake) / 2)
        lengths = jnp.sqrt(jnp.sum(slopes**2, axis=-1) + 1e-6)
        return jnp.mean(jnp.tanh(critic(fake))) - jnp.mean(jnp.tanh(critic(real))) + theta * jnp.mean((lengths - 1) ** 2)

    return Problem(loss, mlp(draw), draw.number(0.8), (draw.rows(5, 3), draw.rows(5, 3)))


@entry()
def physics_informed(draw: Draw) -> Problem:
    """The residual of a differential equation: second derivatives of the network in its input, its coefficient in theta."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        points = batch
        u = lambda t: jnp.tanh(t * p["w"] + p["b"]) @ p["v"]  # noqa: E731
        residual = jax.vmap(lambda t: jax.grad(jax.grad(u))(t) + theta["stiffness"] * u(t))(points)
        return jnp.mean(residual**2) + theta["boundary"] * ((u(0.0) - 1) ** 2 + jax.jacfwd(u)(0.0) ** 2)

    params = {"w": draw(5), "b": draw(5), "v": draw(5, scale=0.5)}
    theta = {"stiffness": draw.number(1.0), "boundary": draw.number(2.0)}
    return Problem(loss, params, theta, draw.rows(6), rate=0.03)


@entry()
def sharpness_penalty(draw: Draw) -> Problem:
    """A Hessian-vector product and a `jax.linearize` inside the loss, and one unrolled inner step (MAML)."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        inner = lambda p: mse(net(p, x[:3]), y[:3])  # noqa: E731
        slope = jax.grad(inner)(p)
        adapted = jax.tree.map(lambda w, g: w - theta["inner_rate"] * g, p, slope)
        _, along = jax.linearize(jax.grad(inner), p)
        curvature = squares(along(jax.lax.stop_gradient(slope)))
        return mse(net(adapted, x[3:]), y[3:]) + theta["flat"] * curvature

    # Its gradient stops what it multiplies, so that differences are of another function.
    theta = {"inner_rate": draw.number(0.1), "flat": draw.number(0.0)}
    return Problem(loss, mlp(draw, hidden=4), theta, (draw.rows(6, 3), draw.rows(6)), rate=0.02)


@entry(smooth=False)
def semi_gradients(draw: Draw) -> Problem:
    """Temporal differences: the target is a stopped gradient of the same network; a discount in theta."""

    def loss(p: Any, discount: Any, batch: Any) -> jax.Array:
        now, later, reward = batch
        target = jax.lax.stop_gradient(reward + discount * net(p, later))
        return mse(net(p, now), target) + discount * jnp.mean(net(p, now) * jax.lax.stop_gradient(net(p, later)))

    return Problem(loss, mlp(draw), draw.number(0.9), (draw.rows(6, 3), draw.rows(6, 3), draw.rows(6)))


@entry()
def honest_rules(draw: Draw) -> Problem:
    """Derivative rules of their own which give the derivative: a stable log(1 + e^x), a norm that is safe at zero."""

    @jax.custom_jvp
    def log1pexp(x: jax.Array) -> jax.Array:
        return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)

    log1pexp.defjvps(lambda t, out, x: jax.nn.sigmoid(x) * t)

    @jax.custom_vjp
    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(x * x) + 1e-6)

    norm.defvjp(lambda x: (norm(x), x), lambda x, ct: (ct * x / jnp.sqrt(jnp.sum(x * x) + 1e-6),))

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        return mse(net(p, x, log1pexp), y) + theta * norm(p["w"].ravel()) + theta * jax.vmap(norm, 1)(p["w"]).sum()

    return Problem(loss, mlp(draw), draw.number(0.1), (draw.rows(6, 3), draw.rows(6)))
