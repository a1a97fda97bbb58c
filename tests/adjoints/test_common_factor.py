"""Of linear rules products with the Jacobian are taken along the cotangent of the one link, and its factor comes after."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from covering import some_of

import hypergrad as hg
from hypergrad.adjoints import backward
from hypergrad.optimizers import Link


NET = problems.network("tanh")
STEPS = 5


class Coupled(hg.SGD):
    """v <- m v - (1 - m) (g + w): its link reads the parameters."""

    chain = (
        Link("velocity", lambda h, z, g: (h.momentum - 1) * (g + z.params), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )
    linear = True
    entrywise = True


def each(value: float, other: float) -> dict[str, float]:
    return {name: value if i else other for i, name in enumerate(NET.weights)}


RULES: dict[str, tuple[Any, bool | None]] = {  # a rule, and whether all weights have one factor; None: not asked
    "one momentum": (hg.SGD(0.5, 0.75), True),
    "a rate for each leaf": (hg.SGD(each(0.5, 0.25), 0.75), True),
    "a rate for each weight": (hg.SGD({k: jnp.full(w.shape, 0.5) for k, w in NET.weights.items()}, 0.75), True),
    "a momentum for each step": (hg.SGD(0.5, hg.PerStep(jnp.linspace(0.5, 0.75, STEPS))), True),
    "no factor, a momentum for each leaf": (hg.HeavyBall(0.125, each(0.75, 0.5)), True),
    "a frozen leaf": (hg.freeze(hg.SGD(0.5, 0.75), {k: i == 1 for i, k in enumerate(NET.weights)}), True),
    "decayed weights before": (hg.add_decayed_weights(hg.SGD(0.5, 0.75), 0.125), True),
    "a momentum for each leaf": (hg.SGD(0.5, each(0.75, 0.5)), False),
    "a momentum for each weight": (hg.SGD(0.5, {k: jnp.full(w.shape, 0.75) for k, w in NET.weights.items()}), False),
    "another rule for a leaf": (
        hg.partition({"a": hg.SGD(0.5, 0.75), "b": hg.HeavyBall(0.125, 0.75)}, dict(zip(NET.weights, "abab", strict=False))),
        False,
    ),
    "three links": (hg.Nesterov(0.125, 0.75), False),
    "a rule of one's own, that might bend what passes back": (Coupled(0.5, 0.75), None),
}  # fmt: skip


@some_of("name", RULES, "one momentum")
def test_it_is_found_and_gives_the_same_derivative(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    common_factor = backward.common_factor
    monkeypatch.setattr(backward, "common_factor", lambda *a: found.append(common_factor(*a)) or found[-1])
    with jax.enable_x64(True):
        rule, expected = RULES[name]
        given = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (rule, NET.params(jnp.float64), NET.theta(jnp.float64)))
        batches = NET.batches(STEPS)

        def end(given: Any, adjoint: Any) -> Any:
            rule, params, theta = given
            run = hg.train(NET.loss, params, rule, batches, theta=theta, steps=STEPS, adjoint=adjoint)
            return NET.value(run.params) + run.losses.sum()

        ours, stored = (jax.jit(jax.grad(lambda g, a=a: end(g, a)))(given) for a in (hg.Reversible(), hg.Unrolled()))
        assert {x is not None for x in found} == (set() if expected is None else {expected})
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(stored), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_a_frozen_leaf_may_be_of_another_dtype() -> None:
    with jax.enable_x64(True):
        params = {"a": jnp.ones(3, jnp.float64), "b": jnp.full(3, 0.5, jnp.float32)}
        loss = lambda w, penalty, batch: jnp.sum((w["a"] * w["b"] - batch) ** 2) + penalty * jnp.sum(w["a"] ** 2)  # noqa: E731
        for frozen in ("a", "b"):

            def end(given: Any, adjoint: Any, frozen: str = frozen) -> Any:
                rate, params, penalty = given
                rule = hg.freeze(hg.SGD(rate, 0.75), {k: k == frozen for k in params})
                batches = hg.full_batch(jnp.array([0.2, -0.5, 0.4]))
                run = hg.train(loss, params, rule, batches, theta=penalty, steps=STEPS, adjoint=adjoint)
                return sum(jnp.sum(x.astype(jnp.float64) ** 2) for x in jax.tree.leaves(run.params))

            given = jnp.float64(0.1), params, jnp.float32(0.5)
            ours, stored = (jax.jit(jax.grad(lambda g, a=a: end(g, a)))(given) for a in (hg.Reversible(), hg.Unrolled()))
            for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(stored), strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_allclose(x, y, rtol=1e-6)
