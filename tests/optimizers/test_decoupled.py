"""Weight decay beside the step: it adds up to what was asked for, however little of it there is at each step."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import some_of

import hypergrad as hg


STEPS = 1000
NOTHING = hg.full_batch(jnp.zeros(1))
QUANTUM = 2.0**-24
RULES: dict[str, Any] = {
    "AdamW": hg.AdamW,
    "Lion": hg.Lion,
    "NAdamW": hg.NAdamW,
    "AdEMAMix": hg.AdEMAMix,
    "ADOPT": hg.ADOPT,
    "Sophia": hg.Sophia,
}


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def flat(w: Any, theta: Any, batch: Any) -> jax.Array:
    """Nothing moves but by decay."""
    return 0.0 * sum(jnp.sum(x) for x in jax.tree.leaves(w))


def end(rule: Any, w: Any = 1.0, steps: int = STEPS) -> Any:
    return hg.train(flat, jax.tree.map(jnp.float64, w), rule, NOTHING, steps=steps).params


@some_of("name", RULES, "AdamW", "Lion")
@pytest.mark.parametrize("product", [1e-8, 7e-8])
def test_little_decay_adds_up(name: str, product: float) -> None:
    found = float(end(RULES[name](1e-3, weight_decay=product / 1e-3)))
    assert abs(found - (1 - product) ** STEPS) < QUANTUM


@pytest.mark.parametrize("decay", [-1e-9, np.full(3, -5e-5), hg.PerStep(np.full(STEPS, -1e-6))])
def test_weights_that_would_grow_are_an_error_however_little(decay: Any) -> None:
    with pytest.raises(hg.RangeError, match="Above 1 all grows"):
        end(hg.AdamW(1e-3, weight_decay=jax.tree.map(np.float32, decay)), np.float32(np.ones(3)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_schedule_of_rates_decays_by_their_sum(dtype: Any) -> None:
    rates = np.linspace(0.0, 2e-3, STEPS).astype(dtype)
    found = float(end(hg.AdamW(hg.PerStep(rates), weight_decay=dtype(3e-5))))
    assert abs(found - np.prod(1 - rates.astype(np.float64) * 3e-5)) < 2 * QUANTUM


def test_the_hypergradient_is_that_of_the_difference() -> None:
    of = lambda decay: end(hg.AdamW(1e-4, weight_decay=decay))  # noqa: E731
    slope, difference = jax.grad(of)(1e-4), (of(3e-4) - of(0.0)) / 3e-4
    assert abs(slope - difference) < 2 * QUANTUM / 3e-4 and abs(slope + STEPS * 1e-4) < 1e-4


def test_leaves_decay_by_their_own() -> None:
    found = end(hg.AdamW(1e-4, weight_decay={"a": 1e-4, "b": 0.0}), {"a": 1.0, "b": 1.0})
    assert abs(float(found["a"]) - (1 - 1e-8) ** STEPS) < QUANTUM and float(found["b"]) == 1.0


def test_decays_of_single_weights_are_rounded_at_every_step() -> None:
    """What rounding leaves of each is not kept: there would be one number a weight and step."""
    found = end(hg.AdamW(1e-4, weight_decay=jnp.array([1e-4, 1e-2])), jnp.ones(2))
    np.testing.assert_allclose(found, [1.0, (1 - round(1e-6 / QUANTUM) * QUANTUM) ** STEPS], rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_optax_transformation_decays_as_much(dtype: Any) -> None:
    """As `optax.adamw`, whose sum it is added to; in floats."""
    rule, w = hg.AdamW(1e-2, weight_decay=1e-6), jnp.ones(3, dtype)

    def move(to: Any) -> Any:
        return to.update(jnp.zeros(3, dtype), to.init(w), w)[0]

    np.testing.assert_allclose(move(hg.to_optax(rule)), move(optax.adamw(1e-2, weight_decay=1e-6)), rtol=1e-6)
