"""The host driver: the same step as the scan, compiled once per program."""

import functools
import gc
import io
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from hosts import NOT_TRACED, assert_equal, final_of
from problems import network
from tiny import BATCHES, PARAMS, SGD, fails, final, loss, train

import hypergrad as hg
from hypergrad import _programs as programs
from hypergrad._problem import Problem
from hypergrad._set_up import set_up
from hypergrad.adjoints import passes


def key_of(function, *args):
    return programs.key_of(jax.make_jaxpr(function)(*args).jaxpr)


def scaled(factor, shift=0.0, power=2):
    """A function that no other call returns."""
    data = jnp.arange(3.0) + shift
    return lambda x: jax.lax.scan(lambda c, u: (c * u + factor, jax.nn.relu(c)), x**power, data)


def test_programs_are_told_apart_by_what_they_compute():
    x = jnp.float32(2)
    assert key_of(scaled(2.0), x) == key_of(scaled(2.0), x)
    assert key_of(scaled(2.0), x) == key_of(scaled(2.0, shift=1.0), x), "arrays are arguments"
    others = [scaled(2.5), scaled(-2.0), scaled(2.0, power=3), scaled(0.0), scaled(-0.0), lambda x: (x, x), lambda x: x]
    keys = [key_of(f, x) for f in (scaled(2.0), *others)] + [key_of(lambda x: x, jnp.int32(2))]
    for a, b in itertools.combinations(keys, 2):
        assert a != b
    ask = lambda host: lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)  # noqa: E731
    same = lambda x: x  # noqa: E731
    assert key_of(ask(same), x) == key_of(ask(same), x) != key_of(ask(lambda x: x), x)


def test_a_program_is_called_with_the_arrays_of_its_own_function():
    values = [programs.call(jax.jit(scaled(2.0, shift)), (), jnp.float32(2)) for shift in (0.0, 1.0)]
    assert_equal(values, [jax.jit(scaled(2.0, shift))(jnp.float32(2)) for shift in (0.0, 1.0)])
    assert values[0][0] != values[1][0]


@pytest.fixture
def made(monkeypatch):
    """The keys of all programs made inside, whatever else this process keeps."""
    monkeypatch.setattr(programs, "mapped", lambda: 0.0)
    keys = []
    kept = programs.kept
    monkeypatch.setattr(programs, "kept", lambda key, make: kept(key, lambda: keys.append(key) or make()))
    return keys


@some_of("driver", ["scan", "host"], "host")
def test_a_fresh_loss_with_the_old_program_does_not_compile(driver, made):
    def gradient(factor):
        fresh = lambda params, theta, batch: factor * loss(params, theta, batch)  # noqa: E731
        return jax.grad(lambda p: final(loss=fresh, params=p, adjoint=hg.Reversible(driver=driver)))(PARAMS)["w"]

    first = gradient(1.5)
    made.clear()
    assert_equal(gradient(1.5), first)
    assert not made
    assert (gradient(1.25) != first).all() and len(made) == {"scan": 2, "host": 3}[driver]  # the gradient is one by itself


@pytest.mark.long
def test_a_fresh_train_fn_with_the_old_program_does_not_compile(made):
    def learned(factor):
        train_fn = lambda h, key: train(lambda p, _, b: factor * loss(p, _, b), optimizer=hg.SGD(h, 0.9)).params["w"]  # noqa: E731
        return hg.optimize(train_fn, jnp.sum, hg.positive(0.1), meta_steps=2).history[-1].value

    first = learned(1.5)
    made.clear()
    assert learned(1.5) == first and not made
    assert learned(1.25) != first and made


@some_of("driver", ["scan", "host"], "host")
def test_what_is_wanted_of_theta_tells_programs_apart(driver):
    """Both leaves have the same shape: the loop that differentiates the first once served the second."""
    linked = lambda params, theta, _: jnp.sum((params["w"] - theta["a"]) ** 2 + jnp.sin(params["w"]) * theta["b"])  # noqa: E731
    run = lambda a, b: final(loss=linked, theta={"a": a, "b": b}, adjoint=hg.Reversible(driver=driver))  # noqa: E731
    ones = jnp.ones(2), jnp.ones(2)
    assert_equal([jax.grad(run, 0)(*ones), jax.grad(run, 1)(*ones)], list(jax.grad(run, (0, 1))(*ones)))


