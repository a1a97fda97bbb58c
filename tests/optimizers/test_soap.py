"""SOAP against its update in plain NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long

import hypergrad as hg
from experiments import _quick
from hypergrad.optimizers.roots import eigenvectors


DECAY = 0.875


def by_numpy(w: np.ndarray, gradients: np.ndarray, rate: float, every: int, sides: tuple[bool, bool]) -> np.ndarray:
    p, q = np.eye(w.shape[0]), np.eye(w.shape[1])
    left, right, m, s = np.zeros_like(p), np.zeros_like(q), np.zeros_like(w), np.zeros_like(w)
    w = w.copy()
    for t, g in enumerate(gradients):
        left, right = DECAY * left + (1 - DECAY) * g @ g.T, DECAY * right + (1 - DECAY) * g.T @ g
        if t >= 1 and (t - 1) % every == 0:
            p = np.linalg.eigh(left)[1] if sides[0] else p
            q = np.linalg.eigh(right)[1] if sides[1] else q
        m = DECAY * m + (1 - DECAY) * g
        s = DECAY * s + (1 - DECAY) * (p.T @ g @ q) ** 2
        correct = 1 - DECAY ** (t + 1)
        w -= rate * p @ ((p.T @ m @ q / correct) / (np.sqrt(s / correct) + 1e-8)) @ q.T
    return w


@pytest.mark.parametrize(
    ("shape", "every", "sides"),
    [long((4, 4), 1, (True, True)), ((4, 4), 4, (True, True)), ((4, 6), 1, (True, False))],
    ids=str,
)
def test_it_is_adam_in_the_eigenbasis(shape: tuple[int, int], every: int, sides: tuple[bool, bool]) -> None:
    """To what the link of the basis keeps of the basis before."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        start, gradients = rng.normal(size=shape), rng.normal(size=(25, *shape))
        rule = hg.SOAP(0.01, DECAY, DECAY, factor_decay=DECAY, every=every, max_size=5)
        run = hg.train(lambda w, _, g: jnp.vdot(g, w), jnp.asarray(start), rule, hg.stacked(jnp.asarray(gradients)))
        np.testing.assert_allclose(run.params, by_numpy(start, gradients, 0.01, every, sides), atol=2e-5)


def test_what_is_no_matrix_is_left_to_adamw() -> None:
    rule, adamw = hg.SOAP(0.01, 0.9, 0.99, weight_decay=0.1), hg.AdamW(0.01, 0.9, 0.99, weight_decay=0.1)

    def along(rule: Any) -> hg.Trained:
        return hg.train(lambda w, _, g: jnp.sum(g * w), jnp.ones(5), rule, hg.full_batch(jnp.arange(5.0)), steps=20)

    np.testing.assert_allclose(along(rule).params, along(adamw).params, rtol=1e-6)


@pytest.mark.long
def test_it_keeps_the_contract() -> None:
    hg.testing.check_optimizer(hg.SOAP(0.01, weight_decay=0.1, every=3), {"b": jnp.ones(2), "w": jnp.ones((2, 3))})


def two_layers(w: Any, _: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch[0] @ w["w1"]) @ w["w2"] - batch[1]) ** 2)


def one_layer(w: Any, _: Any, batch: Any) -> jax.Array:
    """Half of what the compiler has to do for two."""
    return jnp.mean((jnp.tanh(batch[0] @ w["w1"]) - batch[1]) ** 2)


@pytest.mark.long
@pytest.mark.of_bits
@pytest.mark.parametrize(("error", "names"), [(one_layer, ["w1"]), long(two_layers, ["w1", "w2"])])
def test_hypergradients_are_those_of_the_unrolled_run_and_of_differences(error: Any, names: list[str]) -> None:
    """The rate, the means and the decay of the factors, through the eigenvectors, which square gradients determine."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        weights = {name: jnp.asarray(rng.normal(size=(4, 4))) for name in names}
        data = hg.full_batch((jnp.asarray(rng.normal(size=(30, 4))), jnp.asarray(rng.normal(size=(30, 4)))))
        rule = jax.tree.map(jnp.asarray, hg.SOAP(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-7, 2.0**-3, 1 - 2.0**-5, every=2))

        def end(rule: hg.SOAP, adjoint: Any) -> jax.Array:
            return hg.train(error, weights, rule, data, steps=12, adjoint=adjoint).losses[-1]

        found = jax.jit(jax.grad(lambda rule: end(rule, hg.Reversible())))(rule)
        # An oracle need not have the bits of anything.
        oracle = jax.jit(jax.grad(lambda rule: end(rule, hg.Unrolled())), compiler_options=_quick.OPTIONS)
        expected = oracle(rule)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-7)
        of_rule = lambda rule: end(rule, hg.Reversible())  # noqa: E731
        hg.testing.check_hypergradient(of_rule, rule, gradient=found, tolerance=1e-4, step=2.0**-14)


def test_the_status_says_where_there_is_no_derivative() -> None:
    run = hg.train(lambda w, _, x: jnp.sum((w - x) ** 2), jnp.ones((4, 2)), hg.SOAP(0.01), hg.full_batch(0.5), steps=2)
    assert "hg.SOAP's basis where a factor has not full rank" in run.status.approximate[0]


def test_eigenvectors_have_a_finite_derivative_where_eigenvalues_meet() -> None:
    slope = jax.jacobian(eigenvectors)(jnp.diag(jnp.array([1.0, 1.0, 2.0])))
    assert jnp.isfinite(slope).all()


@pytest.mark.parametrize("options", [{"every": 0}, {"max_size": 0}], ids=str)
def test_options_that_make_no_sense_are_errors(options: Any) -> None:
    with pytest.raises(ValueError, match="hg.SOAP: `.*` must be an int of at least 1; got 0"):
        hg.SOAP(0.1, **options)
