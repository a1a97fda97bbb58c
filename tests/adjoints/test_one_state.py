"""Many derivatives of one run go back over one state: a batch of states would have gradients of other bits, and its size."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from jax.extend.core import Jaxpr

import hypergrad as hg
from hypergrad._program_keys import programs_in


STEPS, DERIVATIVES, WEIGHTS = 3, 4, 5
DATA = hg.full_batch(jnp.linspace(-1.0, 1.0, WEIGHTS))


def results(optimizer: Any, theta: Any, adjoint: hg.Reversible) -> Any:
    loss = lambda w, theta, batch: jnp.sum(jnp.tanh(w * batch - 0.5) ** 2) + theta * jnp.sum(w**2)  # noqa: E731
    run = hg.train(loss, jnp.ones(WEIGHTS), optimizer, DATA, theta=theta, steps=STEPS, adjoint=adjoint)
    return jnp.sum(run.params) ** jnp.arange(1.0, DERIVATIVES + 1)


def integers_of_loops(program: Jaxpr, inside: bool = False) -> Iterator[tuple[int, ...]]:
    for e in program.eqns:
        loop = inside or e.primitive.name in ("scan", "while")
        yield from (x.aval.shape for x in e.outvars if inside and x.aval.dtype == np.int64 and x.aval.ndim)
        for inner in programs_in(tuple(e.params.values())):
            yield from integers_of_loops(inner, loop)


RULES = {
    "SGD": hg.SGD(jnp.float32(0.1), jnp.float32(0.9)),
    "a rate per step": hg.SGD(hg.PerStep(jnp.full(STEPS, 0.1)), 0.9),
    "HeavyBall": hg.HeavyBall(jnp.float32(0.1), 0.9),
    "Adam": hg.Adam(jnp.float32(0.1)),
    "clipped": hg.clip_by_global_norm(hg.SGD(jnp.float32(0.1), 0.9), jnp.float32(1.0)),
}


@some_of(
    ("name", "options"),
    [(name, options) for options in ({}, {"isolate": False}, {"memory_budget": "1KiB"}) for name in RULES],
    *(("clipped", {}), ("Adam", {"memory_budget": "1KiB"})),
    ids=str,
)
def test_what_is_undone_is_not_batched(name: str, options: dict[str, Any]) -> None:
    pull = jax.vjp(lambda rule, theta: results(rule, theta, hg.Reversible(**options)), RULES[name], jnp.float32(0.1))[1]
    program = jax.make_jaxpr(jax.vmap(pull))(jnp.eye(DERIVATIVES)).jaxpr
    shapes = set(integers_of_loops(program))
    assert (WEIGHTS,) in shapes and not any(shape[:1] == (DERIVATIVES,) for shape in shapes)


@pytest.mark.long
def test_seeds_within_many_derivatives_have_a_state_each() -> None:
    each = jax.vmap(lambda rate: results(hg.SGD(rate, 0.9), jnp.float32(0.1), hg.Reversible()))
    rates = jnp.array([0.1, 0.2])
    found = jax.jacrev(lambda rates: each(rates).T)(rates)
    for i, rate in enumerate(rates):
        alone = jax.jacrev(lambda rate: results(hg.SGD(rate, 0.9), jnp.float32(0.1), hg.Unrolled()))(rate)
        np.testing.assert_allclose(found[:, i, i], alone, rtol=1e-5)
    np.testing.assert_array_equal(found[:, 0, 1], 0)
