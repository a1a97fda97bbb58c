"""Nothing is frozen: what a loss, a batch function or an own derivative rule reads from outside counts as it is today.

And nothing is kept: losses and what they close over are freed.
"""

import dataclasses
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from tiny import fails

import hypergrad as hg


START, TARGET = jnp.full(3, 2.0), jnp.array([1.0, 0.5, -1.0])
BATCHES = hg.full_batch(TARGET)
STEPS, RATE, MOMENTUM = 6, 0.1, 0.5
ROADS = [hg.Reversible(), hg.Unrolled()]


def run(loss: Any, rate: Any = RATE, adjoint: Any = ROADS[0], batches: Any = BATCHES, theta: Any = None) -> Any:
    return jnp.sum(hg.train(loss, START, hg.SGD(rate, MOMENTUM), batches, theta=theta, steps=STEPS, adjoint=adjoint).params)


def plain(loss: Callable[[Any], Any], rate: Any = RATE) -> Any:
    """The same in plain JAX."""

    @jax.jit
    def end(rate: Any) -> Any:
        w, v = START, jnp.zeros(3)
        for _ in range(STEPS):
            v = MOMENTUM * v - (1 - MOMENTUM) * jax.grad(loss)(w)
            w = w + rate * v
        return jnp.sum(w)

    return end(rate)


def penalized(l2: Any) -> Callable[[Any], Any]:
    return lambda w: jnp.sum((w - TARGET) ** 2) + l2 * jnp.sum(w**2)


class Settings:
    l2: Any = 0.0
    fold = np.zeros(3, np.float32)


settings = Settings()
l2: Any = 0.0


def by_global(w: Any, theta: Any, batch: Any) -> Any:
    return penalized(l2)(w)


def by_attribute(w: Any, theta: Any, batch: Any) -> Any:
    return penalized(settings.l2)(w)


def by_array(w: Any, theta: Any, batch: Any) -> Any:
    return penalized(settings.fold[0])(w)


@jax.custom_vjp
def penalty(w: Any) -> Any:
    return 0 * jnp.sum(w)


penalty.defvjp(lambda w: (penalty(w), w), lambda w, ct: (2 * ct * settings.l2 * w,))


def by_derivative_rule(w: Any, theta: Any, batch: Any) -> Any:
    return penalized(0.0)(w) + penalty(w)


def set_to(value: float) -> None:
    global l2
    l2 = settings.l2 = value
    settings.fold[0] = value  # in place


LOSSES = (by_global, by_attribute, by_array, by_derivative_rule)


@some_of(
    ("loss", "adjoint"),
    list(itertools.product(LOSSES, ROADS)),
    (by_global, ROADS[0]),
)
def test_a_loss_reads_what_is_there_today(loss: Any, adjoint: Any) -> None:
    for value in (0.0, 1.0, 0.5, 0.0):
        set_to(value)
        ours = jax.value_and_grad(lambda rate: run(loss, rate, adjoint))(RATE)
        expected = jax.value_and_grad(lambda rate, value=value: plain(penalized(value), rate))(RATE)
        np.testing.assert_allclose(ours, expected, rtol=1e-5)
        np.testing.assert_allclose(run(loss, adjoint=adjoint), ours[0], rtol=1e-6)


@pytest.mark.parametrize("loss", [long(by_global), by_array], ids=lambda f: f.__name__)
def test_so_does_optimize(loss: Any) -> None:
    def train_fn(h: Any, key: Any) -> Any:
        return hg.train(loss, START, hg.SGD(h["rate"], MOMENTUM), BATCHES, steps=STEPS).params

    for value in (0.0, 1.0):
        set_to(value)
        result = hg.optimize(train_fn, jnp.sum, {"rate": hg.positive(RATE)}, meta_steps=1)
        np.testing.assert_allclose(result.history[0].value, plain(penalized(value)), rtol=1e-5)


