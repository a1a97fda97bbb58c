"""Numbers that a dtype or a grid does not hold: cotangents in 16 bits, gradients at rest, runs too small for their grid,
Adam's state handed on."""

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import every_value, long, some_of
from tiny import fails

import hypergrad as hg


X = jnp.linspace(-1, 1, 20)
Y = jnp.sin(3 * X)
RNG = np.random.default_rng(0)
WEIGHTS = {"a": RNG.normal(size=8).astype(np.float32), "b": (0.3 * RNG.normal(size=8)).astype(np.float32)}
FULL = hg.full_batch(np.zeros(1, np.float32))
ON_GRID = lambda decay: round(decay * 2**16) / 2**16  # noqa: E731


def net(w: Any, x: Any) -> Any:
    return (jnp.tanh(jnp.outer(x.astype(w["a"].dtype), w["a"])) @ w["b"]).astype(jnp.float32)


def validation(w: Any) -> Any:
    return jnp.mean((net(w, X + 0.03) - jnp.sin(3 * X + 0.09)) ** 2)


def slopes(dtype: Any, unit: float = 1.0, loss_scale: float = 1.0) -> dict[str, Any]:
    """Hypergradients of a validation loss that is counted in `unit`, in the unit 1."""

    def loss(w: Any, l2: Any, batch: Any) -> Any:
        squares = sum(jnp.sum(z.astype(jnp.float32) ** 2) for z in w.values())
        return loss_scale * (jnp.mean((net(w, X) - Y) ** 2) + l2 * squares)

    def f(h: Any) -> Any:
        params = {k: jnp.asarray(x, dtype) for k, x in WEIGHTS.items()}
        run = hg.train(loss, params, hg.SGD(h["rate"] / loss_scale, 0.9), FULL, theta=h["l2"], steps=20)
        return unit * validation(run.params)

    found = jax.jit(jax.grad(f))({"rate": 0.2, "l2": 1e-3})
    return {k: float(x) / unit for k, x in found.items()}


def test_cotangents_of_float16_keep_their_exponents() -> None:
    """In a unit in which the cotangent of the trained parameters itself has just enough digits, which is said."""
    with pytest.warns(UserWarning, match="They are float16"):
        small = slopes(jnp.float16, 1e-4)
    for name, x in slopes(jnp.float32).items():
        np.testing.assert_allclose(small[name], x, rtol=8e-2, err_msg=name)


@pytest.mark.long
def test_cotangents_of_float16_beside_a_loss_scale() -> None:
    scaled = slopes(jnp.float16, 1.0, 2.0**15)
    for name, x in slopes(jnp.float32).items():
        np.testing.assert_allclose(scaled[name], x, rtol=5e-2, err_msg=name)


@every_value("dtype, adjoint", [jnp.bfloat16, jnp.float16], [hg.Reversible(), hg.Unrolled()])
def test_cotangents_of_narrow_theta_are_summed_in_float32(dtype: Any, adjoint: Any) -> None:
    def f(theta: Any) -> Any:
        loss = lambda w, theta, _: -0.01 * jnp.sum(w) * theta.astype(jnp.float32)  # noqa: E731
        run = hg.train(loss, jnp.zeros(1), hg.SGD(0.1, 0.5), FULL, theta=theta, steps=2000, adjoint=adjoint)
        return jnp.sum(run.params)

    gradient = jax.grad(f)(jnp.ones((), dtype))
    assert gradient.dtype == dtype
    np.testing.assert_allclose(float(gradient), 2.0, rtol=8e-3)  # 2,000 equal terms stagnate after 256 in bfloat16


@pytest.mark.parametrize("rule", [lambda: hg.RMSProp(0.1, 0.9, 0.5, 1e-2), lambda: hg.clip(hg.SGD(0.5, 0.5), 10.0)])
def test_a_gradient_at_rest_passes_on_what_comes_in_large(rule: Any) -> None:
    """It begins at its optimum, where the gradient is exactly zero."""

    def f(theta: Any, unit: float) -> Any:
        loss = lambda w, theta, _: 0.5 * (w - theta) ** 2  # noqa: E731
        return unit * hg.train(loss, jnp.float32(1.0), rule(), FULL, theta=theta, steps=10).params

    expected = jax.grad(f)(1.0, 1.0)
    np.testing.assert_allclose(jax.grad(f)(1.0, 1e16) / 1e16, expected, rtol=1e-5)


