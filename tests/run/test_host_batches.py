"""Batches that Python loads: every kind of source, and every way in which one can be wrong."""

import functools
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long
from hosts import HOST, NOT_TRACED, ROWS, assert_equal, final_of
from tiny import PARAMS, SGD, fails, loss, train

import hypergrad as hg


@functools.cache
def expected():
    """Value and gradient over `ROWS`, from an array on the device."""
    return jax.value_and_grad(final_of(hg.stacked(ROWS)))(PARAMS)


SOURCES = {
    "list": lambda folder: list(ROWS),
    "function": lambda folder: lambda t: ROWS[t],
    "array": lambda folder: ROWS,
    "file": lambda folder: saved(folder / "rows"),
    "one memory for all": lambda folder: refilled(np.empty(2, np.float32)),
    "float64": lambda folder: ROWS.astype(np.float64),
}


def saved(path):
    np.memmap(path, np.float32, "w+", shape=ROWS.shape)[:] = ROWS
    return np.memmap(path, np.float32, "r", shape=ROWS.shape)


def refilled(room):
    def load(t):
        room[:] = ROWS[t]
        return room

    return load


@pytest.mark.parametrize("kind", SOURCES)
def test_batches_from_python_train_as_an_array_does(kind, tmp_path):
    batches = hg.host_batches(SOURCES[kind](tmp_path))
    assert_equal(jax.value_and_grad(final_of(batches, adjoint=hg.Reversible()))(PARAMS), expected())


@pytest.mark.long
def test_batches_from_python_may_be_trees_and_know_their_number():
    batches = hg.host_batches([{"x": row, "n": np.int32(i)} for i, row in enumerate(ROWS)])
    tree_loss = lambda params, theta, batch: loss(params, theta, batch["x"] + 0 * batch["n"])  # noqa: E731
    trained = hg.train(tree_loss, PARAMS, SGD, batches)
    assert_equal(trained.losses, train(batches=hg.stacked(ROWS), steps=6, adjoint=HOST).losses)
    certificate = hg.check_reversal(tree_loss, PARAMS, SGD, batches, steps=4)
    assert certificate.exact


@pytest.mark.long
def test_gmpy2_takes_batches_from_python_too():
    exact = hg.Reversible(buffer="gmpy2")
    got = jax.value_and_grad(final_of(hg.host_batches(list(ROWS)), exact, steps=3))(PARAMS)
    assert_equal(got, jax.value_and_grad(final_of(hg.stacked(ROWS[:3]), exact, steps=3))(PARAMS))


def ending(t):
    return iter(ROWS[t:4]).__next__()


@pytest.mark.parametrize(
    ("source", "error", "fragments"),
    [
        (list(ROWS[:4]), ValueError, ("`batches` ends early", "4 batches for steps=6")),
        (lambda t: ROWS[:4][t], ValueError, ("`batches` ended early", "step 4 of 6")),
        (ending, ValueError, ("`batches` ended early", "step 4 of 6")),
        ([*ROWS[:5], np.ones(3, np.float32)], ValueError, ("changes its shapes", "at step 5", "float32[3]", "float32[2]")),
        (lambda t: ROWS[t] if t < 3 else (ROWS[t], 1), ValueError, ("changes its structure", "at step 3")),
        ([np.ones(2, np.int32), *ROWS[1:]], ValueError, ("changes its shapes", "at step 1", "float32[2]", "int32[2]")),
    ],
    ids=["short list", "index error", "stop iteration", "shape", "structure", "dtype"],
)
def test_a_source_that_ends_or_changes(source, error, fragments):
    with fails(error, *fragments):
        final_of(hg.host_batches(source))(PARAMS)


def test_a_source_that_is_not_repeatable():
    rng = np.random.default_rng(0)
    with fails(hg.ReversalError, "another batch for step 5", "np.random.default_rng((seed, t))"):
        jax.grad(final_of(hg.host_batches(lambda t: rng.normal(size=2))))(PARAMS)


def test_the_checksum_sees_one_bit():
    rows = ROWS.copy()
    batches = hg.host_batches(rows)
    value, pull = jax.vjp(final_of(batches), PARAMS)
    rows[2, 1] = np.nextafter(rows[2, 1], 1, dtype=np.float32)
    with fails(hg.ReversalError, "another batch for step 2"):
        pull(jnp.ones_like(value))


@pytest.mark.parametrize(
    ("source", "error", "fragment"),
    [
        ((ROWS, ROWS), TypeError, "lambda t: (x[t], y[t])"),
        ({"x": ROWS}, TypeError, "lambda t: (x[t], y[t])"),
        (iter(ROWS), TypeError, "gives a batch once"),
        ([], ValueError, "no batches"),
        (lambda t: "a path", TypeError, "holds a str"),
        (lambda t: jax.random.key(t), TypeError, "jax.random.key_data"),
    ],
)
def test_what_is_no_source(source, error, fragment):
    with fails(error, "hg.host_batches", fragment):
        hg.host_batches(source)


