"""Derivative rules that are not JAX's own: which are told as such, and what each part of a run is differentiated by."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from covering import some_of
from jax.scipy import special

import hypergrad as hg
from experiments import _judge
from experiments._bent_rules import bell, free_equilibrium, half_turned, minus, plus, scaled, turned
from hypergrad._own_rules import own_rule
from hypergrad._program_keys import equations


X = jnp.full(3, 0.3)
AROUND = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: jax.vmap(jax.jit(f)),
    "checkpoint": lambda f: jax.checkpoint(jax.jit(f)),
    "loop": lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, z: z + f(x), x),
    "gradient": lambda f: jax.grad(lambda x: jnp.sum(jax.checkpoint(jax.jit(lambda x: jnp.sin(f(x))))(x))),
}


def declares(function: Any) -> bool:
    return any(map(own_rule, equations(jax.make_jaxpr(function)(X).jaxpr)))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize(
    "function",
    (
        jax.nn.relu,
        jax.nn.relu6,
        jax.nn.gelu,
        jax.nn.softplus,
        jnp.sinc,
        jnp.i0,
        special.logit,
        special.log_ndtr,
        special.expi,
    ),
)
def test_what_jax_declares_is_its_own(function: Any, around: Any) -> None:
    assert not declares(around(function))


class Slope:
    """Nobody can look into it."""

    def __call__(self, t: Any, ans: Any, x: Any) -> Any:
        return t / (1 + x**2)


SLOPES = {
    "function": lambda t, ans, x: t / (1 + x**2),
    "jit": jax.jit(lambda t, ans, x: t / (1 + x**2)),
    "partial": functools.partial(lambda k, t, ans, x: t / (k + x**2), 1.0),
    "callable": Slope(),
    "method": Slope().__call__,
}


@pytest.mark.parametrize("around", [AROUND[k] for k in ("alone", "jit", "vmap", "checkpoint", "loop")])
@pytest.mark.parametrize("slope", SLOPES.values(), ids=SLOPES)
@pytest.mark.parametrize("function", (jax.nn.softplus, jax.nn.relu, jnp.tanh))
def test_a_rule_of_the_users_for_a_function_of_jax_is_the_users(function: Any, slope: Any, around: Any) -> None:
    by_parts, whole = jax.custom_jvp(function), jax.custom_jvp(function)
    by_parts.defjvps(slope)
    whole.defjvp(lambda xs, ts: (whole(*xs), slope(*ts, None, *xs)))
    assert declares(around(by_parts)) and declares(around(whole))


def squares(p: Any, theta: Any) -> Any:
    return theta["s"] * jnp.sum(p**2) + jnp.mean(jnp.sin(theta["v"] * p))


# name -> (parameters, theta, x) -> hidden values. Each was silently wrong once: a rule for a function of JAX, a solution
# with an approximate derivative, a loss and evidence that a rule bends, a rule that only theta passes through.
LOSSES = {
    "defjvp of softplus": lambda p, theta, x: jnp.sin(2 * plus(x @ p)),
    "defjvps of relu": lambda p, theta, x: jnp.sin(2 * minus(x @ p)),
    "approximate tangent_solve": lambda p, theta, x: free_equilibrium(x * p, theta["s"]),
    "turned": lambda p, theta, x: turned(x @ p, theta["s"]),
    "optax.scale_gradient": lambda p, theta, x: half_turned(x * p),
    "of theta alone": lambda p, theta, x: x @ (p * bell(scaled(theta["v"], 0.4), 1.0)),
}


@some_of(
    ("name", "rule"),
    list(itertools.product(LOSSES, ["SGD", "Adam"])),
    ("defjvps of relu", "Adam"),
)
def test_each_part_of_a_run_is_differentiated_as_training_computes_it(name: str, rule: str) -> None:
    """Of the parameters, the learning curve and statistics, with one weight each, so that an error in one of them shows."""
    with jax.enable_x64(True):
        x = jnp.cos(jnp.arange(12.0).reshape(4, 3))

        def loss(p: Any, theta: Any, x: Any) -> Any:
            total = jnp.mean(jnp.tanh(LOSSES[name](p, theta, x)) ** 2) + squares(p, theta)
            return total, jnp.tanh(x[:, 0] * total)

        def value(h: Any, key: Any, adjoint: Any) -> Any:
            rates = {"SGD": lambda a: hg.SGD(a, 0.75), "Adam": lambda a: hg.Adam(a / 10, eps=0.1)}
            means = hg.Statistics(h["means"], 0.8)
            run = hg.train(
                loss, h["params"], rates[rule](h["rate"]), hg.full_batch(x), theta=h["theta"], steps=4, statistics=means,
                adjoint=adjoint,
            )  # fmt: skip
            return sum(jnp.sum(jnp.sin(3 * part + 1)) for part in (run.params, run.losses, run.statistics))

        theta = {"s": jnp.float64(0.3), "v": jnp.array([0.3, 0.2, -0.4])}
        h = {"params": jnp.linspace(-1, 1, 3), "theta": theta, "rate": jnp.float64(0.5), "means": jnp.zeros(4)}
        verdict = _judge.judge(_judge.Case(value, h, jax.random.key(0)), tuple(h), "jit", 1e-9)
        assert verdict.kind == "equal", verdict
