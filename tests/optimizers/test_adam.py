"""Adam where floats end: second moments lost in noise, what bounds them, roots at zero, and small gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from jax.test_util import check_grads

import hypergrad as hg


STEPS = 12


@pytest.mark.of_bits
@pytest.mark.filterwarnings("ignore:.*too small for its fixed-point grid")
@pytest.mark.parametrize("b", [long(0.0, id="shared"), pytest.param(jnp.zeros(200), id="of each weight's own")])
def test_second_moments_lost_in_noise_do_not_blow_up_a_step(b: Any) -> None:
    """Gradients from far below the quanta to far above, and an eps that hides nothing."""
    optimizer = hg.Adam(1.0, 0.9 + b, 0.999 + b, 1e-15)
    g = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, 200)) * np.geomspace(1e-11, 1e-7, 200), jnp.float32)
    visited: dict[int, Any] = {}

    def loss(w: jax.Array, _: Any, batch: Any) -> jax.Array:
        jax.debug.callback(lambda t, w: visited.update({int(t): np.array(w)}), batch[0], w)
        return jnp.vdot(w, batch[1])

    end = hg.train(loss, jnp.zeros(200), optimizer, lambda t: (t, g[t]), steps=STEPS).params
    jax.effects_barrier()
    way = np.stack([*(visited[t] for t in range(STEPS)), end])
    assert 1 < np.abs(np.diff(way, axis=0)).max() <= (1 - 0.9) / np.sqrt(1 - 0.999), "more than Adam's own bound"


@pytest.mark.filterwarnings("ignore:.*too small for its fixed-point grid")
@pytest.mark.parametrize("b2", [0.999, 0.9], ids=["the mean bounded", "nothing bounds it"])
def test_where_second_moments_are_lost_the_derivative_is_that_of_the_mean(b2: float) -> None:
    """w <- w - a g / eps, as g^2 is far below the quanta: any root but zero there would show."""
    batches = hg.full_batch(jnp.zeros(1))

    def end(g: jax.Array) -> jax.Array:
        run = hg.train(lambda w, g, _: jnp.vdot(w, g), jnp.ones(3), hg.Adam(1e-3, 0.95, b2), batches, theta=g, steps=5)
        return jnp.sum(run.params)

    slopes = jax.grad(end)(jnp.full(3, 1e-12))
    np.testing.assert_allclose(slopes, -5 * 1e-3 / 1e-8, rtol=1e-6)


def test_where_second_moments_are_lost_the_bound_has_its_derivative_in_the_bias_corrections() -> None:
    """w <- w - a / c1 sign(m) sqrt(c2) / r, as s is 0: r replaces noise and has no derivative, c1 and c2 have theirs."""
    steps, b1, b2, none = 5, 0.875, 0.9990234375, hg.full_batch(jnp.zeros(1))

    class Lost(hg.Adam):
        """As if it had made this state itself: of one that is handed in, nothing is replaced."""

        def begin(self, h: dict[str, jax.Array], z: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return h

    def end(optimizer: Any) -> jax.Array:
        moments = {"mean": jnp.array([0.5, -0.25]), "square": jnp.zeros(2)}
        run = hg.train(lambda w, _, __: 0 * jnp.sum(w), jnp.zeros(2), optimizer, none, steps=steps, state=moments)
        return run.params[1] - run.params[0]

    def predicted(a: jax.Array, b1: jax.Array, b2: jax.Array) -> jax.Array:
        least = jax.lax.stop_gradient(0.999 * jnp.sqrt((1 - b1**2 / b2) * (1 - b2)) / (1 - b1))
        t = jnp.arange(1, steps + 1)
        return jnp.sum(2 * a * jnp.sqrt(1 - b2**t) / ((1 - b1**t) * least))

    with jax.enable_x64(True):
        at = jnp.float64(1e-3), jnp.float64(b1), jnp.float64(b2)
        value, slopes = jax.value_and_grad(end)(Lost(*at, eps=1e-30))
        expected, derivatives = jax.value_and_grad(predicted, argnums=(0, 1, 2))(*at)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose((slopes.learning_rate, slopes.b1, slopes.b2), derivatives, rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "b1", "growth"),
    [(hg.Adam, 2.0**-16, 1.01), long(hg.Adam, 58982 / 2**16, 65470 / 58982), long(hg.AdamW, 2.0**-14, 0.7)],
)
def test_gradients_that_attain_the_bound_have_the_derivative_of_the_root(rule: Any, b1: float, growth: float) -> None:
    """By a plain loop in float64: next to no memory of the mean, or gradients that grow by b2 / b1 a step."""
    steps, b2 = 40, 65470 / 2**16
    g = np.float32(1e-3 * growth ** np.arange(steps))[:, None] * np.float32([1, -2, 0.5, 3])

    def end(decays: tuple[Any, Any]) -> jax.Array:
        optimizer = rule(0.1, *decays, **({"weight_decay": 0.0} if rule is hg.AdamW else {}))
        run = hg.train(lambda w, _, batch: jnp.vdot(w, batch), jnp.zeros(4), optimizer, hg.stacked(g), steps=steps)
        return jnp.vdot(run.params, jnp.arange(1.0, 5.0))

    def plain(decays: tuple[Any, Any]) -> jax.Array:
        (b1, b2), w, m, s = decays, 0.0, 0.0, 0.0
        for t, x in enumerate(g.astype(np.float64), 1):
            m, s = b1 * m + (1 - b1) * x, b2 * s + (1 - b2) * x**2
            w -= 0.1 * (m / (1 - b1**t)) / (jnp.sqrt(s / (1 - b2**t)) + 1e-8)
        return jnp.vdot(w, jnp.arange(1.0, 5.0))

    slopes = jax.grad(end)((jnp.float32(b1), jnp.float32(b2)))
    with jax.enable_x64(True):
        expected = jax.grad(plain)((jnp.float64(b1), jnp.float64(b2)))
    np.testing.assert_allclose(slopes, expected, rtol=1e-3)


def test_the_second_derivative_of_adam_is_that_of_the_first() -> None:
    """Its rule for a quotient names the quotient again; one weight has no gradient, where a root has no derivative."""
    with jax.enable_x64(True):
        start = jnp.array([0.3, -0.7, 0.0])

        def end(rate: jax.Array) -> jax.Array:
            loss = lambda w, _, batch: jnp.sum((w[:2] ** 2 - batch) ** 2)  # noqa: E731
            run = hg.train(loss, start, hg.Adam(rate), hg.full_batch(jnp.ones(1)), steps=10, adjoint=hg.Unrolled())
            return jnp.sum(run.params**3)

        check_grads(jax.jit(jax.grad(end)), (jnp.float64(0.03),), 1, ["rev"], rtol=1e-6, eps=1e-6)


@some_of(
    ("penalty", "given"),
    [(x, y) for x in ("in the loss", "added to the gradient") for y in ((0.01, 1e-8, 1e-3), (0.1, 1e-30, 50.0))],
    ("in the loss", (0.1, 1e-30, 50.0)),
)
def test_a_weight_at_rest_spoils_no_derivative_however_its_own_grows(
    penalty: str, given: tuple[float, float, float]
) -> None:
    """The last has no gradient and a curvature: w <- w - a / eps c w, 2,000 times w a step. The others never see it."""
    x = jax.random.normal(jax.random.key(0), (32, 4)).at[:, 3].set(0.0)
    batches = hg.full_batch((x, x[:, 0] - x[:, 1]))

    def end(weights: int, rate: jax.Array, eps: jax.Array, l2: jax.Array) -> jax.Array:
        def loss(w: jax.Array, l2: jax.Array, batch: Any) -> jax.Array:
            fit = jnp.mean((batch[0][:, :weights] @ w - batch[1]) ** 2)
            return fit + l2 * jnp.sum(w**2) if penalty == "in the loss" else fit

        optimizer: Any = hg.Adam(rate, eps=eps)
        if penalty != "in the loss":
            optimizer = hg.add_decayed_weights(optimizer, 2 * l2)
        run = hg.train(loss, jnp.zeros(weights), optimizer, batches, theta=l2, steps=100)
        return jnp.sum((run.params - 1) ** 2)

    slopes, expected = (jax.grad(end, argnums=(1, 2, 3))(n, *given) for n in (4, 3))
    np.testing.assert_allclose(slopes, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, long(jnp.bfloat16), long(jnp.float32)])
def test_blank_data_has_its_derivative(dtype: Any) -> None:
    """Of one step: a weight whose gradient is zero as its data are zero has the slope rate / eps in them."""
    rate, eps = 0.125, 1e-3

    def end(blank: jax.Array) -> jax.Array:
        loss = lambda w, blank, _: jnp.vdot(w, blank.astype(w.dtype))  # noqa: E731
        run = hg.train(loss, jnp.ones(2, dtype), hg.Adam(rate, eps=eps), hg.full_batch(jnp.zeros(1)), theta=blank, steps=1)
        return 8 * jnp.sum(run.params.astype(jnp.float32))

    np.testing.assert_allclose(jax.grad(end)(jnp.zeros(2)), -8 * rate / eps, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:.*too small for its fixed-point grid")
@pytest.mark.parametrize("rule", [hg.Adam(1e-3), long(hg.AdamW(1e-3))], ids=["Adam", "AdamW"])
def test_small_gradients_have_a_square_from_the_first_steps(rule: Any) -> None:
    """1e-8, of which s gets 1e-19: on a low limb of 32 bits, quanta that wait for a slow decay would drop it."""
    slope, steps = jnp.asarray([1e-8, -3e-8, 1e-6]), 20
    run = hg.train(lambda w, _, g: jnp.vdot(w, g), jnp.zeros(3), rule, hg.full_batch(slope), steps=steps)
    rho = round(rule.b2 * 2**16) / 2**16
    np.testing.assert_allclose(run.state["square"], (1 - rho**steps) * np.square(slope, dtype=np.float64), rtol=0.005)


@some_of("b2", [0.999, 1 - 2.0**-16], 1 - 2.0**-16)
def test_weights_of_a_state_keep_the_digits_of_bias_corrections(b2: float) -> None:
    for steps in (2, 10, 100):
        batch = hg.full_batch(jnp.float32(0))
        run = hg.train(lambda w, _, x: jnp.sum((w - x) ** 2), jnp.ones(3), hg.Adam(0.01, 0.5, b2), batch, steps=steps)
        exact = -np.expm1(steps * np.log(np.round(b2 * 2**16) / 2**16))
        np.testing.assert_allclose(run.state["square_weight"], exact, rtol=5e-7)
