"""Microbatches and rules that read more of a batch than its gradient: what they read is a mean over the parts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer


ROWS, STEPS = 16, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, ROWS, 3))
START = {"a": RNG.normal(size=(3, 4)), "b": RNG.normal(size=4)}
LABELS = RNG.integers(0, 4, (STEPS, ROWS))


def classified(w: Any, theta: Any, batch: Any) -> jax.Array:
    """Whose program has numbers of Python in it."""
    x, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ w["a"] + theta) * w["b"], labels).mean()


@pytest.mark.parametrize(
    ("rule", "of_rows"),
    [
        long(lambda rate: hg.DiagonalGGN(rate), True),
        long(lambda rate: hg.SophiaG(rate, gamma=10.0), False),
        long(lambda rate: hg.partition({"a": hg.KFAC(rate), "b": hg.SGD(rate)}, {"a": "a", "b": "b"}), False),
        long(lambda rate: hg.partition({"a": hg.KFLR(rate), "b": hg.SGD(rate)}, {"a": "a", "b": "b"}), True),
    ],
    ids=["DiagonalGGN", "SophiaG", "KFAC", "KFLR"],
)
def test_what_else_a_rule_reads_is_a_mean_over_the_parts(rule: Any, of_rows: bool) -> None:
    """One that is a mean over rows is the batch's; what is drawn differs, since each part draws for itself."""

    def end(h: Any, microbatches: Any, adjoint: Any) -> jax.Array:
        batches = hg.stacked((jnp.asarray(X), jnp.asarray(LABELS)))
        done = hg.train(classified, h["w"], rule(h["rate"]), batches, theta=h["theta"], microbatches=microbatches,
                        adjoint=adjoint)  # fmt: skip
        return jnp.sum(jnp.sin(done.params["a"])) + jnp.sum(done.losses)

    with jax.enable_x64(True):
        start = {"a": jnp.asarray(START["a"]), "b": jnp.asarray(START["b"])}
        h = {"w": start, "rate": jnp.float64(0.1), "theta": jnp.float64(0.05)}
        of = lambda m, adjoint: jax.jit(jax.value_and_grad(lambda h: end(h, m, adjoint)))(h)  # noqa: E731
        ours = of(4, hg.Reversible())
        near = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
        jax.tree.map(near, ours, of(None if of_rows else 4, hg.Unrolled()))
        assert of_rows or ours[0] != end(h, None, hg.Unrolled())


@jax.custom_vjp
def cut_off(x: Any) -> Any:
    return jnp.sin(x)


cut_off.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1e-3, 1e-3) * jnp.cos(x),))


class Following(Optimizer):
    """Parameters that follow a signal alone: the gradient of the loss."""

    learning_rate: Any
    signals = {"slope": lambda loss, w, theta, batch, key: jax.grad(loss)(w, theta, batch)}
    chain = (
        Link("v", lambda h, z, g: g, decay="decay", signal="slope"),
        Link("params", lambda h, z: -h.learning_rate * z.v),
    )
    decay: Any = 0.5


@pytest.mark.long
def test_a_rule_that_is_not_linear_sees_the_share_of_a_part_in_signals_too() -> None:
    def bent(w: Any, theta: Any, x: Any) -> jax.Array:
        return jnp.mean((x @ w) ** 2) * (1 + cut_off(theta))

    def end(theta: Any, adjoint: Any) -> jax.Array:
        done = hg.train(bent, jnp.ones(3), Following(0.1), hg.stacked(jnp.asarray(X[:3])), theta=theta, microbatches=4,
                        adjoint=adjoint)  # fmt: skip
        return jnp.sum(done.params**2)

    with jax.enable_x64(True):
        ours, unrolled = (
            jax.jit(jax.grad(functools.partial(end, adjoint=a)))(0.3) for a in (hg.Reversible(), hg.Unrolled())
        )
        np.testing.assert_allclose(ours, unrolled, rtol=1e-9)