def told(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = jax.block_until_ready(function())
        jax.effects_barrier()
    return found, [str(w.message) for w in caught]


def trained(unit: float, rate: Any, params: Any = WEIGHTS, adjoint: Any = hg.Reversible()) -> Any:  # noqa: B008 (frozen)
    loss = lambda w, _, batch: unit * jnp.mean((net(w, X) - Y) ** 2)  # noqa: E731
    return hg.train(loss, params, hg.SGD(rate / unit, 0.9), FULL, steps=20, adjoint=adjoint).params


ROADS, WAYS = (hg.Reversible(), hg.Unrolled()), (lambda f: f, jax.jit)


@some_of(("adjoint", "compile"), list(itertools.product(ROADS, WAYS)), (ROADS[0], WAYS[1]))
def test_a_loss_in_small_units_warns_with_the_cure(adjoint: Any, compile: Any) -> None:
    run = lambda unit: told(lambda: compile(lambda rate: trained(unit, rate, adjoint=adjoint))(0.2))  # noqa: E731
    _, texts = run(1e-9)
    assert len(texts) == 1 and "velocity" in texts[0] and "fixed-point grid" in texts[0], texts
    shift = int(re.search(r"the loss times 2\^(\d+)", texts[0])[1])
    cured, none = run(1e-9 * 2.0**shift)
    assert not none
    plain, none = run(1.0)
    assert not none
    for name in WEIGHTS:
        np.testing.assert_allclose(cured[name], plain[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_parameters_in_small_units_warn_with_the_cure() -> None:
    def run(size: float) -> Any:
        target = size * jnp.array([1.0, 2.0, 3.0])
        loss = lambda w, _, b: 0.5 * jnp.sum((w - target) ** 2)  # noqa: E731
        start = size * jnp.array([3.0, -2.0, 1.5])
        return told(lambda: hg.train(loss, start, hg.SGD(0.3, 0.9), FULL, steps=20).params / size)

    _, texts = run(1e-11)
    assert len(texts) == 1, texts
    shift = int(re.search(r"times 2\^(\d+)\. A finer", texts[0])[1])
    cured, none = run(1e-11 * 2.0**shift)
    assert not none
    np.testing.assert_allclose(cured, run(1.0)[0], rtol=1e-5)


@pytest.mark.parametrize("unused", [(2,), long((0,))], ids=["two", "none"])
def test_a_leaf_without_gradient_hides_no_small_run(unused: Any) -> None:
    params = {"used": jnp.zeros(3), "unused": jnp.ones(unused)}
    loss = lambda w, _, b: 1e-10 * jnp.sum((w["used"] - jnp.arange(3)) ** 2)  # noqa: E731
    _, texts = told(lambda: hg.train(loss, params, hg.SGD(1e9, 0.5), FULL, steps=8).params)
    assert len(texts) == 1 and "velocity['used'] is too small" in texts[0], texts


def test_the_meta_loop_says_so_once() -> None:
    train_fn = lambda h, key: trained(1e-9, h["rate"])  # noqa: E731
    _, texts = told(lambda: hg.optimize(train_fn, validation, {"rate": hg.positive(0.2)}, meta_steps=3).history[-1].value)
    assert len([text for text in texts if "too small" in text]) == 1, texts


DATA = jnp.asarray(RNG.uniform(-1, 1, (20, 5)))


def of_batch(w: Any, theta: Any, batch: Any) -> Any:
    return jnp.mean((net(w, batch) - jnp.sin(3 * batch)) ** 2)


@some_of("rule", [hg.Adam, hg.AdamW], hg.Adam)
def test_adam_goes_on_where_it_ended(rule: Any) -> None:
    """12 and 8 steps are 20, with a schedule of the decay too; in value and slope."""

    def run(rate: Any, cut: int) -> Any:
        b1 = jnp.linspace(0.85, 0.95, 20)
        w, state = jax.tree.map(jnp.asarray, WEIGHTS), None
        for part in (slice(0, cut), slice(cut, 20)):
            made = hg.train(of_batch, w, rule(rate, b1=hg.PerStep(b1[part])), hg.stacked(DATA[part]), state=state)
            w, state = made.params, made.state
        return validation(w)

    whole = lambda rate: validation(  # noqa: E731
        hg.train(of_batch, WEIGHTS, rule(rate, b1=hg.PerStep(jnp.linspace(0.85, 0.95, 20))), hg.stacked(DATA)).params
    )
    found, expected = (jax.jit(jax.value_and_grad(f))(0.05) for f in (lambda rate: run(rate, 12), whole))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_a_state_that_no_run_makes_is_used_as_the_formula_says() -> None:
    """m = 0.1, s = 1e-6: s is less than any gradients leave it beside such an m."""
    with jax.enable_x64(True):
        start, data = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (WEIGHTS, np.asarray(DATA)))
        loss = lambda w, _, x: jnp.mean((jnp.tanh(jnp.outer(x, w["a"])) @ w["b"] - jnp.sin(3 * x)) ** 2)  # noqa: E731
        full = lambda c: jax.tree.map(lambda z: jnp.full_like(z, c), start)  # noqa: E731
        b1, b2 = round(0.9 * 2**16) / 2**16, round(0.999 * 2**16) / 2**16
        given = {"mean": full(0.1), "square": full(1e-6)}
        made = hg.train(loss, start, hg.Adam(0.01), hg.stacked(data[:8]), state=given)
        w, m, s = start, full(0.1), full(1e-6)
        gradient = jax.jit(jax.grad(loss))
        for t in range(8):
            g = gradient(w, None, data[t])
            m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, g)
            s = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, s, g)
            c1, c2 = 1 - b1 ** (t + 1), 1 - b2 ** (t + 1)
            w = jax.tree.map(lambda w, m, s, c1=c1, c2=c2: w - 0.01 * (m / c1) / (jnp.sqrt(s / c2) + 1e-8), w, m, s)
        for name in w:
            np.testing.assert_allclose(made.params[name], w[name], rtol=1e-8, atol=1e-9, err_msg=name)


