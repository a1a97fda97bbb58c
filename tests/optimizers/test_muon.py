"""Muon and its kin: what five steps do to singular values, scales, and rows of the same size."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from classifier import batches, loss, params
from jax.test_util import check_grads

import hypergrad as hg
from hypergrad.optimizers import orthogonal
from hypergrad.optimizers.orthogonal import METHODS


orthogonalized = jax.jit(orthogonal.orthogonalized, static_argnums=1)


def matrix(rows: int, columns: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(rows, columns)), jnp.float32)


@pytest.mark.parametrize("shape", [(1, 1), (8, 5), (5, 8), (16, 16)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_singular_values_come_close_to_one(method: str, shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    values = np.linalg.svd(orthogonalized(x, method), compute_uv=False)
    assert 0.65 < values.min()
    assert values.max() < 1.21
    u, _, v = np.linalg.svd(x, full_matrices=False)
    one = np.einsum("ij,ik,kj->k", orthogonalized(x, method), u, v)
    np.testing.assert_allclose(np.sort(one), np.sort(values), atol=1e-4, err_msg="the singular vectors stay")


@pytest.mark.parametrize("method", METHODS)
def test_it_is_blind_to_size_and_finite_at_zero(method: str) -> None:
    x = matrix(4, 6)
    np.testing.assert_allclose(orthogonalized(1000 * x, method), orthogonalized(x, method), atol=1e-5)
    np.testing.assert_array_equal(orthogonalized(0 * x, method), 0 * x)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(orthogonalized(x, method) * x)))(0 * x)
    assert jnp.isfinite(slope).all()
    with jax.enable_x64(True):
        check_grads(
            lambda x: orthogonalized(x, method), (jnp.asarray(x, jnp.float64),), order=1, modes=["fwd", "rev"], rtol=1e-4
        )


def test_scales_are_those_of_the_conventions() -> None:
    along = hg.full_batch(matrix(4, 16))

    def first(scale: str) -> jax.Array:
        rule = hg.Muon(1.0, scale=scale)
        return hg.train(lambda w, _, x: jnp.vdot(x, w), matrix(4, 16), rule, along, steps=1).params

    step = matrix(4, 16) - first("none")
    np.testing.assert_allclose(matrix(4, 16) - first("width"), 2 * step, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(matrix(4, 16) - first("rms"), 0.2 * 4 * step, rtol=1e-4, atol=1e-5)


def by_numpy(start: np.ndarray, gradients: np.ndarray, rate: float, b: float, b2: float) -> np.ndarray:
    """NorMuon as its paper has it, on rows of [outputs, inputs], with the scale of Muon."""
    w, m, v = start.T.copy(), np.zeros_like(start.T), np.zeros((start.shape[1], 1))
    for g in gradients:
        m = b * m + (1 - b) * g.T
        o = np.asarray(orthogonalized(jnp.asarray(m)), np.float64)
        v = b2 * v + (1 - b2) * (o**2).mean(axis=1, keepdims=True)
        p = o / np.sqrt(v)
        w -= rate * max(1, w.shape[0] / w.shape[1]) ** 0.5 * p * np.linalg.norm(o) / np.linalg.norm(p)
    return w.T


def test_normuon_is_that_of_its_paper() -> None:
    b, b2 = 0.9375, 0.875
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        start, gradients = rng.normal(size=(4, 6)), rng.normal(size=(30, 4, 6))
        rule = hg.NorMuon(0.02, b, b2=b2)
        run = hg.train(lambda w, _, g: jnp.vdot(g, w), jnp.asarray(start), rule, hg.stacked(jnp.asarray(gradients)))
        np.testing.assert_allclose(run.params, by_numpy(start, gradients, 0.02, b, b2), rtol=1e-9)


@pytest.mark.long
def test_the_usual_split_tells_matrices_from_the_rest() -> None:
    rule = hg.muon_with_adamw(0.02, adam_learning_rate=0.003)
    run = hg.train(loss, params(), rule, batches(), steps=3)
    assert [run.state["momentum"][k] is None for k in ("w1", "b1")] == [False, True]
    assert [run.state["square"][k] is None for k in ("w1", "b1")] == [True, False]
    labels = {"w1": "muon", "b1": "adamw", "w2": "adamw", "b2": "adamw"}
    own = hg.train(loss, params(), hg.muon_with_adamw(0.02, labels=labels), batches(), steps=3)
    assert own.state["momentum"]["w2"] is None
    slopes = jax.grad(lambda rule: hg.train(loss, params(), rule, batches(), steps=3).losses[-1])(rule)
    assert slopes.rules["muon"].learning_rate != 0
    assert slopes.rules["adamw"].learning_rate != 0


@pytest.mark.parametrize("rule", [hg.Muon(0.1), hg.NorMuon(0.1)], ids=lambda x: type(x).__name__)
def test_a_leaf_that_is_no_matrix_is_an_error_with_the_cure(rule: Any) -> None:
    name = type(rule).__name__
    with pytest.raises(
        ValueError, match=rf"hg.{name} orthogonalizes matrices; a leaf of shape \(12,\) is none.*muon_with_adamw"
    ):
        hg.train(loss, params(), rule, batches(), steps=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "svd"}, "`method` must be one of 'newton_schulz', 'polar_express'; got 'svd'"),
        ({"scale": 2}, "`scale` must be one of 'width', 'rms', 'none'; got 2"),
        ({"bits": 0}, "`bits` of the gradient link must be an int from 1 to 16; got 0"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_errors(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hg.Muon(0.1, **options)
