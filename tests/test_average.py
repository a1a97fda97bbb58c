"""Means over seeds: what has 16 bits is summed in 32."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hypergrad as hg
from hypergrad._average import Evaluated, averaged


def of_seeds(grads: Any, values: Any = (1.0, 2.0, 3.0), robust: bool = True, dtype: Any = jnp.float32) -> Evaluated:
    values = jnp.asarray(values, dtype)
    return averaged([((values, values), grads)], 3, robust, failed=False)


@pytest.mark.parametrize("robust", [False, True])
def test_sums_of_16_bits_do_not_overflow(robust: bool) -> None:
    each = np.array([[3e4] * 5, [3e4] * 5, [6e4] * 5])
    found = of_seeds({"a": jnp.asarray(each, jnp.float16)}, each[:, 0], robust, jnp.float16)
    assert found.ok.all() and found.clipped == 0
    assert found.grads["a"].dtype == found.value.dtype == found.value_error.dtype == jnp.float16
    np.testing.assert_allclose(found.grads["a"], 4e4, rtol=1e-3)
    np.testing.assert_allclose((found.value, found.monitor), 4e4, rtol=1e-3)
    np.testing.assert_allclose(found.value_error, 1e4, rtol=2e-3)
    np.testing.assert_allclose(found.gradient_error, 1e4 * np.sqrt(5), rtol=2e-3)


def test_the_norm_of_16_bits_does_not_overflow() -> None:
    slope = lambda h: jnp.sum(h * jnp.float16(4e4))  # noqa: E731
    done = hg.optimize(lambda h, key: h, slope, jnp.zeros(5, jnp.float16), meta_steps=1, meta_optimizer=optax.sgd(0.0))
    done = done.history[0]
    np.testing.assert_allclose(done.gradient_norm, 4e4 * np.sqrt(5), rtol=1e-3)


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_squares_of_what_is_large_or_small_are_not_taken(size: float) -> None:
    each = size * np.array([[1.0], [2.0], [3.0]])
    found = of_seeds({"a": jnp.asarray(each, jnp.float32)}, each[:, 0])
    np.testing.assert_allclose((found.value_error, found.gradient_error), size / np.sqrt(3), rtol=1e-5)
    done = hg.optimize(
        lambda h, key: h, lambda h: size * (h["a"] + jnp.sum(h["b"])), {"a": 1.0, "b": jnp.ones(2)}, meta_steps=1
    ).history[0]
    np.testing.assert_allclose([done.gradient_norm, *done.gradients.values()], size * np.sqrt([3, 1, 2]), rtol=1e-5)


def test_hyperparameters_without_entries_have_a_mean() -> None:
    found = of_seeds({"none": jnp.ones((3, 0))})
    assert found.grads["none"].shape == (0,) and found.gradient_error == 0
    np.testing.assert_allclose(found.value, 2.0)