def test_a_source_without_steps():
    with fails(ValueError, "`steps` is missing"):
        train(batches=hg.host_batches(lambda t: ROWS[t]), steps=None)


@pytest.mark.parametrize("adjoint", [hg.Unrolled(), hg.Checkpointed(), hg.Reversible(driver="scan")])
def test_batches_from_python_need_the_host(adjoint):
    with fails(ValueError, "hg.host_batches", "hg.Reversible()", "hg.stacked"):
        train(batches=hg.host_batches(list(ROWS)), adjoint=adjoint)


def test_batches_from_python_are_not_traced():
    with fails(ValueError, *NOT_TRACED):
        jax.jit(final_of(hg.host_batches(list(ROWS)), hg.Reversible()))(PARAMS)


def drawing():
    rng = np.random.default_rng(0)
    return lambda t: jnp.asarray(rng.normal(size=2))


def consuming():
    rows = iter(ROWS)
    return lambda t: jnp.asarray(next(rows))


def counting():
    calls = itertools.count()
    return lambda t: jnp.ones(2) * next(calls)


def acting(t):
    return jax.experimental.io_callback(lambda t: ROWS[t], jax.ShapeDtypeStruct((2,), jnp.float32), t)


SIDE_EFFECTS = {"draws": drawing(), "consumes": consuming(), "counts": counting(), "acts": acting}


@pytest.mark.parametrize("batches", SIDE_EFFECTS.values(), ids=SIDE_EFFECTS)
def test_a_batch_function_with_side_effects(batches):
    with fails(ValueError, "`batches`", "has side effects", "pure function of t", "hg.host_batches"):
        train(batches=batches)


def test_a_batch_function_may_be_made_of_fresh_functions():
    batches = lambda t: jax.pure_callback(lambda t: ROWS[t], jax.ShapeDtypeStruct((2,), jnp.float32), t)  # noqa: E731
    assert_equal(train(batches=batches).losses, train(batches=hg.stacked(ROWS[:3])).losses)


def scaled(rows, numbers, calls):
    def batches(t):
        calls.append(t)
        return rows[t] * next(numbers)

    return batches


def test_code_that_made_the_same_program_of_the_same_arrays_is_called_once():
    rows, calls = jnp.asarray(ROWS), []
    for array, count in ((rows, 2), (rows, 3), (rows + 1, 5)):
        train(batches=scaled(array, itertools.repeat(1.0), calls))
        assert len(calls) == count


@pytest.mark.long
@pytest.mark.parametrize("kind", [long(lambda f: f), jax.tree_util.Partial])
def test_what_is_remembered_of_a_source_holds_none_of_its_data(kind):
    rows = jnp.asarray(ROWS)
    alive = weakref.ref(rows)
    source = kind(scaled(rows, itertools.repeat(1.0), []))
    train(batches=source)
    del rows, source
    gc.collect()
    assert alive() is None


def test_side_effects_of_code_that_had_none_before():
    rows = jnp.asarray(ROWS)
    train(batches=scaled(rows, itertools.repeat(3.0), []))
    with fails(ValueError, "`batches`", "has side effects"):
        train(batches=scaled(rows, itertools.count(4.0), []))


@pytest.mark.parametrize("computed", [lambda x: jnp.asarray(x) * 2, lambda x: np.asarray(jnp.asarray(x) * 2)])
def test_a_loader_that_uses_jax_is_told_so_too(computed):
    def loaded(params):
        return final_of(hg.host_batches(lambda t: computed(ROWS[t])), hg.Reversible())(params)

    expected = final_of(hg.stacked(2 * ROWS))(PARAMS)
    np.testing.assert_allclose(loaded(PARAMS), expected, rtol=1e-6)
    with fails(ValueError, *NOT_TRACED):
        jax.jit(loaded)(PARAMS)


def test_a_loader_that_reads_what_is_traced():
    def loaded(scale):
        return final_of(hg.host_batches(lambda t: scale * ROWS[t]), hg.Reversible())(PARAMS)

    for traced in (jax.jit(loaded), jax.grad(loaded)):
        with fails(ValueError, "a batch of hg.host_batches is traced", "jit=False", "`theta`"):
            traced(2.0)


def test_later_floats_that_do_not_fit_the_first():
    rows = [np.ones(2, np.float16), np.full(2, 1e6, np.float32)]
    with fails(ValueError, "batch of step 1 of hg.host_batches: 1e+06 is beyond float16", "the wider one"):
        train(batches=hg.host_batches(rows), steps=2)
    train(batches=hg.host_batches([rows[0], np.full(2, 3, np.float32)]), steps=2)
