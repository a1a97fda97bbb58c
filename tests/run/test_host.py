"""The host driver: the same step as the scan, compiled once per program; and words on the host."""

import functools
import gc
import io
import itertools
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value, some_of
from hosts import NOT_TRACED, assert_equal, final_of
from problems import network
from tiny import BATCHES, PARAMS, SGD, fails, final, loss, train

import hypergrad as hg
from hypergrad import _programs as programs
from hypergrad._problem import Problem
from hypergrad._set_up import set_up
from hypergrad.adjoints import passes
from hypergrad.adjoints.capacity import capacities
from hypergrad.run import cuts, stores


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


@pytest.mark.parametrize("driver", ["scan", "host"])
def test_a_fresh_loss_with_the_old_program_does_not_compile(driver, made):
    def gradient(factor):
        fresh = lambda params, theta, batch: factor * loss(params, theta, batch)  # noqa: E731
        return jax.grad(lambda p: final(loss=fresh, params=p, adjoint=hg.Reversible(driver=driver)))(PARAMS)["w"]

    first = gradient(1.5)
    made.clear()
    assert_equal(gradient(1.5), first)
    assert not made
    assert (gradient(1.25) != first).all() and len(made) == {"scan": 2, "host": 3}[driver]  # the gradient is one by itself


def test_a_fresh_train_fn_with_the_old_program_does_not_compile(made):
    def learned(factor):
        train_fn = lambda h, key: train(lambda p, _, b: factor * loss(p, _, b), optimizer=hg.SGD(h, 0.9)).params["w"]  # noqa: E731
        return hg.optimize(train_fn, jnp.sum, hg.positive(0.1), meta_steps=2).history[-1].value

    first = learned(1.5)
    made.clear()
    assert learned(1.5) == first and not made
    assert learned(1.25) != first and made


@pytest.mark.parametrize("driver", ["scan", "host"])
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


def ends(adjoint, optimizer, steps):
    """The state that the reverse pass starts from: (run, end)."""
    problem, inputs, _ = set_up(Problem(loss, PARAMS, optimizer, BATCHES, steps=steps), adjoint)
    with jax.enable_x64(True):
        words = capacities(problem, inputs.h, None)
    return passes.run_forward(problem, words, inputs)


# Words leave at every step at 2^-16, and the decays of Adam differ.
SPILLING = {
    "sgd": (hg.SGD(0.1, 2**-16), 9),
    "adam": (hg.Adam(0.01, 0.01, 0.3), 30),
    "each step": (hg.AdamW(1.0, 0.5, 0.5, 1.0, 1 - 2**-16), 7),
}


LENGTHS = [None, 4, 1]  # of segments, in steps; None: one segment


@pytest.fixture
def stored(request, monkeypatch):
    monkeypatch.setattr(cuts, "STORED", request.param or cuts.STORED)


@every_value("stored, kind, driver", LENGTHS, SPILLING, ["scan", "host"], indirect=["stored"])
def test_words_on_the_host_are_those_of_the_device(stored, kind, driver):
    optimizer, steps = SPILLING[kind]
    host, device = (ends(hg.Reversible(driver=driver, buffer=b), optimizer, steps) for b in ("host", "device"))
    assert_equal(host[0], device[0])
    (slots,) = device[1].last
    chain = [name for name in ("velocity", "mean", "square", "params") if name in slots]
    stacks = [slots[name].digits.stack for name in chain if slots[name].digits is not None]
    segments = host[1].words.segments.values()
    for i, stack in enumerate(stacks):
        words = np.concatenate([own[i][0] for own in segments])
        assert_equal(words, stack[: len(words)])
        assert not stack[len(words) :].any(), "all that there are"
    assert sum(len(own[i][0]) for own in segments for i in range(len(stacks))) >= 2
    assert not [x for x in jax.tree.leaves(host[1].last) if x.dtype == jnp.uint16]


