"""Settings of JAX that the caller has, devices among them; and sentences that name the argument and the cure."""

import functools
import itertools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from tiny import BATCHES, PARAMS, fails, final, loss, train

import hypergrad as hg
from hypergrad import _programs as programs
from hypergrad.optimizers import Link


def eagerly(function: Any) -> Any:
    return function


RATE, HALF = np.float32(0.1), np.float32(0.5)
RULES = {"SGD": lambda r: hg.SGD(r, HALF), "Adam": hg.Adam, "clip": lambda r: hg.clip(hg.SGD(r, HALF), np.float32(0.5))}


@some_of(("rule", "compile"), list(itertools.product(RULES, [eagerly, jax.jit])), ("clip", eagerly), ("Adam", jax.jit))
def test_strict_promotions(rule: str, compile: Any) -> None:
    f = lambda r: final(optimizer=RULES[rule](r))  # noqa: E731
    expected = jax.value_and_grad(f)(RATE)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        ours = compile(jax.value_and_grad(f))(RATE)
        with pytest.raises(TypePromotionError):  # the caller's own functions run under what the caller asked for
            final(loss=lambda w, _, b: jnp.sum(w["w"] * jnp.ones(2, jnp.float16)))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@some_of("dtype", [np.float32, np.float64], np.float32)
def test_strict_promotions_of_default_decays_in_float64(dtype: Any) -> None:
    with jax.enable_x64(True):
        given = {"params": {"w": jnp.ones(2, dtype)}, "batches": hg.full_batch(jnp.zeros(2, dtype))}
        f = lambda r: final(optimizer=hg.AdamW(r), **given)  # noqa: E731
        expected = jax.grad(f)(dtype(0.1))
        with jax.numpy_dtype_promotion("strict"):
            assert jax.grad(f)(dtype(0.1)) == expected


def test_what_the_caller_does_not_compile() -> None:
    f = lambda r: final(optimizer=hg.SGD(r))  # noqa: E731
    with jax.disable_jit():
        ours = jax.value_and_grad(f)(RATE)
    np.testing.assert_allclose(ours, jax.value_and_grad(f)(RATE), rtol=1e-6)


TypePromotionError = getattr(jax.errors, "TypePromotionError", Exception)


def lane(w: Any, where: str) -> Any:
    def of_all(p: Any, theta: Any, batch: Any) -> Any:
        mean = jax.lax.pmean(p["w"], "lanes") if where == "loss" else 0.0
        return jnp.sum((p["w"] - batch - mean / 2) ** 2) / 2

    index = lambda t: jax.lax.axis_index("lanes") + jnp.zeros(2)  # noqa: E731
    return final(loss=of_all, params={"w": w}, batches=index if where == "batches" else BATCHES)


@some_of("where", ["loss", "batches"], "batches")
def test_an_axis_that_vmap_names(where: str) -> None:
    lanes = jnp.array([[1.0, -2.0], [0.5, 3.0]])
    compile = jax.jit if where == "batches" else lambda f: f
    ours = compile(jax.vmap(jax.value_and_grad(lambda w: lane(w, where)), axis_name="lanes"))(lanes)
    if where == "batches":
        singles = [lambda w, i=i: final(params={"w": w}, batches=hg.full_batch(jnp.full(2, float(i)))) for i in (0, 1)]
        values, slopes = zip(*(jax.value_and_grad(f)(w) for f, w in zip(singles, lanes, strict=True)), strict=True)
        np.testing.assert_allclose(ours[0], jnp.stack(values), rtol=1e-5)
        np.testing.assert_allclose(ours[1], jnp.stack(slopes), rtol=1e-5)
    else:
        assert np.isfinite(ours[0]).all() and np.isfinite(ours[1]).all()
        np.testing.assert_allclose(ours[0], jax.jit(jax.vmap(lambda w: lane(w, where), axis_name="lanes"))(lanes), rtol=1e-5)


MEAN_OF_LANES = {
    "loss": {"loss": lambda w, theta, b: loss(w, theta, b) + jnp.sum((w["w"] - jax.lax.pmean(w["w"], "lanes")) ** 2)},
    "metric": {"metric": lambda w, theta, b, state, hypers: jax.lax.pmean(jnp.sum(w["w"]), "lanes")},
}


