"""Runs that are recorded, short ones in segments of four steps, and how they are compared."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from problems import network

import hypergrad as hg


STEPS, SEGMENT = 11, 4
NET = network("tanh")


RATES = jnp.linspace(0.1, 0.3, STEPS)
OPTIMIZERS: dict[str, Callable[[int], Any]] = {
    "sgd": lambda n: hg.SGD(hg.PerStep(RATES[:n]), 0.05),
    "adam": lambda n: hg.Adam(hg.PerStep(RATES[:n] / 10), 0.3),
    "decays of each weight": lambda n: hg.SGD(0.1, jax.tree.map(lambda w: jnp.full(w.shape, 0.1), NET.params())),
}


def options(name: str = "sgd", steps: int = STEPS, loss: Any = NET.loss, **others: Any) -> dict[str, Any]:
    given = {"loss": loss, "params": NET.params(), "optimizer": OPTIMIZERS[name](steps), "batches": drawn()}
    return given | {"theta": NET.theta(), "steps": steps} | others


def drawn(batch_size: int = 8) -> Callable[[Any], Any]:
    """For runs of any length, unlike `hg.stacked`."""
    batches = NET.batches(STEPS, batch_size)
    return lambda t: batches(t)


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(found, is_leaf=lambda x: x is None), jax.tree.leaves(expected), strict=True)
    for x, y in pairs:
        np.testing.assert_array_equal(x, y)


def numbers(trained: hg.Trained) -> Any:
    return trained.params, trained.losses, {name: x for name, x in trained.state.items() if "weight" not in name}
