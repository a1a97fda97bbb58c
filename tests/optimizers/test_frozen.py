"""What is frozen rests, whatever is around it; and leaves without entries."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of

import hypergrad as hg


AROUND = {
    "a decay, then a norm": lambda c: hg.add_decayed_weights(
        hg.clip_by_global_norm(hg.SGD(0.3, 0.5), 0.05), {"a": c, "b": 0.0}
    ),
    "a decay": lambda c: hg.add_decayed_weights(hg.SGD(0.3, 0.5), {"a": c, "b": 0.0}),
}


@some_of("name", AROUND, "a decay, then a norm")
def test_what_is_frozen_enters_nothing_inside(name: str) -> None:
    """Neither a norm over all leaves nor its own accumulators."""
    start, data = {"a": jnp.ones(3), "b": jnp.full(3, 0.5)}, hg.full_batch(jnp.float32(0.2))
    loss = lambda p, _, x: sum(jnp.sum(jnp.cos(v - x)) for v in p.values())  # noqa: E731
    mask = {"a": True, "b": False}
    few, many = (hg.train(loss, start, hg.freeze(AROUND[name](c), mask), data, steps=4) for c in (0.0, 5.0))
    np.testing.assert_array_equal(few.params["b"], many.params["b"])
    assert not many.state["velocity"]["a"].any()


@pytest.mark.long
def test_the_average_of_what_is_frozen_stays() -> None:
    rule, start = hg.freeze(hg.ScheduleFreeAdamW(0.05, weight_decay=0.5), {"a": True, "b": False}), jnp.full(3, 0.7)
    run = hg.train(
        lambda p, _, x: jnp.sum((p["a"] + p["b"] - x) ** 2), {"a": start, "b": start}, rule, hg.full_batch(1.0), steps=9
    )
    found = rule.inner.averaged(run.params, run.state)
    np.testing.assert_allclose(found["a"], start, rtol=1e-6)
    assert (jnp.abs(found["b"] - start) > 1e-3).all()


EMPTY = [hg.Muon(0.1), hg.NorMuon(0.1), hg.Shampoo(0.1), hg.Shampoo(0.1, every=2, graft="adam"), hg.SOAP(0.1)]


@some_of("i", range(len(EMPTY)), 1)
@pytest.mark.parametrize("shape", [(0, 2), long((2, 0))], ids=str)
def test_rules_of_matrices_train_beside_a_leaf_without_entries(i: int, shape: Any) -> None:
    params = {"w": jnp.ones((3, 2)), "none": jnp.zeros(shape)}
    loss = lambda p, _, x: sum(jnp.sum((v - x) ** 2) for v in p.values())  # noqa: E731
    run = hg.train(loss, params, EMPTY[i], hg.full_batch(jnp.float32(0.5)), steps=4)
    assert run.params["none"].shape == shape and bool((run.params["w"] < 1).all())