@some_of("what", MEAN_OF_LANES)
def test_a_derivative_of_lanes_that_see_each_other(what: str) -> None:
    """JAX calls a custom rule without the axis there: an error that says what goes."""

    def one(rate: Any, adjoint: Any) -> Any:
        run = train(optimizer=hg.SGD(rate), adjoint=adjoint, **MEAN_OF_LANES[what])
        return jnp.sum(run.params["w"] ** 2) + (jnp.sum(run.metrics) if what == "metric" else 0)

    def all_lanes(f: Any, adjoint: Any) -> Any:
        return jax.vmap(lambda rate: f(rate, adjoint), axis_name="lanes")

    rates = jnp.array([0.1, 0.2])
    inside = [all_lanes(jax.grad(one), adjoint)(rates) for adjoint in (hg.Reversible(), hg.Checkpointed())]
    np.testing.assert_allclose(*inside, rtol=1e-5)
    outside = lambda adjoint: jax.grad(lambda r: jnp.sum(all_lanes(one, adjoint)(r)))(rates)  # noqa: E731
    np.testing.assert_allclose(outside(hg.Checkpointed()), inside[0], rtol=1e-5)
    with fails(TypeError, "whose axis 'lanes' is read inside of hg.train", "jax.vmap(jax.grad(f)", "hg.Checkpointed()"):
        outside(hg.Reversible())


@jax.custom_vjp
def shared_back(w: Any) -> Any:
    return w


shared_back.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.pmean(g, "lanes"),))


@jax.custom_jvp
def shared_along(x: Any) -> Any:
    return x


shared_along.defjvp(lambda x, dx: (x[0], (dx[0] + jax.lax.pmean(dx[0], "lanes")) / 2))


class Sharing(hg.SGD):
    chain = (Link("velocity", lambda h, z, g: -shared_along(g), decay="momentum"), hg.SGD.chain[1])
    linear = False


@some_of("where", ["loss", "increment", "metric"], "metric")
def test_an_axis_that_a_derivative_rule_alone_reads(where: str) -> None:
    of_all = {
        "loss": {"loss": lambda w, theta, b: loss({"w": shared_back(w["w"])}, theta, b)},
        "metric": {"metric": lambda w, theta, b, state, hypers: shared_along(jnp.sum(w["w"]))},
    }.get(where, {})

    def one(rate: Any, adjoint: Any) -> Any:
        rule = Sharing(rate, HALF) if where == "increment" else hg.SGD(rate, HALF)
        run = train(optimizer=rule, adjoint=adjoint, **of_all)
        return jnp.sum(run.params["w"] ** 2) + (jnp.sum(run.metrics) if where == "metric" else 0)

    rates = jnp.array([0.1, 0.4])
    for f in (one, jax.grad(one)):
        ours, expected = (
            jax.vmap(lambda r, a=a, f=f: f(r, a), axis_name="lanes")(rates) for a in (hg.Reversible(), hg.Unrolled())
        )
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_draws_of_a_rule_do_not_go_with_the_default_generator() -> None:
    f = lambda: final(optimizer=hg.Sophia(0.1))  # noqa: E731
    with jax.default_prng_impl("rbg"):
        first = f()
    assert first == f()


def test_a_program_goes_with_the_precision_of_products() -> None:
    """Of the library's own products, which are no part of the loss's program."""
    made = []
    for precision in ("highest", "bfloat16", "highest"):
        with jax.default_matmul_precision(precision):
            programs.kept(("precision", "of products"), lambda p=precision: made.append(p))
    assert made == ["highest", "bfloat16"]


def test_a_budget_cannot_be_asked_for_one_of_several_lanes() -> None:
    f = lambda rate: final(optimizer=hg.SGD(rate), adjoint=hg.Auto("1GiB"), **MEAN_OF_LANES["loss"])  # noqa: E731
    with fails(TypeError, "hg.Auto asks XLA", "the axis 'lanes' of a jax.vmap", "hg.Reversible(memory_budget=...)"):
        jax.vmap(jax.grad(f), axis_name="lanes")(jnp.array([0.1, 0.2]))


