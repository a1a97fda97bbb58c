"""The gradient of one step and its derivative are the same on every road, whatever a loss is made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hypergrad as hg
from hypergrad._isolation import behind_branch


ROWS = np.random.default_rng(0).normal(size=(4, 8, 6))
STEPS = len(ROWS)


def weights(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    return {"a": jnp.asarray(rng.normal(size=(6, 5)) / 2, dtype), "b": jnp.asarray(rng.normal(size=(5, 5)) / 2, dtype)}


relu = jax.custom_vjp(lambda x: jnp.maximum(x, 0))
relu.defvjp(lambda x: (jnp.maximum(x, 0), x > 0), lambda positive, g: (jnp.where(positive, g, 0),))


@jax.checkpoint
def recomputed(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A jitted layer in a loop, in a function that JAX computes again for its derivative."""
    layer = jax.jit(lambda y: jnp.tanh(y @ w["b"]))
    return jax.lax.scan(lambda y, _: (layer(y), None), relu(x @ w["a"]), length=2)[0]


def winding(w: dict[str, jax.Array], theta: jax.Array, batch: Any) -> jax.Array:
    """All that a loss may be made of: random numbers, convolutions, branches, loops, derivative rules of its own."""
    x, key = batch
    kept = jax.random.bernoulli(key, 0.7, (x.shape[0], 5))
    y = jnp.where(kept, recomputed(w, x), 0)
    y = jax.lax.cond(x[0, 0] > 0, lambda y: y @ w["b"], jnp.sin, y)
    image = jax.lax.conv_general_dilated(y[None, None], w["b"][None, None, :3, :3], (1, 1), "SAME")
    return jnp.mean(image**2) + theta * jnp.sum(w["a"] ** 2) + jnp.mean(y[jnp.argsort(y[:, 0]), 1] ** 3)


def trained(loss: Any, rule: Any, adjoint: Any, w: Any, theta: Any) -> jax.Array:
    x = jnp.asarray(ROWS, w["a"].dtype)
    batches = hg.stacked((x, jax.random.split(jax.random.key(0), STEPS)))
    run = hg.train(loss, w, rule, batches, theta=theta, steps=STEPS, adjoint=adjoint)
    return sum(jnp.sum(jnp.sin(v)) for v in jax.tree.leaves(run.params)) + jnp.sum(run.losses)


@pytest.mark.long
def test_a_winding_loss_has_one_derivative() -> None:
    """Through a rule that is not linear, whose gradients are isolated."""
    with jax.enable_x64(True):

        def gradients(adjoint: Any) -> Any:
            f = lambda rate, w, theta: trained(winding, hg.Adam(rate), adjoint, w, theta)  # noqa: E731
            return jax.jit(jax.grad(f, (0, 1, 2)))(jnp.float64(0.05), weights(jnp.float64), jnp.float64(1e-2))

        got, expected = gradients(hg.Reversible()), gradients(hg.Unrolled())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10), got, expected)


def test_a_branch_gives_back_what_it_got_without_storing_it() -> None:
    x, y, other = jnp.arange(3.0), jnp.ones(3), jnp.full(3, 7.0)
    apart = lambda t, x, y: behind_branch(t >= 0, lambda x, y: (y, x + y, other, x), x, y)  # noqa: E731
    for got, expected in zip(jax.jit(apart)(jnp.int32(0), x, y), (y, x + y, other, x), strict=True):
        np.testing.assert_array_equal(got, expected)
    (branch,) = (e for e in jax.make_jaxpr(apart)(jnp.int32(0), x, y).eqns if e.primitive.name == "cond")
    assert len(branch.outvars) == 1
