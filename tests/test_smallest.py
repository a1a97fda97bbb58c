"""The smallest runs, as people first try them: one scalar, one step, NumPy's arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long
from tiny import train

import hypergrad as hg


@pytest.mark.parametrize("theta", [None, {}])
@pytest.mark.parametrize("adjoint", [hg.Reversible(), hg.Unrolled(), long(hg.Checkpointed())])
def test_one_step_of_one_scalar_without_theta_simply_works(theta, adjoint):
    def f(w, rate):
        square = lambda params, theta, batch: params**2  # noqa: E731
        return train(loss=square, params=w, optimizer=hg.SGD(rate, 0.5), steps=1, theta=theta, adjoint=adjoint).params

    # v = -(1 - 0.5) 2 w, w' = w + rate v = w (1 - rate).
    value, grads = jax.value_and_grad(f, argnums=(0, 1))(3.0, 0.1)
    np.testing.assert_allclose([value, *grads], [2.7, 0.9, -3.0], rtol=1e-6)


def test_numpy_params_simply_work():
    # NumPy's default is float64; without x64 JAX takes it as float32, and so do we, without a warning.
    trained = train(params={"w": np.array([1.0, -2.0])})
    assert trained.params["w"].dtype == jnp.float32
    np.testing.assert_array_equal(trained.params["w"], train().params["w"])