def test_each_device_of_a_shard_map_trains_for_itself() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    slope = jax.grad(lambda rate: final(optimizer=hg.SGD(rate)))
    rates, spec = jnp.array([0.1]), jax.sharding.PartitionSpec("d")
    on_each = functools.partial(jax.shard_map, lambda r: slope(r[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(on_each(check_vma=False))(rates)[0], slope(rates[0]), rtol=1e-5)
    with fails(TypeError, "hg.train inside of jax.shard_map", "along 'd'", "check_vma=False"):
        jax.jit(on_each())(rates)


ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, hypergrad as hg
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
whole = jax.random.normal(jax.random.key(0), (4, 8, 3))
x = jax.device_put(whole, NamedSharding(mesh, P(None, "d")))
w = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
loss = lambda w, _, b: jnp.mean(jnp.tanh(b @ w) ** 2) + jnp.sum(w**2)
run = lambda rate, x, w: hg.train(loss, w, hg.SGD(rate, 0.75), hg.stacked(x)).params.sum()
slope = jax.grad(run)
expected = slope(0.1, whole, jnp.ones(3))
for f in (slope, jax.jit(slope)):
    assert abs(f(0.1, x, w) - expected) < 1e-4, "sharded"
    with jax.default_device(jax.devices()[1]):
        assert abs(f(0.1, jnp.asarray(whole), jnp.ones(3)) - expected) < 1e-4, "another device"
for data in ((x, w), (whole, jnp.ones(3))):
    for f in (run, jax.jit(run), jax.jit(slope), jax.jit(jax.checkpoint(run))):
        try:
            jax.block_until_ready(f(1e6, *data))
            jax.effects_barrier()
        except Exception as e:
            assert "RangeError" in type(e).__name__ + str(e), repr(e)
        else:
            raise AssertionError("a failing run must raise")
        assert abs(jax.jit(slope)(0.1, *data) - expected) < 1e-4, "the next run"
print("two devices: as one")
"""


@pytest.mark.long
def test_two_devices() -> None:
    """A run that fails raises on each; were it to raise on one alone, XLA would end the process."""
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", ON_TWO_DEVICES], env=environment, capture_output=True, text=True)
    assert "two devices: as one" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: hg.positive(1e-40), ("hg.positive", "cannot be told from an end", "float64")),
        (lambda: hg.bounded(1 - 1e-9, 0, 1), ("hg.bounded", "cannot be told from an end of (0, 1)", "float64")),
        (lambda: hg.positive(np.array([1.0, 1e-42])), ("hg.positive", "1e-42")),
        (lambda: hg.host_batches(lambda t: next(iter([]))), ("hg.host_batches has no batch for step 0", "run out")),
        (lambda: hg.host_batches(lambda t: [np.ones(2)][t + 1]), ("hg.host_batches has no batch for step 0",)),
    ],
)
def test_what_cannot_be_is_said_where_it_is_made(make: Any, texts: Any) -> None:
    with fails(ValueError, *texts):
        make()


def test_a_source_that_runs_out_on_the_way() -> None:
    rows = iter([np.ones(2, np.float32)] * 2)
    with fails(ValueError, "`batches` ended early", "no batch for step", "fewer `steps`"):
        final(batches=hg.host_batches(lambda t: next(rows)), steps=4)


@pytest.mark.long
def test_an_ode_in_the_loss() -> None:
    from jax.experimental.ode import odeint

    def decays(p: Any, theta: Any, batch: Any) -> Any:
        return jnp.sum(odeint(lambda y, t, w: -w * y, jnp.ones(2), jnp.array([0.0, 1.0]), p["w"])[-1] ** 2)

    roads = [jax.grad(lambda r, a=a: final(loss=decays, optimizer=hg.SGD(r, 0.5), adjoint=a, steps=2)) for a in ROADS]
    ours, stored = (road(0.1) for road in roads)
    np.testing.assert_allclose(ours, stored, rtol=1e-3)


ROADS = (hg.Reversible(), hg.Unrolled())


@pytest.mark.long
def test_training_is_a_part_like_any_other() -> None:
    """Recomputed, scanned over, under static arguments, with inputs given away: one number."""
    f = lambda rate: final(optimizer=hg.SGD(rate, 0.5))  # noqa: E731
    expected = jax.grad(f)(0.1)
    scanned = lambda rate: jax.lax.scan(lambda c, _: (c + f(rate), None), 0.0, None, length=3)[0] / 3  # noqa: E731
    static = jax.jit(
        lambda rate, steps: jax.grad(lambda r: final(optimizer=hg.SGD(r, 0.5), steps=steps))(rate), static_argnums=1
    )
    for found in (jax.grad(jax.checkpoint(f))(0.1), jax.grad(scanned)(0.1), static(0.1, 3)):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    given = jax.jit(lambda w: train(params={"w": w}).params["w"], donate_argnums=0)
    np.testing.assert_allclose(given(PARAMS["w"] + 0), train().params["w"], rtol=1e-6)


@jax.custom_vjp
def solved(w: Any) -> Any:
    return jnp.sum(w**2)


def _by_training(w: Any, ct: Any) -> tuple[Any]:
    start = {"w": jnp.zeros(2)}
    inner = hg.train(lambda p, t, b: loss(p, None, t), start, hg.SGD(0.2, 0.5), BATCHES, theta=w, steps=2, adjoint=ROADS[1])
    return (ct * inner.params["w"],)


solved.defvjp(lambda w: (solved(w), w), _by_training)


@pytest.mark.long
def test_a_derivative_rule_may_train() -> None:
    f = lambda r, a: final(loss=lambda p, t, b: loss(p, t, b) + solved(p["w"]), optimizer=hg.SGD(r, 0.5), adjoint=a)  # noqa: E731
    np.testing.assert_allclose(*(jax.grad(f)(0.1, a) for a in ROADS), rtol=1e-4)
