"""Optimizers as chains: each step has its inverse, trains as other libraries do, and is differentiated in all it has."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chains import Change, Shampoo, inverse_fourth_root
from covering import long, some_of
from jax.test_util import check_grads
from problems import network

import hypergrad as hg


STEPS = 12
NET = network("tanh")


def per_step(low: float, high: float, steps: int = STEPS) -> hg.PerStep:
    return hg.PerStep(jnp.linspace(low, high, steps))


FEW = 4
few = functools.partial(per_step, steps=FEW)
INVERTIBLE = {
    "SGD": lambda: hg.SGD(0.1, few(0.3, 0.999)),
    "HeavyBall": lambda: hg.HeavyBall(few(0.1, 0.01), 0.9),
    "Adam": lambda: hg.Adam(1e-3, few(0.8, 0.95), few(0.9, 0.999)),
    "AdamW": lambda: hg.AdamW(1e-3, weight_decay=few(0.01, 1.0)),
    "RMSProp": lambda: hg.RMSProp(1e-3, 0.9, few(0.8, 0.95)),
    "Adagrad": lambda: hg.Adagrad(few(1e-3, 1e-2), few(0.8, 0.95)),
    "Shampoo": lambda: Shampoo(1e-3, few(0.8, 0.95)),
}


@pytest.mark.of_bits
@some_of("name", INVERTIBLE, "Adam")
def test_every_step_has_an_inverse(name: str) -> None:
    params = {"matrix": jnp.zeros((3, 2)), "vector": jnp.zeros(2)}
    hg.testing.check_inverse(INVERTIBLE[name](), params, steps=FEW)


def trained(optimizer: Any, **options: Any) -> hg.Trained:
    return hg.train(NET.loss, NET.params(), optimizer, NET.batches(STEPS), theta=NET.theta(), **options)


def trained_by_optax(rule: optax.GradientTransformation) -> tuple[Any, jax.Array]:
    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        loss, g = jax.value_and_grad(NET.loss)(params, NET.theta(), batch)
        updates, state = rule.update(g, state, params)
        return (optax.apply_updates(params, updates), state), loss

    (params, _), losses = jax.lax.scan(step, (NET.params(), rule.init(NET.params())), NET.batches(STEPS).arrays)
    return params, losses


OPTAX = {
    "HeavyBall": (lambda: hg.HeavyBall(0.1, 0.9), optax.sgd(0.1, momentum=0.9)),
    "Adam": (lambda: hg.Adam(0.05, 0.9, 0.99), optax.adam(0.05, 0.9, 0.99)),
    "AdamW": (lambda: hg.AdamW(0.05, 0.9, 0.99, 1e-3, 0.1), optax.adamw(0.05, 0.9, 0.99, 1e-3, weight_decay=0.1)),
    "RMSProp": (lambda: hg.RMSProp(0.02, 0.95, 0.9, 1e-4), optax.rmsprop(0.02, 0.95, 1e-4, momentum=0.9)),
    "Adagrad": (
        lambda: hg.Adagrad(0.02),
        optax.chain(optax.scale_by_rss(0.0, 1e-8), optax.scale_by_learning_rate(0.02), optax.trace(0.9)),
    ),
    "transformed": (
        lambda: hg.clip_by_global_norm(hg.add_decayed_weights(hg.clip(hg.HeavyBall(0.1), 0.1), 0.5), 0.3),
        optax.chain(
            optax.clip_by_global_norm(0.3), optax.add_decayed_weights(0.5), optax.clip(0.1), optax.sgd(0.1, momentum=0.9)
        ),
    ),
}


@some_of("name", OPTAX, *(name for name in OPTAX if name not in ("Adagrad", "Adam", "HeavyBall", "RMSProp")))
def test_training_is_that_of_optax(name: str) -> None:
    """Up to the rounding of decays, 2^-17, and of floats."""
    ours, theirs = OPTAX[name]
    run = trained(ours())
    params, losses = jax.jit(functools.partial(trained_by_optax, theirs))()
    np.testing.assert_allclose(run.losses, losses, rtol=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-4), run.params, params)


def test_what_is_frozen_stays_and_does_not_decay() -> None:
    adamw = hg.AdamW(0.05, weight_decay=1.0)
    start = NET.params()
    moving = {name: jax.tree.map(jnp.ones_like, start) for name in ("mean", "square")}
    run = trained(hg.clip(hg.freeze(adamw, {"w1": True, "w2": False}), 10.0), state=moving)
    np.testing.assert_allclose(run.params["w1"], start["w1"], rtol=1e-6)
    assert not np.allclose(run.params["w2"], start["w2"], rtol=1e-2)
    with pytest.raises(TypeError, match="`mask` must have bools as leaves, True where frozen; got float"):
        hg.freeze(adamw, {"w1": 1.0})
    with pytest.raises(TypeError, match=r"wraps a reversible optimizer, which comes first: hg.clip\(hg.SGD.*; got float"):
        hg.clip(0.1, 1.0)


@pytest.mark.filterwarnings("ignore:.*too small for its fixed-point grid")
@pytest.mark.parametrize(("scale", "bound"), [long(1e20, 1.0), long(1e-20, 1.0), (0.0, 1.0)])
def test_clipping_has_its_derivative_at_any_scale(scale: float, bound: float) -> None:
    """In float32, as in float64, where no square of these overflows or vanishes."""

    def slopes(dtype: Any) -> jax.Array:
        def loss(w: jax.Array, theta: jax.Array, _: Any) -> jax.Array:
            return jnp.asarray(scale, dtype) * jnp.sum(theta * w**2)

        def end(theta: jax.Array) -> jax.Array:
            start, rule = jnp.array([0.5, -0.3, 0.2], dtype), hg.clip_by_global_norm(hg.SGD(0.1, 0.5), bound)
            run = hg.train(loss, start, rule, hg.full_batch(jnp.zeros(1)), theta=theta, steps=3)
            return jnp.vdot(run.params, jnp.array([3.0, 2.0, 1.0], dtype))

        return jax.grad(end)(jnp.array([1.0, 2.0, 3.0], dtype))

    with jax.enable_x64(True):
        expected = slopes(jnp.float64)
    np.testing.assert_allclose(slopes(jnp.float32), expected, rtol=1e-4, atol=1e-30)


def test_a_transformation_without_its_function_is_told() -> None:
    class Nothing(hg.optimizers.transform.Transformed):
        pass

    with pytest.raises(TypeError, match="abstract class Nothing .*abstract method '?transform"):
        Nothing(hg.SGD(0.1))  # type: ignore[abstract]


@pytest.mark.long
def test_heavy_ball_is_sgd_with_another_rate() -> None:
    m = round(0.9 * 2**16) / 2**16
    ball, sgd = trained(hg.HeavyBall(0.1, m)), trained(hg.SGD(0.1 / (1 - m), m))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ball.params, sgd.params)
    velocities = ball.state["velocity"], sgd.state["velocity"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose((1 - m) * x, y, atol=1e-6), *velocities)


@pytest.mark.long
def test_the_gradient_in_an_optimizer_is_an_optimizer() -> None:
    optimizer = hg.HeavyBall({"w1": jnp.float32(0.1), "w2": per_step(0.1, 0.2)}, 0.9)
    gradient = jax.jit(jax.grad(lambda o: NET.value(trained(o).params)))(optimizer)
    assert isinstance(gradient, hg.HeavyBall)
    assert jax.tree.structure(gradient) == jax.tree.structure(optimizer)
    assert gradient.learning_rate["w2"].values.shape == (STEPS,)
    assert gradient.momentum != 0


GROUPS = {"w1": 0.9, "w2": per_step(0.5, 0.9)}
DIFFERENTIATED = {
    "HeavyBall": lambda: hg.HeavyBall(per_step(0.05, 0.1), GROUPS),
    "Adam": lambda: hg.Adam(per_step(0.1, 0.05), per_step(0.8, 0.95), {"w1": 0.99, "w2": per_step(0.9, 0.999)}),
    "AdamW": lambda: hg.AdamW(per_step(0.1, 0.05), 0.9, 0.99, 1e-3, {"w1": 0.5, "w2": per_step(0.1, 1.0)}),
    "RMSProp": lambda: hg.RMSProp(0.02, GROUPS, per_step(0.8, 0.95)),
    "Adagrad": lambda: hg.Adagrad(per_step(0.02, 0.05), GROUPS, 1e-3),
    "Shampoo": lambda: Shampoo(per_step(0.1, 0.05), per_step(0.8, 0.95), {"w1": 0.9, "w2": per_step(0.9, 0.99)}),
    "Change": lambda: Change(per_step(0.1, 0.05), GROUPS),
    "linear": lambda: hg.add_decayed_weights(
        hg.freeze(hg.SGD(per_step(0.5, 1.0), GROUPS), {"w1": False, "w2": False}), {"w1": 0.1, "w2": 0.2}
    ),
    "several": lambda: hg.clip_by_global_norm(
        hg.add_decayed_weights(hg.clip(hg.HeavyBall(0.02, GROUPS), per_step(0.2, 0.1)), GROUPS), {"w1": 0.3, "w2": 0.2}
    ),
}


@functools.cache
def evaluate(name: str, adjoint: Any) -> Any:
    """(gradients in optimizer, parameters and theta; what training returns), in float64."""

    def objective(optimizer: Any, params: Any, theta: Any) -> Any:
        run = hg.train(NET.loss, params, optimizer, NET.batches(STEPS), theta=theta, adjoint=adjoint)
        curve = jnp.sum(run.losses * jnp.cos(jnp.arange(STEPS)))
        state = sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(run.state))
        return NET.value(run.params) + curve + state, (run.params, run.losses, run.state)

    with jax.enable_x64(True):
        optimizer = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), DIFFERENTIATED[name]())
        function = jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True))
        return jax.tree.map(np.asarray, function(optimizer, NET.params(jnp.float64), NET.theta(jnp.float64)))


@pytest.mark.long
@pytest.mark.of_bits  # what `evaluate` keeps serves both tests
@some_of("name", DIFFERENTIATED, "AdamW")
def test_derivatives_by_reversal_are_those_of_the_unrolled_run(name: str) -> None:
    reversed_, unrolled = evaluate(name, hg.Reversible())[0], evaluate(name, hg.Unrolled())[0]
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(reversed_), jax.tree.leaves(unrolled), strict=True):
        assert np.linalg.norm(y) > 0, jax.tree_util.keystr(path)
        assert np.linalg.norm(x - y) <= 1e-8 * np.linalg.norm(y), jax.tree_util.keystr(path)


@pytest.mark.long
@pytest.mark.of_bits
@some_of("name", DIFFERENTIATED, "AdamW")
def test_both_roads_train_alike_bit_for_bit(name: str) -> None:
    outputs = evaluate(name, hg.Reversible())[1], evaluate(name, hg.Unrolled())[1]
    jax.tree.map(np.testing.assert_array_equal, *outputs)


ADAPTIVE = {
    "Adam": hg.Adam(0.03),
    "AdamW": hg.AdamW(0.03, weight_decay=0.01),
    "RMSProp": hg.RMSProp(0.01),
    "Adagrad": hg.Adagrad(0.02),
    "Shampoo": Shampoo(0.02),
}


@pytest.mark.long
@pytest.mark.of_bits
@pytest.mark.parametrize(
    ("name", "kind"),
    [long("Adam", "layer norm"), long("AdamW", "convolution"), ("RMSProp", "attention"), long("Shampoo", "embedding")],
)
def test_adaptive_training_runs_backwards_in_float32(name: str, kind: str) -> None:
    """A reversal that is not exact raises from compiled code, and its gradient is NaN."""
    net, steps = network(kind), 100

    def value(optimizer: Any) -> jax.Array:
        run = hg.train(net.loss, net.params(), optimizer, net.batches(steps), theta=net.theta())
        return net.value(run.params)

    optimizer = jax.tree.map(jnp.float32, ADAPTIVE[name])
    assert all(jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(jax.jit(jax.grad(value))(optimizer)))


@pytest.mark.long
@some_of(
    ("name", "eps"),
    list(itertools.product(("Adam", "AdamW", "RMSProp", "Adagrad"), (1e-8, 1e-30))),
    ("Adagrad", 1e-30),
)
def test_a_weight_without_gradient_stays_and_harms_nothing(name: str, eps: float) -> None:
    def value(optimizer: Any) -> jax.Array:
        params = {"used": jnp.ones(2), "unused": jnp.ones(2)}
        loss = lambda p, _, batch: jnp.sum((p["used"] - batch) ** 2)  # noqa: E731
        run = hg.train(loss, params, optimizer, hg.full_batch(jnp.zeros(2)), steps=3)
        return jnp.sum(run.params["used"] ** 2) + jnp.sum(run.params["unused"])

    optimizer = jax.tree.map(jnp.float32, dataclasses.replace(ADAPTIVE[name], eps=eps))
    gradient = jax.jit(jax.grad(value))(optimizer)
    assert all(jnp.isfinite(g) for g in jax.tree.leaves(gradient))
    assert gradient.learning_rate < 0


@pytest.mark.long
def test_the_root_that_shampoo_takes_has_its_derivative() -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        half = jnp.asarray(rng.normal(size=(4, 4)))
        a = half @ half.T + jnp.eye(4)
        root = inverse_fourth_root(a)
        np.testing.assert_allclose(root @ root @ root @ root @ a, np.eye(4), atol=1e-12)
        symmetric = lambda x: inverse_fourth_root((x + x.T) / 2)  # noqa: E731
        for matrix in (a, jnp.eye(4)):  # the second has one eigenvalue four times
            check_grads(symmetric, (matrix,), order=1, modes=["fwd", "rev"])


@pytest.mark.of_bits
def test_an_increment_may_read_the_old_value_of_a_link_after_it() -> None:
    hg.testing.check_inverse(Change(0.1), {"matrix": jnp.zeros((3, 2)), "vector": jnp.zeros(2)}, steps=FEW)


@pytest.mark.long
def test_such_an_increment_keeps_the_contract() -> None:
    hg.testing.check_optimizer(Change(0.1))
