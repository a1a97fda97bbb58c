"""Words in host memory: those of the device, back again, noticed where one is lost, and asked for where they are too few."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value, some_of
from hosts import assert_equal
from tiny import BATCHES, PARAMS, fails, final, loss

import hypergrad as hg
from hypergrad._problem import Problem
from hypergrad._set_up import set_up
from hypergrad.adjoints import passes
from hypergrad.adjoints.capacity import capacities
from hypergrad.run import cuts, stores


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


@some_of(
    ("stored", "kind", "driver"),
    list(itertools.product(LENGTHS, SPILLING, ["scan", "host"])),
    *((None, "sgd", "scan"), (4, "adam", "host")),
    indirect=["stored"],
)
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


@some_of("buffer", ["host", "device"])
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
