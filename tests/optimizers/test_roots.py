"""Inverse powers of matrices: right, and with derivatives that are finite where eigenvalues meet or vanish."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value, some_of

from hypergrad._cpu_kernels import careless, eigh
from hypergrad.optimizers.roots import eigenvectors, inverse_power, inverse_root


@pytest.fixture(autouse=True)
def float64() -> Any:
    with jax.enable_x64(True):
        yield


def positive(n: int, seed: int = 0) -> np.ndarray:
    half = np.random.default_rng(seed).normal(size=(n, n))
    return half @ half.T + 0.1 * np.eye(n)


def ridged(a: jax.Array) -> jax.Array:
    return a + 1e-3 * jnp.eye(a.shape[-1])


MATRICES = {
    "positive": positive(4),
    "identity": np.eye(4),
    "zero": np.zeros((4, 4)),
    "rank one": np.outer(*[np.arange(1.0, 5)] * 2),
    "two equal": np.diag([1.0, 1.0, 2.0, 3.0]),
    "nearly equal": np.diag([1.0, 1 + 1e-9, 1 + 1e-3, 3.0]),
}


@every_value("p, n", [1, 2, 4, 6], [1, 2, 7])
def test_both_are_roots(p: int, n: int) -> None:
    a = positive(n)
    for root in (lambda a: inverse_power(a, 1 / p), lambda a: inverse_root(a, p, steps=60)):
        np.testing.assert_allclose(np.linalg.matrix_power(jax.jit(root)(a), p) @ a, np.eye(n), atol=1e-9)
    stacked, alone = (jax.jit(lambda x: inverse_power(x, 1 / p))(x) for x in (np.stack([a, 2 * a]), 2 * a))
    np.testing.assert_allclose(stacked[1], alone, rtol=1e-12)


@pytest.mark.parametrize("function", [lambda a: inverse_power(a, 0.25, 1e-3), eigenvectors, eigh])
def test_eigenvalues_are_taken_of_one_matrix_after_the_other(function: Any) -> None:
    """A batch of them waits for the threads that it runs on, and never ends where another does so too."""
    along = lambda a: jax.jvp(function, (a,), (a,))  # noqa: E731
    batch = jnp.stack([jnp.asarray(positive(3, seed=i)) for i in range(6)]).reshape(2, 3, 3, 3)
    program = jax.make_jaxpr(jax.vmap(jax.vmap(along)))(batch)
    assert not careless(program.jaxpr)
    found = jax.jit(jax.vmap(jax.vmap(along)))(batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1, 2], y, atol=1e-9), found, jax.jit(along)(batch[1, 2]))


def test_eigenvalues_have_the_derivative_that_jax_gives_them() -> None:
    a, along = jnp.asarray(positive(4)), jnp.asarray(positive(4, seed=1))
    ours, theirs = (jax.jvp(f, (a,), (along,)) for f in (eigh, lambda a: tuple(jnp.linalg.eigh(a))))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12), ours, theirs)
    back = [jax.grad(lambda a, f=f: jnp.sum(jnp.sin(f(a)[1]) * jnp.arange(4)))(a) for f in (eigh, jnp.linalg.eigh)]
    np.testing.assert_allclose(back[0] + back[0].T, back[1] + back[1].T, atol=1e-12)


def differences(f: Any, a: Any, along: Any) -> np.ndarray:
    """Central, extrapolated once."""
    f = jax.jit(f)
    half, whole = ((f(a + e * along) - f(a - e * along)) / (2 * e) for e in (1e-6, 2e-6))
    return np.asarray((4 * half - whole) / 3)


@every_value("name, e", MATRICES, [1 / 4, 1 / 2, 0.3, 1.0])
def test_the_derivative_is_that_of_differences_also_at_ties_and_zeros(name: str, e: float) -> None:
    a = jnp.asarray(MATRICES[name])
    along = jnp.asarray(positive(4, seed=1))
    f = lambda a: inverse_power(ridged(a), e)  # noqa: E731
    ahead = jax.jit(lambda a: jax.jvp(f, (a,), (along,))[1])(a)
    np.testing.assert_allclose(ahead, differences(f, a, along), atol=1e-6 * np.abs(ahead).max())


@some_of("name", MATRICES, "positive", "two equal", "zero")
def test_both_modes_agree_and_are_finite(name: str) -> None:
    a, e = ridged(jnp.asarray(MATRICES[name])), jnp.asarray(0.25)
    seed, along = jnp.asarray(positive(4, seed=2)), (jnp.asarray(positive(4, seed=3)), jnp.asarray(0.7))
    back = jax.jit(lambda *x: jax.vjp(inverse_power, *x)[1](seed))(a, e)
    ahead = jax.jit(lambda *x: jax.jvp(inverse_power, x, along)[1])(a, e)
    assert jnp.isfinite(back[0]).all()
    np.testing.assert_allclose(jnp.vdot(back[0], along[0]) + back[1] * along[1], jnp.vdot(seed, ahead), rtol=1e-9)


def test_the_derivative_in_the_exponent_is_that_of_differences() -> None:
    a = jnp.asarray(positive(5))
    slope = jax.jit(jax.jacfwd(lambda e: inverse_power(a, e)))(jnp.asarray(0.3))
    numeric = differences(lambda e: inverse_power(a, e), jnp.asarray(0.3), jnp.asarray(1.0))
    np.testing.assert_allclose(slope, numeric, rtol=1e-7, atol=1e-9)


def test_the_iteration_has_the_derivative_of_the_root() -> None:
    a, along = jnp.asarray(positive(5)), jnp.asarray(positive(5, seed=1))
    of = lambda root: jax.jit(lambda a: jax.jvp(root, (a,), (along,))[1])(a)  # noqa: E731
    by_steps, by_eigenvalues = of(lambda a: inverse_root(a, 4, steps=60)), of(lambda a: inverse_power(a, 0.25))
    np.testing.assert_allclose(by_steps, by_eigenvalues, rtol=1e-8, atol=1e-8)


@some_of("name", MATRICES, "positive", "two equal", "zero")
def test_a_ridge_is_the_same_as_in_the_matrix(name: str) -> None:
    a, e, r = jnp.asarray(MATRICES[name]), jnp.asarray(0.3), jnp.asarray(1e-3)
    inside = lambda a, e, r: inverse_power(a + r * jnp.eye(4), e)  # noqa: E731
    along = (jnp.asarray(positive(4, seed=1)), jnp.asarray(0.7), jnp.asarray(0.2))
    both = [jax.jit(lambda *x, f=f: jax.jvp(f, x, along))(a, e, r) for f in (inverse_power, inside)]
    for found, expected in zip(*both, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


@some_of("n", [2, 64, 200], 64)
def test_float32_has_no_root_above_that_of_the_ridge(n: int) -> None:
    """Gradients of few examples: most eigenvalues are zero, and come out on either side of it."""
    few = np.random.default_rng(n).normal(size=(n, 1 + n // 20)).astype(np.float32)
    a, ridge = jnp.asarray(few @ few.T), jnp.float32(1e-9)
    root, slope = jax.jit(lambda a: jax.jvp(lambda a: inverse_power(a, jnp.float32(0.25), ridge), (a,), (a,)))(a)
    assert np.linalg.norm(root, 2) < 1.001 * ridge**-0.25
    assert jnp.isfinite(slope).all()
