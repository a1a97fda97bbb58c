"""Curvature has the derivative that differences give, where a probability is zero, eigenvalues are equal, or a weight is."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import some_of

import hypergrad as hg
from hypergrad.curvature import quantities
from hypergrad.curvature._passes import diagonalized


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


X, Y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2))), jnp.asarray([1, 0])
ROWS = jnp.asarray([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
ENDS: dict[str, Any] = {
    "softmax": lambda f, theta, y: optax.softmax_cross_entropy_with_integer_labels(f, y).mean(),
    "sigmoid": lambda f, theta, y: optax.sigmoid_binary_cross_entropy(f, ROWS[y]).mean(),
    "by hand": lambda f, theta, y: jnp.mean(
        jax.scipy.special.logsumexp(f, -1) - jnp.take_along_axis(f, y[:, None], -1)[:, 0]
    ),
    "weighted": lambda f, theta, y: (optax.softmax_cross_entropy_with_integer_labels(f, y) * theta[y]).mean(),
    "cubes": lambda f, theta, y: jnp.mean(f**3),
}
WEIGHTS = {
    "far": jnp.asarray([[900.0, 0.0, 1.0], [0.0, 900.0, 0.0]]),  # of these classes all but one have the probability zero
    "equal": jnp.zeros((2, 3)),  # of these the Hessian has equal eigenvalues, and of cubes zeros
    "nearly equal": 1e-9 * jnp.arange(6.0).reshape(2, 3),
}


def total(end: str, quantity: str, w: Any, theta: Any) -> Any:
    loss = lambda w, theta, b: ENDS[end](b[0] @ w, theta, b[1])  # noqa: E731
    found = quantities(loss, w, theta, (X, Y), quantity)[quantity]
    return sum(jnp.sum(jnp.sin(jnp.arange(1.0, 1 + x.size)) * x.ravel()) for x in jax.tree.leaves(found))


CASES = [(end, at) for end in ENDS for at in WEIGHTS if (end, at) != ("cubes", "far")]


@some_of(("end", "at"), CASES, ("softmax", "far"), ("by hand", "nearly equal"))
def test_the_derivative_of_curvature(end: str, at: str) -> None:
    f = jax.jit(lambda w, theta: total(end, "ggn_diagonal", w, theta) + total(end, "kflr", w, theta))
    point, rng = (WEIGHTS[at], jnp.asarray([0.0, 2.0])), np.random.default_rng(1)  # one class counts nothing
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), point)
    found = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.jit(jax.grad(f, (0, 1)))(*point), direction)))
    ahead, behind = (f(*jax.tree.map(lambda x, d, s=s: x + s * d, point, direction)) for s in (1e-4, -1e-4))
    np.testing.assert_allclose(found, (ahead - behind) / 2e-4, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_a_hypergradient_through_a_saturated_model() -> None:
    loss = lambda w, theta, b: ENDS["softmax"](b[0] @ w, None, b[1])  # noqa: E731

    def value(rate: Any, adjoint: Any) -> Any:
        run = hg.train(loss, WEIGHTS["far"], hg.DiagonalGGN(rate, 0.1), hg.full_batch((X, Y)), steps=2, adjoint=adjoint)
        return loss(run.params, None, (X, Y))

    found, unrolled = (jax.grad(value)(0.05, adjoint) for adjoint in (hg.Reversible(), hg.Unrolled()))
    assert found != 0
    np.testing.assert_allclose(found, unrolled, rtol=1e-8)


def test_higher_derivatives_of_a_diagonalized_matrix_are_those_of_the_matrix() -> None:
    at, along = (
        jnp.asarray(np.diag(x) + y) for x, y in (((2.0, 2.0, 0.0, -1.0), 0), ((1.0, 0.0, 2.0, 3.0), np.ones((4, 4))))
    )

    def again(t: Any) -> Any:
        vectors, values = diagonalized(at + (t + t**2 + t**3) * along)
        return (vectors * values) @ vectors.T

    first = jax.jacfwd(again)
    for derivative, count in ((first, 1), (jax.jacfwd(first), 2), (jax.jacfwd(jax.jacfwd(first)), 6)):
        np.testing.assert_allclose(jax.jit(derivative)(0.0), count * along, atol=1e-12)
