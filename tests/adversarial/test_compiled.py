"""How the library compiles changes no number: a loss has the gradient that JAX gives it, by whatever options."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of

import hypergrad as hg
from hypergrad import _programs as programs


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def scanned(rows: Any) -> Any:
    return jax.lax.scan(lambda h, row: (jnp.tanh(0.5 * h + row),) * 2, jnp.zeros_like(rows[0]), rows)[1]


CHANGED = {  # a row by its index, which is data
    "set": lambda p, i: p.at[i].set(0.5),
    "multiplied": lambda p, i: p.at[i].multiply(0.5),
    "added": lambda p, i: p.at[i].add(0.5),
    "swapped": lambda p, i: p.at[i].set(p[0]),
    "sliced": lambda p, i: jax.lax.dynamic_update_slice(p, jnp.full((1, 3), 0.5), (i, 0)),
    "sorted": lambda p, i: jnp.sort(p.at[i].min(0.1), axis=0),
}


def loss(how: str) -> Any:
    """Parameters that a loop reads, and of which a row is overwritten beside it."""
    return lambda p, theta, i: jnp.mean(jnp.tanh(jnp.sin(CHANGED[how](p, i)))) + theta * jnp.mean(jnp.tanh(scanned(p)))


W, INDEX = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32), 2


@pytest.mark.of_bits
@some_of("how", CHANGED, "set", "swapped", "sliced")
def test_our_options_keep_gradients(how: str) -> None:
    """The gradient and its derivative, compiled as the library does and one operation at a time."""
    w, gradient = W.astype(float), jax.grad(loss(how))
    both = lambda w, i: jax.jvp(lambda w: gradient(w, 1.3, i), (w,), (jnp.cos(w),))  # noqa: E731
    found = jax.jit(both, compiler_options=hg.compiler_options())(w, jnp.asarray(INDEX))
    for a, b in zip(found, both(w, jnp.asarray(INDEX)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)


@pytest.mark.parametrize("backend, expected", [("gpu", {"xla_gpu_exclude_nondeterministic_ops": True}), ("tpu", None)])
def test_a_gpu_adds_in_one_order(backend: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA knows the option on a CPU, too, where it changes nothing."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert hg.compiler_options.__wrapped__() == expected  # type: ignore[attr-defined]


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(programs._OPTIONS, "cpu", {"xla_of_another_version": True})
    assert hg.compiler_options.__wrapped__() is None  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.of_bits
@some_of("how", ["set", "multiplied"], "set")
def test_rows_set_by_index_beside_a_scan(how: str) -> None:
    def end(rate: Any, theta: Any, adjoint: Any) -> Any:
        rule, batches = hg.HeavyBall(rate, 0.75), hg.full_batch(jnp.asarray(INDEX))
        run = hg.train(loss(how), W.astype(float), rule, batches, theta=theta, steps=3, adjoint=adjoint)
        return jnp.sum(jnp.sin(run.params))

    found, truth = (jax.grad(end, (0, 1))(0.3, 1.3, adjoint) for adjoint in (hg.Reversible(), hg.Unrolled()))
    np.testing.assert_allclose(found, truth, rtol=1e-9)
    hypers = {"rate": jnp.asarray(0.3), "theta": jnp.asarray(1.3)}
    _, grads = hg.hypergradient(lambda h, _: end(h["rate"], h["theta"], hg.Reversible()), lambda value: value, hypers)
    np.testing.assert_allclose([grads["rate"], grads["theta"]], truth, rtol=1e-9)


def nested(p: Any, theta: Any, batch: Any) -> Any:
    """Loops and a normalization, in float32: what XLA makes of it depends on which gradients are asked for."""
    x, y = batch
    a = jax.lax.scan(lambda h, row: ((0.5 * h + row) * jax.lax.stop_gradient(jnp.tanh(0.5 * h + row)),) * 2, x[0], p["a"])[1]
    b = jax.lax.scan(lambda h, row: (1 / (2 + jnp.sin(0.5 * h + row)),) * 2, jnp.zeros(3), a * theta)[1]
    joint = jnp.mean(jnp.tanh(jax.nn.standardize(p["b"], axis=1, epsilon=0.1) - y.max())) + 1.3 * jnp.mean(jnp.tanh(b))
    joint = joint + 1.6 * jnp.mean(jnp.tanh(jnp.sum(x, axis=1) / 2))
    penalty = 0.1 * sum(jnp.mean((w - 0.2) ** 2) for w in p.values()) + 0.3 * theta * jnp.mean(p["a"] ** 2)
    return joint + jnp.sin(2 * joint) + penalty


@pytest.mark.long
@pytest.mark.of_bits
@some_of(("frozen", "steps"), list(itertools.product([None, "a", "b"], [1, 7])), ("b", 1))
def test_frozen_leaves_and_single_steps_come_back(frozen: str | None, steps: int) -> None:
    """A gradient that nobody reads on the way back, and a loop of one step, of which XLA makes none: both are reversed."""
    rng = np.random.default_rng(4)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    with jax.enable_x64(False):
        params, batch = {"a": draw(3, 3), "b": draw(2, 3)}, hg.full_batch((draw(4, 3), draw(4)))
        rule = hg.RMSProp(0.05)
        if frozen is not None:
            rule = hg.freeze(rule, {name: name != frozen for name in params})

        def end(theta: Any) -> Any:
            adjoint = hg.Reversible(driver="scan", isolate=True)
            run = hg.train(nested, params, rule, batch, theta=theta, steps=steps, adjoint=adjoint)
            return sum(jnp.sum(w) for w in run.params.values())

        assert jnp.isfinite(jax.grad(end)(jnp.float32(-0.36)))
