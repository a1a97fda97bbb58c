"""Complex theta under microbatches: what is added up of each part is two real numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long

import hypergrad as hg


RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 16, 3))
START = RNG.normal(size=(3, 4))


def of_frequencies(w: Any, c: Any, x: Any) -> jax.Array:
    return jnp.mean(jnp.abs(jnp.tanh(x @ w["a"] * c) - 0.3) ** 2)


def with_evidence(w: Any, c: Any, x: Any) -> Any:
    return of_frequencies(w, c, x), jnp.mean(jnp.abs(x @ w["a"] * c))


@jax.custom_vjp
def same(x: Any) -> Any:
    return x


same.defvjp(lambda x: (x, None), lambda _, g: (g,))


def by_a_rule(w: Any, c: Any, x: Any) -> jax.Array:
    return same(of_frequencies(w, c, x))


@pytest.mark.parametrize(
    ("loss", "of"),
    [
        long(of_frequencies, "params"),
        (by_a_rule, "losses"),
        long(with_evidence, "statistics"),
        long(of_frequencies, "losses"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_complex_theta_keeps_its_imaginary_part(loss: Any, of: str) -> None:
    """Of each part its cotangent is added up as two real numbers, which each have a size of their own."""
    with jax.enable_x64(True):
        options = {"statistics": hg.Statistics(jnp.zeros(()), 0.75)} if of == "statistics" else {}

        def of_c(c: Any, adjoint: Any) -> jax.Array:
            given = {"theta": c, "microbatches": 4, "adjoint": adjoint}
            done = hg.train(loss, {"a": jnp.asarray(START)}, hg.SGD(0.1), hg.stacked(X), **given, **options)
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(getattr(done, of)))

        c = jnp.asarray([0.3 + 4e-7j, 1e-9 - 0.4j, 0.2j, 0.5 - 0.1j])  # one for each column
        ours, expected = (jax.grad(of_c)(c, adjoint) for adjoint in (hg.Reversible(), hg.Unrolled()))
        assert np.abs(expected.imag).min() > 1e-8
        np.testing.assert_allclose(ours.real, expected.real, rtol=1e-9)
        np.testing.assert_allclose(ours.imag, expected.imag, rtol=1e-9)