def batched_by(factor: float) -> Any:
    """2 x, and under `jax.vmap` 2 factor x: a rule that no program shows until it is vmapped."""

    @jax.custom_batching.custom_vmap
    def double(x: Any) -> Any:
        return 2 * x

    @double.def_vmap
    def rule(size: int, batched: Any, x: Any) -> Any:
        return 2 * factor * x, batched[0]

    return double


PLACES = ("loss", "batches", "whole numbers")


@some_of(
    ("place", "adjoint"),
    list(itertools.product(PLACES, [*ROADS, hg.Checkpointed()])),
)
def test_a_batching_rule_reads_what_is_there_today(place: str, adjoint: Any) -> None:
    """One step down a slope of 2 factor: the second of two programs with equal keys must not run the first."""

    def final(w: Any, rate: Any, double: Any) -> Any:
        slope: dict[str, Any] = {
            "loss": lambda w, b: double(jax.lax.stop_gradient(w)),
            "batches": lambda w, b: b,
            "whole numbers": lambda w, b: double(jnp.int32(w > 0)),
        }
        batches = (lambda t: double(start)) if place == "batches" else hg.full_batch(0.0)
        loss = lambda w, theta, b: jnp.sum(slope[place](w, b) * w)  # noqa: E731
        start = w
        return jnp.sum(hg.train(loss, w, hg.SGD(rate, 0.5), batches, steps=1, adjoint=adjoint).params)

    starts = jnp.array([0.5, 1.0])
    seen = jnp.ones(2) if place == "whole numbers" else starts
    for factor in (1, 3, 1):
        one = functools.partial(final, double=batched_by(factor))
        slopes = jax.vmap(jax.grad(one, 1), (0, None))(starts, RATE)
        np.testing.assert_allclose(slopes, -factor * seen, rtol=1e-5)


def test_so_does_a_batch_function() -> None:
    def batches(t: Any) -> Any:
        return jnp.asarray(settings.fold) + settings.l2

    for value in (0.0, 1.0, 0.0):
        set_to(value)
        now = np.array([2 * value, value, value], np.float32)
        expected = plain(lambda w, now=now: jnp.sum((w - now) ** 2))
        np.testing.assert_allclose(run(lambda w, _, b: jnp.sum((w - b) ** 2), batches=batches), expected, rtol=1e-5)