def test_a_weight_of_a_state_that_is_no_weight_is_refused() -> None:
    state = hg.train(of_batch, WEIGHTS, hg.Adam(0.01), hg.stacked(DATA)).state
    with fails((ValueError, TypeError), "mean_weight"):
        hg.train(of_batch, WEIGHTS, hg.Adam(0.01), hg.stacked(DATA), state={**state, "mean_weight": jnp.ones(7)})


@jax.custom_vjp
def normalized(x: Any) -> Any:
    return x


def _over_its_norm(_: None, g: Any) -> Any:
    wide = g.astype(jnp.float32)
    return ((wide / jnp.sqrt(jnp.mean(wide * wide) + 1e-2)).astype(g.dtype),)


normalized.defvjp(lambda x: (x, None), _over_its_norm)


@some_of("size", [1e-2, 1e2], 1e-2)
def test_a_rule_in_float16_that_is_not_linear_in_its_cotangent(size: float) -> None:
    """Cotangents of other losses are scaled on their way through float16."""

    def bent(w: Any, theta: Any, x: Any) -> Any:
        joint = jnp.mean(normalized((theta * x).astype(jnp.float16)).astype(jnp.float32)) + jnp.sum(w**2)
        return joint + jnp.sin(2 * joint)

    def value(theta: Any, adjoint: Any) -> Any:
        batches = hg.full_batch(jnp.linspace(-1, 2, 48).reshape(16, 3))
        run = hg.train(bent, jnp.ones(3) / 3, hg.SGD(0.1, 0.5), batches, theta=theta, steps=4, adjoint=adjoint)
        return size * jnp.sum(jnp.sin(run.params))

    ours, unrolled = (jax.jit(jax.grad(lambda t, a=a: value(t, a)))(0.4) for a in (hg.Reversible(), hg.Unrolled()))
    np.testing.assert_allclose(ours, unrolled, rtol=1e-3)


RESTING: dict[str, Any] = {
    "Adam b2=0.95": (hg.Adam(1e-3, b2=0.95), optax.adam(1e-3, ON_GRID(0.9), ON_GRID(0.95))),
    "Adam b2=0.99": (hg.Adam(1e-3, b2=0.99), optax.adam(1e-3, ON_GRID(0.9), ON_GRID(0.99))),
    "HeavyBall": (hg.HeavyBall(1e-3, 0.9), optax.sgd(1e-3, ON_GRID(0.9))),
    "each weight's own": (hg.Adam(1e-3, jnp.full(4, 0.9), 0.95), optax.adam(1e-3, ON_GRID(0.9), ON_GRID(0.95))),
}


@some_of(
    ("x64", "name"),
    list(itertools.product([False, True], RESTING)),
    *((True, "Adam b2=0.95"), (False, "each weight's own")),
)
def test_a_weight_whose_gradients_have_ended_rests(name: str, x64: bool) -> None:
    """Rounded down at every word, a mean stays at -1 quantum, and what is divided by its own size moves on for ever.

    What each weight decays by its own has other digits in place of its last 16 bits, but of no sign.
    """
    (ours, theirs), rtol = RESTING[name], 0.05 if name == "each weight's own" else 1e-3
    steps, w = 2000, np.ones(4)
    first = np.zeros((steps, 4))
    first[0] = [1e-2, -1e-2, 3e-3, -3e-3]

    def step(carry: Any, g: Any) -> Any:
        w, state = carry
        update, state = theirs.update(g, state, w)
        return (w + update, state), None

    with jax.enable_x64(True):
        (expected, _), _ = jax.lax.scan(step, (jnp.asarray(w), theirs.init(jnp.asarray(w))), jnp.asarray(first))
    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        found = hg.train(lambda w, _, g: jnp.sum(w * g), w.astype(dtype), ours, hg.stacked(first.astype(dtype)), steps=steps)
        np.testing.assert_allclose(np.asarray(found.params, float) - 1, np.asarray(expected) - 1, rtol=rtol, atol=1e-7)
