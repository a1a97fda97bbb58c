"""Running statistics: they move as their recursion says, come back bit for bit, and have one derivative on every road."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from tiny import fails, fails_compiled

import hypergrad as hg
from experiments import _quick
from hypergrad.optimizers import Link
from hypergrad.optimizers.chain import Optimizer


STEPS = 12
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(STEPS, 8, 3)).astype(np.float32)
START = RNG.normal(size=(3, 2)).astype(np.float32)


def apply(w: Any, x: Any, mean: Any, var: Any) -> jax.Array:
    return jnp.sum(jnp.tanh((x @ w - mean) / jnp.sqrt(var + 1e-2)), axis=1)


def loss(w: Any, theta: Any, x: Any) -> Any:
    """A batch-normalized layer and what its running statistics follow."""
    hidden = x @ w
    evidence = {"mean": jnp.mean(hidden, axis=0), "var": jnp.var(hidden, axis=0) + theta["shift"]}
    fit = jnp.mean((apply(w, x, evidence["mean"], evidence["var"]) - jnp.sin(x[:, 0])) ** 2)
    return fit + theta["l2"] * jnp.sum(w**2), evidence


def hypers_of(dtype: Any) -> dict[str, Any]:
    return {
        "params": jnp.asarray(START, dtype),
        "theta": {"l2": jnp.asarray(0.01, dtype), "shift": jnp.asarray(0.1, dtype)},
        "learning_rate": jnp.asarray(0.05, dtype),
        "values": {"mean": jnp.zeros(2, dtype), "var": jnp.ones(2, dtype)},
        "decay": {"mean": hg.PerStep(jnp.linspace(0.5, 0.9, STEPS, dtype=dtype)), "var": jnp.asarray([0.75, 0.5], dtype)},
    }


def trained(h: dict[str, Any], rule: Any = hg.SGD, **options: Any) -> hg.Trained:
    statistics = hg.Statistics(h["values"], h["decay"])
    batches = hg.stacked(ROWS.astype(h["params"].dtype))
    return hg.train(
        loss, h["params"], rule(h["learning_rate"], 0.75), batches, theta=h["theta"], statistics=statistics, **options
    )


def objective(adjoint: Any, rule: Any, h: dict[str, Any]) -> Any:
    run = trained(h, rule, adjoint=adjoint)
    fit = apply(run.params, ROWS[0], **run.statistics) - jnp.cos(ROWS[0][:, 0])
    return jnp.mean(fit**2) + jnp.sum(run.losses * jnp.cos(jnp.arange(STEPS))), run


ROADS = {"reversible": hg.Reversible(), "unrolled": hg.Unrolled(), "checkpointed": hg.Checkpointed(3)}


def clipped(learning_rate: Any, momentum: Any) -> Any:
    """A rule that is not linear in the gradient."""
    return hg.clip(hg.SGD(learning_rate, momentum), 0.5)


@functools.cache
def evaluate(road: str, rule: Any) -> Any:
    """((value, the run), gradients) in float64."""
    with jax.enable_x64(True):
        function = jax.jit(jax.value_and_grad(functools.partial(objective, ROADS[road], rule), has_aux=True))
        return jax.tree.map(np.asarray, function(hypers_of(jnp.float64)))


@pytest.mark.parametrize(("road", "rule"), [("unrolled", hg.SGD), long("checkpointed", hg.SGD), long("unrolled", clipped)])
def test_every_road_gives_the_same_run_and_the_same_derivative(road: str, rule: Any) -> None:
    (_, ours), gradients = evaluate("reversible", rule)
    (_, theirs), expected = evaluate(road, rule)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(x, y)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        assert 0 < np.linalg.norm(y), jax.tree_util.keystr(path)
        assert np.linalg.norm(x - y) <= 1e-9 * np.linalg.norm(y), jax.tree_util.keystr(path)


def plain(h: dict[str, Any]) -> Any:
    """SGD and the recursion of the means in floats: decays on the grid of 2^-16, and nothing of the library."""
    on_grid = lambda r: r + jax.lax.stop_gradient(jnp.round(r * 2**16) / 2**16 - r)  # noqa: E731

    def body(carry: Any, x: Any) -> Any:
        (w, v, s), (batch, r) = carry, x
        (value, seen), g = jax.value_and_grad(loss, has_aux=True)(w, h["theta"], batch)
        v = 0.75 * v - 0.25 * g
        return (
            w + h["learning_rate"] * v,
            v,
            jax.tree.map(lambda s, e, r: on_grid(r) * s + (1 - on_grid(r)) * e, s, seen, r),
        ), value

    decays = {"mean": h["decay"]["mean"].values, "var": jnp.broadcast_to(h["decay"]["var"], (STEPS, 2))}
    start = h["params"], jnp.zeros_like(h["params"]), h["values"]
    (w, _, s), losses = jax.lax.scan(body, start, (ROWS.astype(jnp.float64), decays))
    fit = apply(w, ROWS[0], **s) - jnp.cos(ROWS[0][:, 0])
    return jnp.mean(fit**2) + jnp.sum(losses * jnp.cos(jnp.arange(STEPS))), s


def test_they_move_and_are_differentiated_as_their_recursion_says() -> None:
    (value, run), gradients = evaluate("reversible", hg.SGD)
    lost = -2 * np.log2(np.linspace(0.5, 0.9, STEPS)).mean() - np.log2([0.75, 0.5]).sum()
    assert run.status.ideal_bits == pytest.approx(-np.log2(0.75) + lost / START.size, rel=1e-3)
    with jax.enable_x64(True):
        function = jax.jit(jax.value_and_grad(plain, has_aux=True))
        expected, slopes = jax.tree.map(np.asarray, function(hypers_of(jnp.float64)))
    for x, y in zip(jax.tree.leaves((value, run.statistics)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(slopes), strict=True):
        assert np.linalg.norm(x - y) <= 1e-8 * np.linalg.norm(y), jax.tree_util.keystr(path)


@pytest.mark.long
def test_what_is_batched_may_leave_the_parameters_alone() -> None:
    h = hypers_of(jnp.float32)

    def value(decay: Any, values: Any) -> Any:
        statistics = hg.Statistics(values, decay)
        run = hg.train(loss, h["params"], hg.SGD(0.05), hg.stacked(ROWS), theta=h["theta"], statistics=statistics)
        return jnp.sum(run.statistics["var"])

    decays = jnp.array([0.5, 0.99])
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(value), in_axes=(0, None)))(decays, h["values"])
    assert jnp.isfinite(slopes).all() and slopes[0] != slopes[1] and values[0] != values[1]


def simple(evidence: Callable[[Any], Any] = lambda w: w) -> Any:
    return lambda w, _, x: (jnp.sum((w - x) ** 2), evidence(w))


SIMPLE = simple()


def run(loss: Any = SIMPLE, statistics: Any = None, **options: Any) -> hg.Trained:
    statistics = jnp.zeros(2) if statistics is None else statistics
    batches = hg.full_batch(jnp.ones(2))
    return hg.train(loss, jnp.zeros(2), hg.SGD(0.1), batches, steps=3, statistics=statistics, **options)


@pytest.mark.long
def test_evidence_that_changes_is_found_out() -> None:
    """Python runs in the loss; parameters and velocity come back all the same."""

    def changing() -> Any:
        calls, like = itertools.count(1), jax.ShapeDtypeStruct((2,), jnp.float32)
        return simple(lambda w: jax.pure_callback(lambda: np.full(2, next(calls), np.float32), like))

    arguments, statistics = (jnp.ones(2), hg.SGD(0.1), hg.full_batch(jnp.zeros(2))), jnp.zeros(2)
    proof = hg.check_reversal(changing(), *arguments, steps=3, statistics=statistics)
    assert not proof.exact and proof.first_mismatch.place == "statistics"
    with pytest.raises(hg.ReversalError, match="bits of statistics.*a loss that calls Python.*a defect of hypergrad"):
        jax.grad(lambda s: jnp.sum(run(changing(), s).params))(statistics)


def test_evidence_without_a_derivative_harms_nothing_if_nobody_differentiates_it() -> None:
    def constant(w: Any, _: Any, x: Any) -> Any:
        return jnp.sum((x - w) ** 2), jnp.sqrt(0 * w)

    def end(w: Any) -> Any:
        return jnp.sum(hg.train(constant, w, hg.SGD(0.1), hg.full_batch(jnp.ones(2)), steps=3, statistics=w).params)

    assert jnp.isfinite(jax.jit(jax.grad(end))(jnp.zeros(2))).all()


MISTAKES = {
    "no evidence": (
        TypeError,
        lambda: run(lambda w, _, x: jnp.sum(w * x)),
        "two things, the loss and the evidence",
        "float32[]",
    ),
    "a dictionary": (TypeError, lambda: run(lambda w, _, x: {"loss": w}), "`return value, evidence`; got a dict"),
    "another tree": (
        ValueError,
        lambda: run(simple(lambda w: (w, w))),
        "a pytree like them: PyTreeDef(*); got PyTreeDef((*, *))",
    ),
    "another shape": (ValueError, lambda: run(simple(jnp.sum)), "evidence is float32[], and statistics is float32[2]"),
    "evidence that is no float": (ValueError, lambda: run(simple(lambda w: w > 0)), "evidence is bool[2]", "mean"),
    "a vector for a loss": (ValueError, lambda: run(lambda w, _, x: (w, w)), "`loss` must return a scalar; got shape (2,)"),
    "an integer": (
        TypeError,
        lambda: run(statistics={"n": jnp.arange(2)}),
        "statistics['n'] is int32[2]",
        "a count of steps",
    ),
    "nothing": (ValueError, lambda: run(statistics={}), "`statistics` is empty"),
    "a domain": (
        TypeError,
        lambda: run(statistics=hg.Statistics(jnp.zeros(2), hg.unit_interval(0.9))),
        "`statistics` holds a dom",
    ),
    "a decay of 1": (
        hg.RangeError,
        lambda: run(statistics=hg.Statistics(jnp.zeros(2), 1.0)),
        "`statistics.decay for statistics` must be in (0, 1); got 1.0",
    ),
    "a decay of another shape": (
        ValueError,
        lambda: run(statistics=hg.Statistics(jnp.zeros(2), jnp.full(3, 0.9))),
        "statistics.decay for statistics has shape (3,)",
        "the statistic's own shape (2,). Wrap it in hg.PerStep",
    ),
    "a decay of another tree": (
        ValueError,
        lambda: run(statistics=hg.Statistics(jnp.zeros(2), {"a": 0.9})),
        "statistics.decay must be one value or a pytree prefix of the statistics",
    ),
    "a mean out of range": (hg.RangeError, lambda: run(simple(lambda w: w + 1e9)), "statistics left the range", "at step 0"),
    "a pair without statistics": (
        TypeError,
        lambda: hg.train(simple(), jnp.zeros(2), hg.SGD(0.1), hg.full_batch(jnp.ones(2)), steps=3),
        "must return one scalar; got a tuple",
        "hg.train(..., statistics=...)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_where_it_is_and_what_to_do(name: str) -> None:
    error, make, *fragments = MISTAKES[name]
    with fails(error, *fragments):
        make()


def test_a_decay_outside_its_interval_under_jit() -> None:
    with fails_compiled(hg.RangeError, "statistics.decay for statistics", "got 1.5"):
        jax.block_until_ready(jax.jit(lambda r: run(statistics=hg.Statistics(jnp.zeros(2), r)).statistics)(1.5))


def test_the_name_is_taken() -> None:
    links = Link("statistics", lambda h, z, g: g), Link("params", lambda h, z: z.statistics)
    with pytest.raises(TypeError, match="`statistics` is what hg.train calls its running statistics"):
        type("Rule", (Optimizer,), {"__module__": __name__, "chain": links})


@pytest.mark.long
@pytest.mark.of_bits
@some_of(("optimizer", "wide"), list(itertools.product(["SGD", "Adam"], [False, True])), ("SGD", False))
def test_statistics_of_the_parameters_themselves_are_differentiated(optimizer: str, wide: bool) -> None:
    """What the derivative of the evidence adds must not change how the gradient is rounded beside it."""
    with jax.enable_x64(wide):

        def end(w: jax.Array, theta: jax.Array, adjoint: Any) -> jax.Array:
            def loss(w: jax.Array, theta: jax.Array, _: Any) -> Any:
                return jnp.mean(jnp.sin(3.3 * w) + 0.1 * w**2), theta * jnp.sin(w)

            run = hg.train(
                loss,
                w,
                getattr(hg, optimizer)(0.05),
                hg.full_batch(jnp.zeros(1)),
                theta=theta,
                steps=60,
                statistics=jnp.zeros(3),
                adjoint=adjoint,
            )
            return jnp.sum(run.statistics)

        at = jnp.array([0.1, 0.2, 0.7]), jnp.array(1.5)
        ours = jax.grad(end, argnums=(0, 1))(*at, hg.Reversible())
        oracle = jax.grad(lambda *at: end(*at, hg.Unrolled()), argnums=(0, 1))
        stored = jax.jit(oracle, compiler_options=_quick.OPTIONS)(*at)  # it need not have the bits of anything
    for x, y in zip(ours, stored, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9 if wide else 1e-4)