@pytest.mark.parametrize("order", [(True, 1), (1, True)])
def test_true_is_not_one(order: Any) -> None:
    def loss(w: Any, theta: Any, batch: Any) -> Any:
        return (3.0 if theta["flag"] is True else 1.0) * jnp.sum((w - batch) ** 2)

    for flag in order:
        expected = plain(lambda w, flag=flag: (3.0 if flag is True else 1.0) * jnp.sum((w - TARGET) ** 2))
        np.testing.assert_allclose(run(loss, theta={"flag": flag}), expected, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Penalized:
    name: str
    l2: float = dataclasses.field(default=0.0, compare=False)

    def __call__(self, w: Any, theta: Any, batch: Any) -> Any:
        return penalized(self.l2)(w)


def test_losses_that_compare_equal_are_two() -> None:
    for value in (0.0, 2.0):
        assert Penalized("a", value) == Penalized("a")
        np.testing.assert_allclose(run(Penalized("a", value)), plain(penalized(value)), rtol=1e-5)
        in_theta = lambda w, theta, batch: theta["loss"](w, None, None)  # noqa: E731
        np.testing.assert_allclose(run(in_theta, theta={"loss": Penalized("a", value)}), plain(penalized(value)), rtol=1e-5)


def in_a_jit(w: Any) -> Any:
    return jax.jit(lambda w: settings.l2 * jnp.sum(w**2))(w)


def in_a_scan(w: Any) -> Any:
    return jax.lax.scan(lambda total, x: (total + settings.l2 * x**2, None), 0.0, w)[0]


def in_a_branch(w: Any) -> Any:
    return jax.lax.cond(w[0] > -9, lambda w: settings.l2 * jnp.sum(w**2), lambda w: jnp.sum(w), w)


@pytest.mark.parametrize(
    ("where", "compile"), [long(in_a_jit, lambda f: f), (in_a_scan, jax.jit), long(in_a_branch, jax.jit)]
)
def test_a_traced_value_that_a_loss_reads_is_differentiated(where: Any, compile: Any) -> None:
    def loss(w: Any, theta: Any, batch: Any) -> Any:
        return penalized(0.0)(w) + where(w)

    def f(h: Any) -> Any:
        settings.l2 = h["l2"]
        return run(loss, h["rate"])

    alone = jax.grad(lambda rate: f({"rate": rate, "l2": 0.3}))(RATE)  # traced with a number first
    ours = compile(jax.grad(f))({"rate": RATE, "l2": 0.3})
    expected = jax.grad(lambda h: plain(penalized(h["l2"]), h["rate"]))({"rate": RATE, "l2": 0.3})
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(alone, expected["rate"], rtol=1e-4)
    settings.l2 = 0.3  # calls that follow are not poisoned
    np.testing.assert_allclose(run(loss), plain(penalized(0.3)), rtol=1e-5)


@jax.custom_jvp
def by_rule(w: Any) -> Any:
    return settings.l2 * jnp.sum(w**2)


by_rule.defjvp(lambda p, t: (by_rule(p[0]), 2 * settings.l2 * jnp.vdot(p[0], t[0])))


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_traced_value_that_a_derivative_rule_reads_is_named(compile: Any) -> None:
    def loss(w: Any, theta: Any, batch: Any) -> Any:
        return penalized(0.0)(w) + by_rule(w)

    def f(value: Any) -> Any:
        settings.l2 = value
        return run(loss)

    with fails(ValueError, "`settings.l2`", "derivative rule", "as one of its arguments"):
        compile(jax.grad(f))(0.3)
    settings.l2 = 0.3
    np.testing.assert_allclose(run(loss), plain(penalized(0.3)), rtol=1e-5)


def test_a_traced_value_in_batches_is_named_and_one_in_a_schedule_differentiated() -> None:
    holder = types.SimpleNamespace(x=0.0)

    def batch(x: Any) -> Any:
        holder.x = x
        return run(lambda w, _, b: jnp.sum((w - b) ** 2), batches=lambda t: TARGET + holder.x)

    with fails(ValueError, "`batches` is differentiated, in `holder.x`"):
        jax.grad(batch)(0.5)
    assert np.isfinite(batch(0.5))

    def schedule(rate: Any) -> Any:
        holder.x = rate
        return run(by_attribute, hg.PerStep(holder.x * jnp.ones(STEPS)))

    settings.l2 = 0.0
    np.testing.assert_allclose(jax.grad(schedule)(RATE), jax.grad(lambda r: plain(penalized(0.0), r))(RATE), rtol=1e-5)


def test_a_pullback_belongs_to_the_call_that_made_it() -> None:
    settings.l2 = 1.0
    expected = jax.grad(lambda rate: plain(penalized(1.0), rate))(RATE)
    _, pull = jax.vjp(lambda rate: run(by_attribute, rate), RATE)
    _, push = jax.linearize(lambda rate: run(by_attribute, rate, ROADS[1]), RATE)
    settings.l2 = 7.0
    np.testing.assert_allclose(pull(1.0)[0], expected, rtol=1e-4)
    np.testing.assert_allclose(push(1.0), expected, rtol=1e-4)


@pytest.mark.long
@some_of("adjoint", [*ROADS, hg.Reversible(driver="host")], ROADS[0])
def test_losses_and_data_are_freed(adjoint: Any) -> None:
    alive = []
    for i in range(40):
        data = jnp.full(1000, float(i))
        loss = lambda w, _, b, data=data: jnp.sum((w - data[:3]) ** 2)  # noqa: E731
        alive += [weakref.ref(data), weakref.ref(loss)]
        jax.grad(lambda rate, loss=loss: run(loss, rate, adjoint))(RATE)
    del data, loss
    gc.collect()
    assert not any(ref() is not None for ref in alive)
