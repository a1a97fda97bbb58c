"""Products, traces, eigenvalues and inverses are those of the matrix, written out."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from networks import N, dense, ggn, gradients, hessian

from hypergrad.curvature import Operator


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def empirical(net: Any) -> Any:
    flat = jax.vmap(lambda g: ravel_pytree(g)[0])(gradients(net))
    return flat.T @ flat / N


MATRICES = {"ggn": ggn, "fisher": ggn, "hessian": hessian, "empirical_fisher": empirical}


def operator(matrix: str, **options: Any) -> Any:
    net = dense()
    return Operator(net.loss, net.params, None, net.batch, matrix, **options)


@pytest.mark.parametrize("matrix", MATRICES)
def test_products_and_diagonals(matrix: str) -> None:
    found, exact = operator(matrix), MATRICES[matrix](dense())
    v = jnp.asarray(np.random.default_rng(0).normal(size=found.shape[0]))
    np.testing.assert_allclose(found @ v, exact @ v, atol=1e-12)
    np.testing.assert_allclose(ravel_pytree(found @ ravel_pytree(dense().params)[1](v))[0], exact @ v, atol=1e-12)
    np.testing.assert_allclose(found.diagonal(), jnp.diag(exact), atol=1e-12)


def test_streamed_batches_count_by_their_examples() -> None:
    net = dense()
    parts = [jax.tree.map(lambda x, s=s: x[s], net.batch) for s in (slice(0, 2), slice(2, N))]
    found = Operator(net.loss, net.params, None, parts, "ggn", many=True)
    v = jnp.ones(found.shape[0])
    np.testing.assert_allclose(found @ v, ggn(net) @ v, atol=1e-12)
    with pytest.raises(TypeError, match="gone through once only; give a list"):
        Operator(net.loss, net.params, None, iter(parts), many=True)


def test_eigenvalues_inverse_and_trace() -> None:
    found, exact = operator("ggn"), np.asarray(ggn(dense()))
    values, vectors = found.top_eigenvalues(3)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(exact)[::-1][:3], rtol=1e-5)
    np.testing.assert_allclose(exact @ vectors, vectors * values, atol=1e-5)
    v = jnp.ones(found.shape[0])
    np.testing.assert_allclose(found.inverse(0.1)(v), np.linalg.solve(exact + 0.1 * np.eye(len(v)), v), rtol=1e-4)
    trace, error = found.trace(jax.random.key(0), 64)
    assert abs(float(trace) - np.trace(exact)) < 4 * float(error)


def test_sampled_products_average_to_the_exact_one() -> None:
    v, draws = jnp.ones(operator("ggn").shape[0]), 400
    one = jax.jit(lambda key: operator("fisher_mc", key=key) @ v)
    found = jnp.stack([one(key) for key in jax.random.split(jax.random.key(0), draws)])
    error = np.std(found, 0) / draws**0.5
    assert np.mean(np.abs(np.mean(found, 0) - ggn(dense()) @ v) < 3 * error + 1e-12) > 0.95


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: operator("kfac"), "`matrix` must be one of hessian, ggn"),
        (lambda: operator("fisher_mc"), "'fisher_mc' draws labels of the model: give it a `key`"),
        (lambda: operator("ggn").inverse(-1.0), "`damping` must not be negative"),
        (lambda: operator("ggn").top_eigenvalues(0), "`k` must be at least 1"),
        (lambda: operator("ggn") @ jnp.ones(3), "a product takes a pytree like `params`"),
        (lambda: operator("fisher_mc", key=jax.random.key(0)).diagonal(), "has no exact diagonal here"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
