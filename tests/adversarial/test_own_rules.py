"""Optimizers of one's own that do what none of the library's does: tell leaves apart by shape, read what changes outside,
bring derivative rules, speak of a named axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value, long
from tiny import fails

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer


X = np.random.default_rng(0).normal(size=(10, 3))
Y = np.sin(X @ np.ones((3, 2)))
MATRIX = np.random.default_rng(1).normal(size=(3, 2))


class MatrixRule(Optimizer):
    """The increment of `first` reads the old value of `second`, for matrices only."""

    rate: Any
    m: Any = 0.9
    r: Any = 0.5

    chain = (
        Link("first", lambda h, z, g: (1 - h.m) * g * (1 + jnp.tanh(z.second) if g.ndim == 2 else 1.0), decay="m"),
        Link("second", lambda h, z, g: (1 - h.r) * jnp.tanh(g), decay="r"),
        Link("params", lambda h, z: -h.rate * z.first),
    )


@pytest.mark.parametrize("bias", ["b", long("z")])  # sorted before or after "w"
def test_leaves_may_read_other_links(bias: str) -> None:
    def loss(p: Any, theta: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(X @ p["w"] + p[bias]) - Y) ** 2)

    def gradient(adjoint: Any) -> Any:
        def f(h: Any) -> Any:
            params = {bias: jnp.zeros(2), "w": jnp.asarray(MATRIX)}
            return loss(hg.train(loss, params, MatrixRule(**h), hg.full_batch(0.0), steps=8, adjoint=adjoint).params, 0, 0)

        return jax.jit(jax.grad(f))({"rate": 0.5, "m": 0.9, "r": 0.5})

    with jax.enable_x64(True):
        ours, stored = gradient(hg.Reversible(capacity=4)), gradient(hg.Unrolled())
    for name in stored:
        np.testing.assert_allclose(ours[name], stored[name], rtol=1e-9, err_msg=name)


class Outside:
    factor: Any = 1.0


@jax.custom_jvp
def squashed(x: Any) -> Any:
    return jnp.tanh(x)


squashed.defjvp(lambda p, t: (squashed(p[0]), Outside.factor * t[0]))


class Reads(Optimizer):
    rate: Any
    m: Any = 0.5

    chain = (
        Link("velocity", lambda h, z, g: Outside.factor * g, decay="m"),
        Link("params", lambda h, z: -h.rate * z.velocity),
    )


class Derives(Optimizer):
    """Its values are the same whatever is outside; its derivative is not."""

    rate: Any
    m: Any = 0.5

    chain = (
        Link("velocity", lambda h, z, g: squashed(g), decay="m"),
        Link("params", lambda h, z: -h.rate * z.velocity),
    )


def squares(w: Any, theta: Any, batch: Any) -> Any:
    return jnp.sum((w - batch) ** 2) / 4


def final(w: Any, rule: Any, adjoint: Any = hg.Reversible()) -> Any:  # noqa: B008 (frozen)
    return jnp.sum(hg.train(squares, w, rule(0.1), hg.full_batch(jnp.array([1.0, 0.2])), steps=4, adjoint=adjoint).params)


W = jnp.array([0.5, -0.3])


def by_hand(w: Any, factor: float, derives: bool) -> Any:
    """The same in plain JAX, `squashed` included."""
    v, b = jnp.zeros(2), jnp.array([1.0, 0.2])
    for _ in range(4):
        g = (w - b) / 2
        v = 0.5 * v + (_squashed(g, factor) if derives else factor * g)
        w = w - 0.1 * v
    return jnp.sum(w)


def _squashed(x: Any, factor: float) -> Any:
    return factor * x + jax.lax.stop_gradient(jnp.tanh(x) - factor * x)


@every_value("rule, adjoint", [Reads, Derives], [hg.Reversible(), hg.Unrolled()])
def test_a_rule_reads_what_is_there_today(rule: Any, adjoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for factor in (1.0, 2.0, 1.0):
        monkeypatch.setattr(Outside, "factor", factor)
        ours = jax.value_and_grad(lambda w: final(w, rule, adjoint))(W)
        expected = jax.value_and_grad(lambda w, factor=factor: by_hand(w, factor, rule is Derives))(W)
        np.testing.assert_allclose(ours[0], expected[0], rtol=1e-5)
        np.testing.assert_allclose(ours[1], expected[1], rtol=1e-5)


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("rule", [Reads, Derives])
def test_a_traced_value_that_a_rule_reads_is_named(rule: Any, compile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(factor: Any) -> Any:
        monkeypatch.setattr(Outside, "factor", factor)
        return final(W, rule)

    with fails(ValueError, "the increment of link `velocity`", "would be lost", "a field of the optimizer"):
        compile(jax.grad(f))(2.0)
    monkeypatch.setattr(Outside, "factor", 1.0)
    np.testing.assert_allclose(final(W, rule), by_hand(W, 1.0, rule is Derives), rtol=1e-5)  # the next call is as before


class Averaging(Optimizer):
    """Every lane moves by the mean of all gradients."""

    rate: Any
    m: Any = 0.5

    chain = (
        Link("velocity", lambda h, z, g: jax.lax.pmean(g, "lanes"), decay="m"),
        Link("params", lambda h, z: -h.rate * z.velocity),
    )


@pytest.mark.long
def test_a_rule_may_speak_of_an_axis_that_vmap_names() -> None:
    lanes = jnp.stack([W, 3 * W])
    ours = jax.vmap(jax.grad(lambda w: final(w, Averaging) ** 2), axis_name="lanes")(lanes)

    def together(w: Any) -> Any:
        v = jnp.zeros_like(w)
        for _ in range(4):
            v = 0.5 * v + jnp.mean((w - jnp.array([1.0, 0.2])) / 2, axis=0)
            w = w - 0.1 * v
        return jnp.sum(jnp.sum(w, axis=1) ** 2)

    np.testing.assert_allclose(ours, jax.grad(together)(lanes), rtol=1e-5)


class SquaresVectors(hg.SGD):
    """Linear in the gradient of a matrix, as it says of all."""

    chain = (
        Link("velocity", lambda h, z, g: (1 - h.momentum) * (g * g if g.ndim < 2 else -g), decay="momentum"),
        hg.SGD.chain[1],
    )
    linear, entrywise = True, False


def test_the_checker_tries_vectors_as_well_as_matrices() -> None:
    with pytest.raises(AssertionError, match="declares linear = True, but the gradient enters"):
        hg.testing.check_optimizer(SquaresVectors(0.1))


class ReadsAhead(Optimizer):
    """v <- m v - g;  q <- m q + v s;  s <- m s + 0.1 q;  w <- w + a q: linear in g, by a factor that is the old s."""

    rate: Any
    m: Any = 0.9
    chain = (
        Link("v", lambda h, z, g: -g, decay="m"),
        Link("q", lambda h, z, g: z.v * z.s, decay="m"),
        Link("s", lambda h, z, g: 0.1 * z.q, decay="m", start=jnp.ones_like),
        Link("params", lambda h, z: h.rate * z.q),
    )
    linear = True


def test_a_linear_rule_may_read_the_old_value_of_a_later_link() -> None:
    with jax.enable_x64(True):
        loss = lambda w, t, b: jnp.sum(jnp.sin(w) * t)  # noqa: E731

        def end(t: Any, adjoint: Any) -> Any:
            w, data = jnp.array([0.3, -0.2]), hg.full_batch(jnp.zeros(1))
            return jnp.sum(hg.train(loss, w, ReadsAhead(0.1), data, theta=t, steps=4, adjoint=adjoint).params ** 2)

        t = jnp.array([1.0, 2.0])
        found, expected = (jax.grad(end)(t, adjoint) for adjoint in (hg.Reversible(), hg.Unrolled()))
        np.testing.assert_allclose(found, expected, rtol=1e-9)
