"""The reverse pass over a range of steps: `hg.Truncated` is the derivative of the run that begins where they begin."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from covering import long, some_of

import hypergrad as hg
from hypergrad.optimizers.chain import Optimizer


STEPS, LAST = 12, 5
NET = problems.network("tanh")


def value(optimizer: Any, theta: Any, adjoint: Any, dtype: Any = jnp.float64, **options: Any) -> Any:
    run = hg.train(NET.loss, NET.params(dtype), optimizer, NET.batches(STEPS), theta=theta, adjoint=adjoint, **options)
    return NET.value(run.params)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: hg.SGD(hg.PerStep(jnp.linspace(0.1, 0.3, STEPS)), 0.9),
    "adam": lambda: hg.Adam(hg.PerStep(jnp.linspace(0.01, 0.02, STEPS))),
}


@pytest.mark.long
@pytest.mark.of_bits
@some_of("name", OPTIMIZERS, "adam")
def test_of_all_steps_it_is_that_of_reversible(name: str) -> None:
    with jax.enable_x64(True):
        gradient = jax.grad(value, (0, 1))
        pair = (gradient(OPTIMIZERS[name](), NET.theta(jnp.float64), a) for a in (hg.Truncated(STEPS + 1), hg.Reversible()))
        for x, y in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.long
@pytest.mark.of_bits
@pytest.mark.parametrize("compile", [pytest.param(lambda f: f, id="eager"), long(jax.jit, id="jit")])
def test_of_some_steps_it_is_that_of_the_run_that_begins_there(compile: Any) -> None:
    """A rate per step is zero before them; those of the last steps are whole, since nothing before depends on them."""
    with jax.enable_x64(True):
        optimizer, theta = OPTIMIZERS["sgd"](), NET.theta(jnp.float64)
        found, whole = (
            compile(jax.grad(lambda o, a=a: value(o, theta, a)))(optimizer) for a in (hg.Truncated(LAST), hg.Reversible())
        )
        rates = found.learning_rate.values
        assert not rates[:-LAST].any()
        np.testing.assert_allclose(rates[-LAST:], whole.learning_rate.values[-LAST:], rtol=1e-12)

        momentum = compile(jax.grad(lambda o: value(o, theta, hg.Truncated(LAST))))(optimizer).momentum
        assert jnp.isfinite(momentum) and momentum != whole.momentum


# A run that Python cuts in two, so small that it takes no time.
ROWS = np.linspace(-1.0, 1.0, 15).reshape(5, 3) + 0.3


def of_rows(optimizer: Any, start: Any = None, rows: slice = slice(None), **options: Any) -> Any:
    batches, w = hg.stacked(jnp.asarray(ROWS[rows], float)), jnp.array([0.1, 0.2, 0.3])
    return hg.train(
        lambda w, _, x: jnp.sum((w * x - 1.5) ** 2), w if start is None else start, optimizer, batches, **options
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["b1", long("b2")])
def test_what_steps_before_have_of_bias_corrections_is_given(name: str) -> None:
    """And of a value per step nothing is passed on to earlier ones."""

    def late(value: Any) -> Any:
        rule = hg.Adam(0.05, **{name: value})
        head = jax.lax.stop_gradient(of_rows(rule, rows=slice(2)))
        return jnp.sum(of_rows(rule, head.params, slice(2, None), state=head.state, adjoint=hg.Unrolled()).params)

    with jax.enable_x64(True):
        of = lambda v: jnp.sum(of_rows(hg.Adam(0.05, **{name: v}), adjoint=hg.Truncated(3)).params)  # noqa: E731
        np.testing.assert_allclose(jax.jit(jax.grad(of))(0.75), jax.jit(jax.grad(late))(0.75), rtol=1e-7)
        each = jax.jit(jax.grad(lambda v: of(hg.PerStep(v))))(jnp.full(5, 0.75))
        assert not each[:2].any() and each[2:].all()


@pytest.mark.long
def test_nor_have_weights_of_means_that_a_run_ends_with() -> None:
    """`Trained.state` has them, for whoever goes on from there."""
    weight = lambda rule, **options: of_rows(rule, **options).state["mean_weight"]  # noqa: E731
    late = {"adjoint": hg.Truncated(3)}
    with jax.enable_x64(True):
        start = jax.tree.map(jnp.asarray, of_rows(hg.Adam(0.05), rows=slice(2)).state)
        of_state = lambda x: weight(hg.Adam(0.05), state={**start, "mean_weight": x}, **late)  # noqa: E731
        assert jax.grad(of_state)(start["mean_weight"]) == 0
        each = jax.grad(lambda v: weight(hg.Adam(0.05, hg.PerStep(v)), **late))(jnp.full(5, 0.75))
        np.testing.assert_allclose(each, [0, 0, *[-(0.75**4)] * 3])
        constant = jax.grad(lambda v: weight(hg.Adam(0.05, v), **late))
        np.testing.assert_allclose(constant(0.75), jnp.sum(each))
        assert weight(hg.Adam(0.05, 0.75), **late) == weight(hg.Adam(0.05, 0.75))


class OfMean(Optimizer):
    """Every step has the mean of all rates: an entry with one row."""

    learning_rate: Any
    momentum: Any = 0.9
    chain = hg.HeavyBall(0.1).chain

    def prepare(self, h: dict[str, jax.Array], steps: int) -> dict[str, jax.Array]:
        return {**h, "learning_rate": jnp.mean(h["learning_rate"], axis=0, keepdims=True)}


def test_what_steps_before_have_of_a_sum_is_given_whatever_its_shape() -> None:
    with jax.enable_x64(True):
        of = lambda v: jnp.sum(of_rows(OfMean(hg.PerStep(v)), adjoint=hg.Truncated(3)).params)  # noqa: E731
        each = jax.jit(jax.grad(of))(jnp.linspace(0.01, 0.03, 5))
        assert not each[:2].any() and each[2:].all()


def test_nothing_is_spread_over_steps_that_no_step_needs() -> None:
    """A rate for each weight is one row, of which the share that decay leaves is made, one row too."""
    rate, w = jnp.full(64, 0.01), jnp.ones(64)
    train = lambda rate: hg.train(  # noqa: E731
        lambda w, *_: jnp.sum(w**2), w, hg.AdamW(rate), hg.full_batch(0.0), steps=96, adjoint=hg.Truncated(3)
    )
    program = jax.make_jaxpr(lambda rate: train(rate).params)(rate).jaxpr
    large = [x.aval.shape for e in program.eqns for x in e.outvars if x.aval.size >= 64 * 96]
    assert not large


@pytest.mark.long
def test_what_steps_before_have_of_an_average_is_given() -> None:
    with jax.enable_x64(True):
        of = lambda v: jnp.sum(of_rows(hg.ScheduleFreeAdamW(hg.PerStep(v)), adjoint=hg.Truncated(3)).params)  # noqa: E731
        each = jax.jit(jax.grad(of))(jnp.linspace(0.01, 0.03, 5))
        assert not each[:2].any() and each[2:].all()


def test_the_status_says_what_is_left_out() -> None:
    runs = [
        hg.train(NET.loss, NET.params(), hg.SGD(0.1), NET.batches(STEPS), theta=NET.theta(), adjoint=hg.Truncated(last))
        for last in (3, STEPS)
    ]
    assert runs[0].status.approximate == (f"what the first {STEPS - 3} of {STEPS} steps do to the parameters",)
    assert runs[1].status.approximate == ()


def test_it_is_certified_at_its_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypergrad.exact import Fixed

    subtract = Fixed.subtract

    def lying(self: Fixed, *arguments: Any) -> Fixed:
        right = subtract(self, *arguments)
        return right._replace(high=right.high + 1)

    fresh = lambda *a: NET.loss(*a)  # noqa: E731
    gradient = jax.grad(
        lambda rate: jnp.sum(
            hg.train(
                fresh,
                NET.params(),
                hg.SGD(rate),
                NET.batches(STEPS),
                theta=NET.theta(),
                adjoint=hg.Truncated(3),
                throw=False,
            ).params["w1"]
        )
    )
    assert jnp.isfinite(jax.jit(gradient)(0.1))
    jax.clear_caches()
    monkeypatch.setattr(Fixed, "subtract", lying)
    assert jnp.isnan(jax.jit(lambda rate: gradient(rate))(0.1))
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize("last", [0, True, 2.0])
def test_what_is_no_count_of_steps(last: Any) -> None:
    with pytest.raises(ValueError, match="`last` of hg.Truncated must be an integer of at least 1; got"):
        hg.Truncated(last)
