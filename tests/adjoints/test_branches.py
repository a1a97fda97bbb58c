"""Training in a branch of `jax.lax.cond`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from covering import some_of

import hypergrad as hg


BATCHES = hg.full_batch(jnp.array([0.2, -0.5, 0.4]))
RATES = jnp.array([0.1, 0.05])
ADJOINTS: dict[str, Any] = {
    "reversal": hg.Reversible(),
    "apart": hg.Reversible(isolate=True),
    "budget": hg.Reversible(memory_budget=300),
    "checkpoints": hg.Checkpointed(),
}


def loss(w: Any, penalty: Any, batch: Any) -> jax.Array:
    return jnp.sum((jnp.tanh(w) - batch) ** 2) + penalty * jnp.sum(w * w)


def trained(rate: Any, adjoint: Any) -> jax.Array:
    run = hg.train(loss, jnp.ones(3), hg.SGD(rate, 0.9), BATCHES, theta=0.01, steps=20, adjoint=adjoint)
    return jnp.sum(run.params**2)


def slopes(adjoint: Any, outside: bool) -> Any:
    """Of a branch that one rate of the batch takes."""
    branch = lambda r: jax.lax.cond(r > 0.07, lambda r: trained(r, adjoint), lambda r: r**2, r)  # noqa: E731
    if outside:
        return jax.grad(lambda rates: jnp.sum(jax.vmap(branch)(rates)))(RATES)
    return jax.vmap(jax.grad(branch))(RATES)


@some_of(
    ("name", "outside"),
    [(name, outside) for name in ADJOINTS for outside in (True, False)],
    ("reversal", True),
)
def test_a_branch_of_a_batch_trains(name: str, outside: bool) -> None:
    expected = jax.grad(trained)(RATES[0], hg.Unrolled()), 2 * RATES[1]
    np.testing.assert_allclose(slopes(ADJOINTS[name], outside), expected, rtol=1e-5)
