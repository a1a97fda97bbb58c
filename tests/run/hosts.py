"""What the tests of the host driver share: batches that Python loads, and training on them."""

from typing import Any

import jax
import numpy as np
from tiny import final

import hypergrad as hg


HOST = hg.Reversible(driver="host")
ROWS = np.arange(12, dtype=np.float32).reshape(6, 2) / 10
NOT_TRACED = ('driver="host"', "hg.host_batches", "jax.jit or jax.vmap", "hg.optimize(..., jit=False)")


def final_of(batches: Any, adjoint: Any = HOST, steps: int = 6) -> Any:
    return lambda params: final(params=params, batches=batches, steps=steps, adjoint=adjoint)


def assert_equal(got: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
