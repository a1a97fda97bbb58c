"""Rules that mix the entries of a matrix come back bit for bit, at any size, in any mode, over many steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from matrix_rules import Muon, Shampoo

import hypergrad as hg


def loss(w: Any, theta: Any, t: Any) -> Any:
    """Of a matrix: smooth, another one each step."""
    n = w["w"].shape[1]
    x = jnp.cos(jnp.arange(n) * (1.0 + 0.01 * t)).astype(w["w"].dtype)
    return jnp.mean(jnp.tanh(w["w"] @ x + w["b"] - theta) ** 2) + 1e-3 * jnp.mean(w["w"] ** 2)


def params(shape: tuple[int, int], dtype: Any) -> Any:
    rng = np.random.default_rng(0)
    return {"b": jnp.zeros(shape[0], dtype), "w": jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[1]), dtype)}


def optimizer(rule: Any, rate: Any) -> Any:
    return hg.partition({"matrix": rule(rate), "rest": hg.AdamW(0.003)}, {"b": "rest", "w": "matrix"})


def value(rule: Any, shape: Any, dtype: Any, steps: int, adjoint: Any, rate: Any, theta: Any) -> Any:
    run = hg.train(
        loss,
        params(shape, dtype),
        optimizer(rule, rate),
        lambda t: t,
        theta=theta,
        steps=steps,
        adjoint=adjoint,
        throw=False,
    )
    return jnp.sum(jnp.sin(run.params["w"])) + jnp.sum(run.losses)


@pytest.mark.of_bits
@pytest.mark.parametrize(
    ("shape", "dtype", "mode"),
    [
        long((1, 1), jnp.float32, "jit"),
        long((1, 1), jnp.float64, "jit"),
        *(long((3, 5), dtype, mode) for dtype in (jnp.float32, jnp.float64) for mode in ("jit", "vmap")),
        long((3, 5), jnp.float64, "host"),
        long((3, 5), jnp.float32, "host"),
        ((7, 2), jnp.float32, "vmap"),
        long((64, 48), jnp.float64, "vmap"),
        long((64, 48), jnp.float32, "vmap"),
        long((64, 48), jnp.float32, "host"),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else str(x),
)
def test_newton_schulz_comes_back_at_any_size(shape: tuple[int, int], dtype: Any, mode: str) -> None:
    """A derivative that is not NaN is one whose run came back."""
    with jax.enable_x64(dtype == jnp.float64):
        adjoint = hg.Reversible(driver="host") if mode == "host" else hg.Reversible()
        gradient = jax.grad(functools.partial(value, Muon, shape, dtype, 4, adjoint), (0, 1))
        rates, thetas = jnp.asarray([0.02, 0.03], dtype), jnp.asarray([0.1, 0.2], dtype)
        if mode == "vmap":
            found = jax.jit(jax.vmap(gradient))(rates, thetas)
        else:
            found = (gradient if mode == "host" else jax.jit(gradient))(rates[0], thetas[0])
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))


@pytest.mark.long
@pytest.mark.of_bits
@some_of("dtype", [jnp.float32, jnp.float64], jnp.float32, ids=["float32", "float64"])
def test_a_large_matrix_comes_back(dtype: Any) -> None:
    with jax.enable_x64(dtype == jnp.float64):
        gradient = jax.grad(functools.partial(value, Muon, (512, 512), dtype, 2, hg.Reversible()))
        assert jnp.isfinite(jax.jit(gradient)(jnp.asarray(0.02, dtype), jnp.asarray(0.1, dtype)))


@pytest.mark.long
@pytest.mark.of_bits
@some_of("rule", [Muon, Shampoo], Muon)
def test_a_thousand_steps_come_back(rule: Any) -> None:
    """Under jit and vmap, in float64, where the derivative is that of the unrolled run."""
    with jax.enable_x64(True):
        of = lambda adjoint: jax.grad(functools.partial(value, rule, (4, 3), jnp.float64, 1000, adjoint), (0, 1))  # noqa: E731
        rates, thetas = jnp.array([0.002, 0.004]), jnp.array([0.1, 0.3])
        found = jax.jit(of(hg.Reversible()))(rates[0], thetas[0])
        batched = jax.jit(jax.vmap(of(hg.Reversible())))(rates, thetas)
        expected = jax.jit(of(hg.Unrolled()))(rates[0], thetas[0])
        for x, xs, y in zip(found, batched, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-8)
            np.testing.assert_allclose(xs[0], y, rtol=1e-8)
            assert jnp.isfinite(xs).all()
