"""Independent roads to one hypergradient agree: reversed, unrolled, checkpointed, plain floats, differences."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import network

import hypergrad as hg


STEPS = 20
NETWORK = network("tanh")
# Decays leave a noise of 1e-11 on the default grid, which a difference over 2^-10 would blow up to 1e-8.
FINE = hg.Reversible(fraction_bits=58)
# How the learning rate and the momentum are given: every form of each, in pairs.
FORMS = {
    "scalar, per step": ("scalar", "per step"),
    "per step, scalar": ("per step", "scalar"),
    "per group, per weight": ("per group", "per weight"),
    "per weight, per group": ("per weight", "per group"),
    "per step and weight": ("per step and weight", "per step and weight"),
}


def given(form: str, value: float, seed: int, dtype: Any) -> Any:
    """A hyperparameter near `value` in one of its forms."""
    rng = np.random.default_rng(seed)
    spread = lambda *shape: jnp.asarray(value * rng.uniform(0.8, 1.1, shape), dtype)  # noqa: E731
    shapes = {k: w.shape for k, w in NETWORK.weights.items()}
    match form:
        case "scalar":
            return spread()
        case "per step":
            return hg.PerStep(spread(STEPS))
        case "per group":
            return {k: hg.PerStep(spread(STEPS)) if k == "w1" else spread() for k in shapes}
        case "per weight":
            return {k: spread(*s) for k, s in shapes.items()}
        case _:
            return {k: hg.PerStep(spread(STEPS, *s)) for k, s in shapes.items()}


def start(forms: str, dtype: Any) -> dict[str, Any]:
    rate, momentum = FORMS[forms]
    params = NETWORK.params(dtype)
    return {
        "params": params,
        "velocity": jax.tree.map(lambda w: 0.1 * jnp.cos(jnp.arange(w.size, dtype=dtype)).reshape(w.shape), params),
        "learning_rate": given(rate, 0.3, 1, dtype),
        "momentum": given(momentum, 0.85, 2, dtype),
        "theta": NETWORK.theta(dtype),
    }


def outcome(params: Any, losses: Any, velocity: Any) -> jax.Array:
    """A number that every output of a run enters, so that each of them has a cotangent."""
    curve = jnp.vdot(losses, jnp.linspace(0.1, 1, STEPS, dtype=losses.dtype)) / STEPS
    return NETWORK.value(params) + curve + sum(jnp.sum(jnp.sin(v)) for v in jax.tree.leaves(velocity))


def trained(adjoint: Any, hypers: Any) -> jax.Array:
    run = hg.train(
        NETWORK.loss, hypers["params"], hg.SGD(hypers["learning_rate"], hypers["momentum"]), hg.full_batch(NETWORK.data),
        theta=hypers["theta"], steps=STEPS, state={"velocity": hypers["velocity"]}, adjoint=adjoint,
    )  # fmt: skip
    return outcome(run.params, run.losses, run.state["velocity"])


def plain(hypers: Any) -> jax.Array:
    """The same training in floats and one `lax.scan`; only the momentum is rounded to n / 2^16, derivative 1."""

    def at_each_step(x: Any) -> Any:
        spread = lambda p: jnp.broadcast_to(p.values if isinstance(p, hg.PerStep) else p, _shape(p))  # noqa: E731
        tree = jax.tree.map(spread, x, is_leaf=lambda p: isinstance(p, hg.PerStep))
        return jax.tree.broadcast(tree, hypers["params"])

    def body(carry: Any, x: Any) -> Any:
        (w, v), (a, m) = carry, x
        m = jax.tree.map(lambda m: m + jax.lax.stop_gradient(jnp.round(m * 2**16) / 2**16 - m), m)
        value, g = jax.value_and_grad(NETWORK.loss)(w, hypers["theta"], NETWORK.data)
        v = jax.tree.map(lambda m, v, g: m * v - (1 - m) * g, m, v, g)
        return (jax.tree.map(lambda w, a, v: w + a * v, w, a, v), v), value

    xs = at_each_step(hypers["learning_rate"]), at_each_step(hypers["momentum"])
    (w, v), losses = jax.lax.scan(body, (hypers["params"], hypers["velocity"]), xs)
    return outcome(w, losses, v)


def _shape(p: Any) -> tuple[int, ...]:
    return p.values.shape if isinstance(p, hg.PerStep) else (STEPS, *jnp.shape(p))


def errors(got: Any, expected: Any) -> dict[str, float]:
    """Relative error of each leaf, in norm."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    return {
        jax.tree_util.keystr(path): float(jnp.linalg.norm(jnp.ravel(a - b)) / jnp.linalg.norm(jnp.ravel(b)))
        for (path, a), b in pairs
    }


