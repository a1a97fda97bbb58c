"""The trainings of `effects`: gradients of all sizes, that end, come now and then, hardly move anything, and grow."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hypergrad as hg
from experiments.benchmarks.rules import rounded


Params = dict[str, Any]


class Task(NamedTuple):
    start: Params
    loss: Callable[[Params, Any, Any], jax.Array]
    batches: Any


def network(rng: np.random.Generator, unit: float) -> Task:
    """Gradients of all sizes, in a unit of the loss."""
    x, y = jnp.asarray(rng.normal(size=(32, 6))), jnp.asarray(rng.integers(0, 4, 32))
    start = {"w": jnp.asarray(0.3 * rng.normal(size=(6, 12))), "v": jnp.asarray(0.3 * rng.normal(size=(12, 4)))}

    def loss(p: Params, _: Any, batch: Any) -> jax.Array:
        scores = jnp.tanh(batch[0] @ p["w"]) @ p["v"]
        return unit * optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]).mean()

    return Task(start, loss, hg.full_batch((x, y)))


def margins(rng: np.random.Generator, unit: float) -> Task:
    """Gradients that end: a hinge loss of what can be separated."""
    x = jnp.asarray(rng.normal(size=(32, 6)))
    y = jnp.sign(x @ jnp.asarray(rng.normal(size=6)))
    loss = lambda p, _, batch: unit * jnp.mean(jnp.maximum(0.0, 0.5 - batch[1] * (batch[0] @ p["w"])) ** 2)  # noqa: E731
    return Task({"w": jnp.asarray(0.3 * rng.normal(size=6))}, loss, hg.full_batch((x, y)))


def rows(rng: np.random.Generator, unit: float) -> Task:
    """Rows of a table that are seen now and then, or once."""
    table, wanted = jnp.asarray(rng.normal(size=(16, 3))), jnp.asarray(rng.normal(size=(16, 3)))
    seen = jnp.asarray(np.minimum(rng.geometric(0.3, size=400) - 1, 15))
    loss = lambda p, _, i: unit * jnp.sum((p["w"][i] - wanted[i]) ** 2)  # noqa: E731
    return Task({"w": table}, loss, lambda step: seen[step % 400])


def bowl(rng: np.random.Generator, unit: float) -> Task:
    """Curvatures over six decades: some weights hardly move, others are there at once."""
    curvature, at = jnp.asarray(10.0 ** rng.uniform(-6, 0, 20)), jnp.asarray(rng.normal(size=20))
    loss = lambda p, _, batch: 0.5 * unit * jnp.sum(curvature * (p["w"] - at) ** 2) + 0.0 * batch[0]  # noqa: E731
    return Task({"w": jnp.asarray(rng.normal(size=20))}, loss, hg.full_batch(jnp.zeros(1)))


def growing(rng: np.random.Generator, unit: float) -> Task:
    """Gradients that grow or fall by one factor for forty steps at a time: by b2 / b1 of Adam's, or by others."""
    factor = rng.choice([0.8, 1.0, 1.1, rounded(0.999) / rounded(0.9)])
    slopes = jnp.asarray(rng.normal(size=20))
    loss = lambda p, _, t: 1e-2 * unit * factor ** (t % 40) * jnp.vdot(slopes, p["w"])  # noqa: E731
    return Task({"w": jnp.asarray(rng.normal(size=20))}, loss, lambda step: step)


TASKS = {"network": network, "margins": margins, "rows": rows, "bowl": bowl, "growing": growing}
