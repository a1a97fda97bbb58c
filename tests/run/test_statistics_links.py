"""Links that read running statistics, and are read by a transformation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hypergrad as hg


class Scaled(hg.optimizers.Optimizer):
    """v <- m v - (1 - m) g (1 + s), s the statistics."""

    learning_rate: Any
    momentum: Any = 0.5
    chain = (
        hg.optimizers.Link("velocity", lambda h, z, g: (h.momentum - 1) * g * (1 + z.statistics), decay="momentum"),
        hg.optimizers.Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


class Same(hg.optimizers.Transformed):
    reads = ("velocity",)

    @staticmethod
    def transform(h: Any, w: Any, g: Any, z: Any) -> Any:
        return g


@pytest.mark.long
def test_a_link_that_a_transformation_reads_sees_the_new_statistics_too() -> None:
    def slopes(around: Any, adjoint: Any = None) -> Any:
        def end(rate: Any, decay: Any) -> Any:
            loss = lambda w, _, x: (jnp.sum(jnp.cos(w - x)), jnp.sum(w * w))  # noqa: E731
            means = hg.Statistics(jnp.zeros(()), decay)
            made = hg.train(
                loss, jnp.arange(3.0), around(Scaled(rate)), hg.full_batch(0.3), steps=6, statistics=means,
                adjoint=adjoint or hg.Reversible(),
            )  # fmt: skip
            return jnp.sum(jnp.sin(made.params)) + made.statistics

        return jax.value_and_grad(end, (0, 1))(0.1, 0.75)

    with jax.enable_x64(True):
        plain = jax.tree.leaves(slopes(lambda rule: rule))
        for adjoint in (hg.Reversible(), hg.Unrolled()):
            np.testing.assert_allclose(jax.tree.leaves(slopes(Same, adjoint)), plain, rtol=1e-9)
