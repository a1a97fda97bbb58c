"""What a meta-loop makes of runs that failed, where it is asked to go on."""

import math

import jax.numpy as jnp
import optax
import pytest
from covering import long
from tiny import fails

import hypergrad as hg


@pytest.mark.parametrize("seeds", [1, long(3)])
def test_a_run_that_failed_is_never_the_best(seeds: int) -> None:
    """A monitor that compares is finite where the parameters are NaN, and finds nothing wrong there."""
    off = lambda w: jnp.mean(jnp.abs(w - 2.0) > 0.5).astype(jnp.float32)  # noqa: E731
    bowl = lambda w, _, x: jnp.sum((w - x) ** 4)  # noqa: E731
    train_fn = lambda h, key: hg.train(bowl, jnp.full(2, 9.0), hg.SGD(h, 0.5), hg.full_batch(2.0), steps=20).params  # noqa: E731
    options = {"seeds_per_step": seeds, "skip_nonfinite": True, "meta_optimizer": optax.adam(2.0), "meta_steps": 5}
    result = hg.optimize(train_fn, lambda w: jnp.sum((w - 2.0) ** 2), hg.positive(1e-4), monitor_fn=off, **options)
    failed = [done for done in result.history if done.failed_seeds]
    assert failed and all(math.isnan(done.value) and math.isnan(done.monitor) for done in failed)
    assert not result.best.failed_seeds
    blind = hg.optimize(train_fn, off, hg.positive(1.0), **options | {"meta_steps": 1})
    assert math.isnan(blind.history[0].value)


def test_what_is_skipped_is_yes_or_no() -> None:
    with fails(TypeError, "`skip_nonfinite` must be True or False; got str 'no'"):
        hg.optimize(lambda h, key: h, lambda x: x**2, 1.0, skip_nonfinite="no")