def test_too_few_words_on_the_host():
    adjoint = hg.Reversible(driver="host", capacity=1)
    with fails(hg.BufferFullError, "hg.Reversible(capacity="):
        jax.grad(lambda p: final(params=p, optimizer=hg.SGD(0.1, 0.01), steps=20, adjoint=adjoint))(PARAMS)


def test_what_the_user_holds_survives_the_loop():
    value, pull = jax.vjp(final_of(BATCHES, steps=3), PARAMS)
    assert_equal(pull(jnp.ones_like(value)), pull(jnp.ones_like(value)))
    assert np.isfinite(PARAMS["w"]).all()


def driver_of(net, adjoint, cores, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    problem, inputs, _ = set_up(Problem(net.loss, net.params(), SGD, net.batches(3), net.theta(), 3), adjoint)
    eager = passes.settled_driver(problem, inputs).driver
    traced = []
    jax.eval_shape(lambda inputs: traced.append(passes.settled_driver(problem, inputs).driver), inputs)
    jax.eval_shape(lambda: traced.append(passes.settled_driver(problem, inputs).driver))
    return {eager}, set(traced)


def test_the_driver_is_chosen_by_rule(monkeypatch):
    choose = functools.partial(driver_of, monkeypatch=monkeypatch)
    assert choose(network("convolution"), hg.Reversible(), 2) == ({"host"}, {"scan"})
    assert choose(network("convolution"), hg.Reversible(), 1) == ({"scan"}, {"scan"})
    assert choose(network("convolution"), hg.Reversible(driver="scan"), 2) == ({"scan"}, {"scan"})
    assert choose(network("convolution"), hg.Unrolled(), 2) == ({"scan"}, {"scan"})
    assert choose(network("tanh"), hg.Reversible(), 2) == ({"scan"}, {"scan"})


@pytest.mark.parametrize("transform", [jax.jit, lambda f: lambda p: jax.vmap(f)(jax.tree.map(lambda x: x[None], p))])
@pytest.mark.parametrize("known", [False, True], ids=["traced", "constants"])
def test_the_host_driver_is_not_traced(transform, known):
    with fails(ValueError, *NOT_TRACED, 'driver="scan"'):
        run = final_of(BATCHES, steps=3)
        transform(run)(PARAMS) if not known else jax.jit(lambda: run(PARAMS))()


@pytest.mark.long
def test_words_on_disk_are_not_traced_whatever_the_loss(monkeypatch):
    """With a convolution the driver is open until it is known whether somebody traces."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    net = network("convolution")

    def slope(buffer):
        options = {"theta": net.theta(), "steps": 3, "adjoint": hg.Reversible(buffer=buffer)}
        end = lambda p: net.value(hg.train(net.loss, p, SGD, net.batches(3), **options).params)  # noqa: E731
        return jax.jit(jax.grad(end))(net.params())

    with fails(ValueError, *NOT_TRACED):
        slope(hg.Disk("nowhere"))
    assert_equal(slope("host"), slope("device"))


@pytest.mark.long
def test_arrays_of_a_loss_are_let_go():
    data = jnp.ones(2)
    alive = weakref.ref(data)
    jax.grad(lambda p, data=data: final(loss=lambda p, _, b: loss(p, _, b + data), params=p))(PARAMS)
    del data
    jax.clear_caches()
    gc.collect()
    assert alive() is None


@pytest.mark.long
def test_what_was_traced_is_let_go():
    class Row:
        data = np.zeros(2, np.float32)

    row = Row()
    alive = weakref.ref(row)
    jax.grad(final_of(hg.host_batches(lambda t, row=row: row.data)))(PARAMS)
    del row
    gc.collect()
    assert alive() is None


def test_progress_is_told_of_both_ways():
    told, file = [], io.StringIO()
    steps = hg.callbacks.Steps(file)

    def progress(*report):
        told.append(report)
        steps(*report)

    jax.grad(final_of(BATCHES, hg.Reversible(driver="host", progress=progress), steps=3))(PARAMS)
    for way in ("forward", "reverse"):
        assert [r for r in told if r[0] == way][:: len(told)] == [(way, 0, 3)]
        assert [r for r in told if r[0] == way][-1] == (way, 3, 3)
        assert f"{way} 3/3 steps" in file.getvalue()


@pytest.mark.parametrize("options", [{}, {"driver": "scan"}, {"driver": "host", "progress": 1}])
def test_progress_is_of_the_host_driver(options):
    with fails(ValueError, "`progress`", 'driver="host"'):
        hg.Reversible(**{"progress": print, **options})
