"""`hg.to_optax` of rules that see a leaf as a matrix: a plain loop of optax has the parameters of our training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long

import hypergrad as hg


STEPS = 2
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2), "v": jnp.array([0.5, -0.2])}
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
ON_MATRICES = {"w": "muon", "v": "adamw"}


def loss(p: Any, theta: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["w"]) * p["v"] - 1) ** 2)


@pytest.mark.filterwarnings("ignore:hg.S.*leaves of fewer than two axes")
@pytest.mark.parametrize(
    "rule",
    [
        long(hg.SOAP(0.01, every=2)),
        long(hg.SOAP(0.01, every=1)),
        hg.Shampoo(0.01, every=1),
        long(hg.Shampoo(0.01, every=2, graft="adam")),
        long(hg.muon_with_adamw(0.02, labels=lambda p: ON_MATRICES)),
    ],
    ids=lambda rule: f"{type(rule).__name__}-{getattr(rule, 'every', '')}",
)
def test_a_plain_loop_has_the_parameters_of_training(rule: Any) -> None:
    optax_rule = hg.to_optax(rule, STEPS)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optax_rule.update(jax.grad(loss)(params, None, X), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optax_rule.init(PARAMS)
    for _ in range(STEPS):
        params, state = step(params, state)
    trained = hg.train(loss, PARAMS, rule, hg.full_batch(X), steps=STEPS, adjoint=hg.Unrolled()).params
    for name, w in trained.items():
        np.testing.assert_allclose(params[name], w, atol=1e-5)
