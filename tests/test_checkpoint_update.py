"""What a checkpoint folder knows of the meta-optimizer: its state in any form, and its update to the last number."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hypergrad as hg


def run(folder: Any, meta_steps: int, meta_optimizer: Any, hypers: Any = 1.0, train_fn: Any = lambda h, key: h) -> Any:
    return hg.optimize(
        train_fn, lambda h: h**2, hypers, meta_steps=meta_steps, meta_optimizer=meta_optimizer, checkpoint=folder
    )


def moving(update: Callable[..., Any], state: Any = ()) -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: state, lambda g, s, params=None: update(g, s))


def by_table(rate: float) -> Any:
    table = jnp.full(8, rate)
    return optax.sgd(jax.jit(lambda t: table[t]))


def by_array(rate: float) -> Any:
    array = np.full(3, -rate, np.float32)
    scaled = jax.jit(lambda g: g * jnp.asarray(array)[0])
    return moving(lambda g, s: (scaled(g), s))


def in_a_loop(rate: float) -> Any:
    table = jnp.full(8, -rate)
    scaled = jax.jit(lambda g: jax.lax.fori_loop(0, 1, lambda i, x: x * table[i], g))
    return moving(lambda g, s: (scaled(g), s))


def by_key(rate: float) -> Any:
    key = jax.random.key(int(100 * rate))
    return moving(lambda g, s: (-0.1 * g + 0.01 * jax.random.normal(key), s))


@pytest.mark.parametrize("make", [by_table, by_array, in_a_loop, by_key])
def test_arrays_that_an_update_closes_over_are_part_of_it(make: Callable[[float], Any], tmp_path: pathlib.Path) -> None:
    run(tmp_path, 1, make(0.1))
    assert len(run(tmp_path, 2, make(0.1)).history) == 2
    with pytest.raises(ValueError, match="meta_optimizer updates differently"):
        run(tmp_path, 3, make(0.2))


@pytest.mark.parametrize("count", [0, np.zeros((), np.int32), 0.0, jnp.asarray(0.0)], ids=repr)
def test_a_state_of_any_numbers_goes_on(count: Any, tmp_path: pathlib.Path) -> None:
    update = lambda g, s: (-0.1 * g / (s["n"] + 1), {"n": s["n"] + 1})  # noqa: E731
    expected = run(None, 4, moving(update, {"n": count}))
    run(tmp_path, 2, moving(update, {"n": count}))
    found = run(tmp_path, 4, moving(update, {"n": count}))
    assert [done.value for done in found.history] == [done.value for done in expected.history]
    np.testing.assert_allclose([done.hypers for done in found.history], [1, 0.8, 0.72, 0.672], rtol=1e-5)


@pytest.mark.parametrize("many", [False, True])
def test_fixed_keys_are_told_apart(many: bool, tmp_path: pathlib.Path) -> None:
    def hypers(seed: int) -> Any:
        key = jax.random.key(seed)
        return {"x": 1.0, "keys": hg.fixed(jax.random.split(key, 3) if many else key)}

    train_fn = lambda h, key: h["x"] + jax.random.normal(h["keys"][1] if many else h["keys"])  # noqa: E731
    run(tmp_path, 1, optax.sgd(0.1), hypers(1), train_fn)
    assert len(run(tmp_path, 2, optax.sgd(0.1), hypers(1), train_fn).history) == 2
    with pytest.raises(ValueError, match="holds another run: hypers.*keys.* is key<fry>"):
        run(tmp_path, 3, optax.sgd(0.1), hypers(2), train_fn)