@functools.cache
def reversed_gradient(forms: str) -> Any:
    with jax.enable_x64(True):
        return jax.jit(jax.grad(functools.partial(trained, hg.Reversible())))(start(forms, jnp.float64))


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("road, bound", [("unrolled", 1e-9), ("checkpointed", 1e-9), ("plain", 1e-7)])
def test_float64_roads_agree(forms, road, bound):
    f = {
        "unrolled": functools.partial(trained, hg.Unrolled()),
        "checkpointed": functools.partial(trained, hg.Checkpointed()),
        "plain": plain,
    }[road]
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(f))(start(forms, jnp.float64))
        worst = errors(reversed_gradient(forms), gradient)
    assert max(worst.values()) <= bound, worst


@pytest.mark.parametrize("forms", FORMS)
def test_central_differences_agree(forms):
    with jax.enable_x64(True):
        hypers, gradient = start(forms, jnp.float64), reversed_gradient(forms)
        f = jax.jit(functools.partial(trained, FINE))
        for kind in hypers:
            one = lambda x, kind=kind: f({**hypers, kind: x})  # noqa: E731
            # Steps of 2^-10 and 2^-11 move a momentum along the grid of 2^-16.
            hg.testing.check_hypergradient(
                one, hypers[kind], tolerance=1e-6, directions=5, step=2.0**-10, gradient=gradient[kind]
            )


@pytest.mark.parametrize("forms", FORMS)
def test_float32_agrees_with_plain_floats(forms):
    hypers = start(forms, jnp.float32)
    ours = jax.jit(jax.grad(functools.partial(trained, hg.Reversible())))(hypers)
    worst = errors(ours, jax.jit(jax.grad(plain))(hypers))
    assert max(worst.values()) <= 1e-3, worst


def test_every_road_trains_to_the_same_bits():
    adjoints = [
        hg.Reversible(), hg.Unrolled(), hg.Checkpointed(), hg.Checkpointed(3),
        hg.Reversible(driver="host"), hg.Reversible(buffer="gmpy2"),
    ]  # fmt: skip
    hypers = start("per step, scalar", jnp.float32)
    sgd = hg.SGD(hypers["learning_rate"], hypers["momentum"])
    runs = [
        hg.train(
            NETWORK.loss,
            hypers["params"],
            sgd,
            hg.full_batch(NETWORK.data),
            theta=hypers["theta"],
            steps=STEPS,
            adjoint=adjoint,
        )  # fmt: skip
        for adjoint in adjoints
    ]
    for run in runs[1:]:
        for x, y in zip(
            jax.tree.leaves((run.params, run.state)), jax.tree.leaves((runs[0].params, runs[0].state)), strict=True
        ):
            np.testing.assert_array_equal(x, y)


def test_host_drivers_give_the_gradient_of_the_scan():
    hypers = start("per step, scalar", jnp.float32)
    expected = jax.jit(jax.grad(functools.partial(trained, hg.Reversible())))(hypers)
    for adjoint in (hg.Reversible(driver="host"), hg.Reversible(buffer="gmpy2")):
        worst = errors(jax.grad(functools.partial(trained, adjoint))(hypers), expected)
        assert max(worst.values()) <= 1e-4, (adjoint, worst)


def test_second_derivatives_through_unrolled_are_differences_of_the_first():
    with jax.enable_x64(True):
        hypers = start("scalar, per step", jnp.float64)
        rate = hypers["learning_rate"]
        at = lambda adjoint, a: trained(adjoint, {**hypers, "learning_rate": a})  # noqa: E731
        second = jax.jit(jax.grad(jax.grad(functools.partial(at, hg.Unrolled()))))(rate)
        first = jax.jit(jax.grad(functools.partial(at, FINE)))
        size = 2.0**-10
        wide, narrow = ((first(rate + s) - first(rate - s)) / (2 * s) for s in (size, size / 2))
        assert abs((4 * narrow - wide) / 3 - second) <= 1e-6 * abs(second)