def spilling(kind, **options):
    optimizer, steps = SPILLING[kind]
    return lambda params: final(params=params, optimizer=optimizer, steps=steps, adjoint=hg.Reversible(**options))


@some_of(
    ("stored", "kind", "driver"),
    list(itertools.product(LENGTHS, SPILLING, ["scan", "host"])),
    (4, "adam", "host"),
    (None, "sgd", "scan"),
    indirect=["stored"],
)
def test_words_on_the_host_come_back(stored, kind, driver):
    run = lambda buffer: spilling(kind, driver=driver, buffer=buffer)  # noqa: E731

    assert_equal(jax.value_and_grad(run("host"))(PARAMS), jax.value_and_grad(run("device"))(PARAMS))
    value, pull = jax.vjp(run("host"), PARAMS)
    assert_equal(pull(jnp.ones_like(value)), pull(jnp.ones_like(value)))


@pytest.mark.long
@every_value("stored, kind, transform", LENGTHS, SPILLING, [jax.jit, jax.vmap], indirect=["stored"])
def test_words_on_the_host_come_back_inside_of_a_program(stored, kind, transform):
    found, expected = (transform(jax.value_and_grad(spilling(kind, buffer=b, capacity=8))) for b in ("host", "device"))
    at = jax.tree.map(lambda x: jnp.stack([x, -x]), PARAMS) if transform is jax.vmap else PARAMS
    assert_equal(found(at), expected(at))
    assert "<host>" in str(jax.make_jaxpr(found)(at))


@pytest.mark.parametrize(
    "dtype, lie, what",
    [("uint16", lambda x: x ^ 1, "velocity['w']"), ("float32", lambda x: x + 0.01, "loss")],
    ids=["word", "loss"],
)
def test_what_was_changed_inside_of_a_program_is_noticed(monkeypatch, dtype, lie, what):
    undo = passes.undo_stacked
    changed = lambda kept: jax.tree.map(lambda x: lie(x) if x.dtype == dtype else x, kept)  # noqa: E731
    monkeypatch.setattr(passes, "undo_stacked", lambda way, kept, carry: undo(way, changed(kept), carry))
    with fails(jax.errors.JaxRuntimeError, what):
        jax.block_until_ready(jax.jit(jax.grad(spilling("sgd", buffer="host")))(PARAMS))


@some_of("buffer", ["host", "device"], "host")
def test_words_that_an_error_asks_for_are_enough_where_few_steps_lose_most(buffer, monkeypatch):
    monkeypatch.setattr(cuts, "STORED", 8)
    momenta = jnp.append(jnp.full(8, 2.0**-6), jnp.full(24, 0.9))

    def derivative(**capacity):
        adjoint = hg.Reversible(buffer=buffer, **capacity)
        rule = lambda scale: hg.SGD(0.1, hg.PerStep(scale * momenta))  # noqa: E731
        return jax.jit(jax.grad(lambda scale: final(optimizer=rule(scale), steps=32, adjoint=adjoint)))(1.0)

    with fails(jax.errors.JaxRuntimeError, "hg.Reversible(capacity=") as caught:
        derivative()
    asked = int(re.findall(r"capacity=(\d+)", str(caught.value))[-1])
    assert_equal(derivative(capacity=asked), derivative(capacity=64))


def test_a_word_that_was_lost_on_the_host_is_noticed(monkeypatch):
    trimmed = stores.trimmed
    monkeypatch.setattr(stores, "trimmed", lambda stack, n: trimmed(stack, n) ^ 1)
    with fails(hg.ReversalError, "velocity['w']"):
        jax.grad(spilling("sgd", buffer="host"))(PARAMS)


@pytest.mark.parametrize("options", [{"buffer": "gmpy2", "driver": "scan"}, {"buffer": "gmpy2", "capacity": 3}])
def test_words_off_the_device_need_no_capacity(options):
    with fails(ValueError, f'buffer="{options["buffer"]}"', list(options)[1]):
        hg.Reversible(**options)
