"""Every link decays by its own decay: schedules are shared by equal decays alone, and room is that of the fastest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import fails_compiled

import hypergrad as hg
from hypergrad.exact import HeadsAndWords


FULL = hg.full_batch(jnp.zeros(1))
LEAF = jnp.array([0.5, -0.5])


def loss(w: Any, theta: Any, batch: Any) -> Any:
    return sum(jnp.sum((x - 1) ** 2) for x in jax.tree.leaves(w)).astype(jnp.float32) / 2


class Power(hg.SGD):
    """Its decay is a power of what the field says."""

    power = 1

    def prepare(self, h: Any, steps: int) -> Any:
        return {**h, "momentum": h["momentum"] ** self.power}


class Second(Power):
    power = 2


class Fifth(Power):
    power = 5


def trained(start: Any, optimizer: Any) -> Any:
    return hg.train(loss, start, optimizer, FULL, steps=30).params


def test_equal_decays_of_other_denominators_have_schedules_of_their_own() -> None:
    slow = lambda b3: hg.AdEMAMix(0.1, b1=0.9, b3=b3)  # noqa: E731
    np.testing.assert_array_equal(trained(LEAF, slow(0.9)), trained(LEAF, slow(np.float32(0.9))))


@pytest.mark.long
def test_a_wide_leaf_beside_a_narrow_one_decays_as_alone() -> None:
    with jax.enable_x64(True):
        rule, wide = hg.AdamW(1.0, weight_decay=(1024.5 + 1e-6) / 2**24), LEAF.astype(jnp.float64)
        beside = trained({"a": jnp.array([0.25], jnp.float32), "b": wide}, rule)["b"]
        np.testing.assert_array_equal(beside, trained({"b": wide}, rule)["b"])


@pytest.mark.long
def test_a_decay_that_prepare_makes_is_that_of_its_own_leaf() -> None:
    both = trained({"a": LEAF, "b": LEAF}, hg.AdamW(0.03, weight_decay={"a": 0.0, "b": 0.5}))
    for name, weight_decay in (("a", 0.0), ("b", 0.5)):
        np.testing.assert_array_equal(both[name], trained({name: LEAF}, hg.AdamW(0.03, weight_decay=weight_decay))[name])


def test_a_decay_that_prepare_makes_is_that_of_its_own_rule() -> None:
    labels = {"a": "second", "b": "fifth"}
    both = trained({"a": LEAF, "b": LEAF}, hg.partition({"second": Second(0.1, 0.9), "fifth": Fifth(0.1, 0.9)}, labels))
    for name, rule in (("a", Second), ("b", Fifth)):
        np.testing.assert_array_equal(both[name], trained({name: LEAF}, rule(0.1, 0.9))[name])


@pytest.mark.long
def test_running_statistics_have_schedules_of_their_own() -> None:
    """Two scalar decays: one would be the other's if schedules were shared by all."""

    def means(names: str, decays: dict[str, float]) -> Any:
        seen = lambda w, theta, batch: (loss(w, theta, batch), dict.fromkeys(names, jnp.sum(w)))  # noqa: E731
        statistics = hg.Statistics(dict.fromkeys(names, jnp.float32(0.0)), {k: decays[k] for k in names})
        return hg.train(seen, LEAF, hg.SGD(0.1), FULL, steps=30, statistics=statistics).statistics

    decays = {"a": 0.5, "b": 0.95}
    both = means("ab", decays)
    for name in "ab":
        np.testing.assert_array_equal(both[name], means(name, decays)[name])


def test_known_decays_of_each_weight_have_room_for_the_fastest() -> None:
    """The decays are not differentiated, so that what they lose is known before."""
    start, momentum = {"a": jnp.full(3, 0.5), "b": jnp.full(3, -0.5)}, {"a": 0.99, "b": jnp.array([0.99, 0.5, 0.02])}
    loss = lambda w, _, t: sum(jnp.sum((x - jnp.sin(t)) ** 2) for x in w.values()) / 2  # noqa: E731

    def end(rate: jax.Array, adjoint: hg.Reversible) -> jax.Array:
        run = hg.train(loss, start, hg.SGD(rate, momentum), lambda t: t, steps=40, adjoint=adjoint)
        return sum(map(jnp.sum, run.params.values()))

    np.testing.assert_allclose(jax.grad(end)(0.1, hg.Reversible()), jax.grad(end)(0.1, hg.Unrolled()), rtol=1e-4)


def test_digits_that_are_left_at_the_start_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values come back; one digit of the head of Algorithm 7 is too many."""
    real = HeadsAndWords.divide_by

    def left(self: Any, digits: Any, value: Any, n: Any, denominator: int, entry: Any) -> Any:
        digits, value = real(self, digits, value, n, denominator, entry)
        return digits._replace(head=digits.head + (entry.step == 0).astype(digits.head.dtype)), value

    def end(w: jax.Array) -> jax.Array:
        loss = lambda w, _, batch: jnp.sum((w - batch) ** 2)  # noqa: E731
        rule = hg.SGD(0.1, jnp.array([0.5, 0.9]))
        return jnp.sum(hg.train(loss, w, rule, hg.full_batch(jnp.ones(1)), steps=4).params)

    monkeypatch.setattr(HeadsAndWords, "divide_by", left)
    with fails_compiled(hg.ReversalError, "velocity"):
        jax.jit(jax.grad(end))(jnp.array([1.0, -2.0]))
