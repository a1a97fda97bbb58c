"""Losses and batches that cannot be: what is wrong with the function, what it was given, and the cure."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import PARAMS, fails, final, train

import hypergrad as hg


HALF_A_MODEL = eqx.filter(eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0)), eqx.is_inexact_array)


def test_loss_of_two_arguments():
    with fails(TypeError, "loss(params, theta, batch)", "(params, batch)", "Without theta write loss(params, _, batch)"):
        train(loss=lambda params, batch: 0.0)


@pytest.mark.parametrize(
    ("params", "use", "hints"),
    [
        (PARAMS, lambda p, theta, b: p["W"], ["params = {'w': f32[2]}", "theta = None", "batch = f32[2]"]),
        (PARAMS, lambda p, theta, b: theta["l2"], ["theta is what hg.train(..., theta=...) was given"]),
        (PARAMS, lambda p, batch, theta: batch["x"], ["stands between params and batch"]),
        (HALF_A_MODEL, lambda p, theta, b: p(b), ["equinox.combine(params, static)"]),
    ],
    ids=["a misspelt name", "theta forgotten", "arguments in another order", "half a model"],
)
def test_an_error_inside_the_loss_says_what_it_was_given(params, use, hints):
    with pytest.raises(Exception) as caught:  # noqa: B017 (whichever Python raises)
        train(loss=use, params=params)
    note = "\n".join(caught.value.__notes__)
    assert all(hint in note for hint in ["`loss(params, theta, batch)` was called by hypergrad", *hints]), note


def test_an_error_inside_the_loss_gives_no_advice_that_is_beside_the_point():
    with pytest.raises(KeyError) as caught:
        train(loss=lambda p, theta, b: p["W"])
    assert "equinox" not in caught.value.__notes__[0] and "stands between" not in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (lambda w: w**2, ValueError, "must return a scalar; got shape (2,)"),
        (lambda w: jnp.argmax(w), TypeError, "must return a real float; got int32"),
        (lambda w: w.sum() > 0, TypeError, "must return a real float; got bool"),
        (lambda w: w.sum() * 1j, TypeError, "must return a real float; got complex64"),
        (lambda w: (w.sum(), w), TypeError, "must return one scalar; got a tuple"),
        (lambda w: None, TypeError, "must return one scalar; got a NoneType"),
    ],
)
def test_loss_that_is_no_float_scalar(value, error, text):
    with fails(error, "`loss`", text):
        train(loss=lambda params, theta, batch: value(params["w"]))


def test_loss_that_is_no_function():
    with fails(TypeError, "`loss` must be a function loss(params, theta, batch)", "float"):
        train(loss=0.5)


@pytest.mark.parametrize("batches", [(jnp.ones(2), jnp.ones(2)), jnp.ones(2), [1.0], {"x": jnp.ones(2)}])
def test_bare_arrays_as_batches(batches):
    with fails(TypeError, "`batches`", type(batches).__name__, "hg.minibatches", "hg.stacked", "hg.full_batch"):
        train(batches=batches)


class Loader:
    def __iter__(self):
        yield jnp.ones(2)


@pytest.mark.parametrize("batches", [(jnp.ones(2) for _ in range(3)), iter([1.0]), Loader()])
def test_iterators_as_batches(batches):
    with fails(TypeError, "`batches`", type(batches).__name__, "gives a batch once", "hg.stacked", "hg.host_batches"):
        train(batches=batches)


ROWS = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    "batches",
    [lambda t: ROWS[t], lambda t: ROWS[int(t)], lambda t: list(ROWS)[t], lambda t: ROWS[0] if t < 2 else ROWS[1]],
    ids=["numpy indexing", "int", "list", "if"],
)
def test_batches_that_ask_for_the_value_of_t(batches):
    cures = ("jnp.asarray(data)[t]", "hg.stacked", "jnp.where", "hg.host_batches")
    with fails(TypeError, "`batches` (<lambda>) asks for the value of t, which is traced", *cures):
        train(batches=batches)


def test_batches_of_the_cures_run():
    host = lambda t: jax.pure_callback(lambda t: ROWS[t], jax.ShapeDtypeStruct((2,), jnp.float32), t)  # noqa: E731
    runs = [train(batches=b).params["w"] for b in (lambda t: jnp.asarray(ROWS)[t], hg.stacked(ROWS), host)]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])


def test_batches_of_no_argument():
    with fails(TypeError, "`batches` must take one argument, batches(t)", "the signature ()", "hg.full_batch"):
        train(batches=lambda: ROWS[0])


def test_a_list_of_batches_to_stacked():
    with fails(ValueError, "steps=3 contradicts `batches`", "A list of batches is a pytree", "np.stack"):
        train(batches=hg.stacked([jnp.ones(2)] * 3))


def test_a_seed_where_a_key_belongs():
    with fails(TypeError, "`key` must be a JAX key such as jax.random.key(0); got int 0"):
        hg.minibatches(ROWS, 2, 0)


def regression(params, theta, batch):
    return jnp.sum((params["w"] - batch["x"] * batch["y"]) ** 2)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "source",
    [hg.full_batch, lambda d: hg.minibatches(d, 2, jax.random.key(0)), lambda d: hg.stacked({k: d[k] for k in d})],
    ids=["full_batch", "minibatches", "stacked"],
)
def test_differentiated_leaf_in_batches(source, transform):
    def f(y):
        return final(loss=regression, batches=source({"x": jnp.ones((3, 2)), "y": y}), steps=3)

    with fails(ValueError, "`batches` is differentiated", "'y'", "through `theta`"):
        transform(jax.grad(f))(jnp.ones((3, 2)))


def test_batches_that_close_over_what_is_differentiated():
    with fails(ValueError, "`batches` is differentiated, in `x`", "through `theta`"):
        jax.grad(lambda x: final(batches=lambda t: x))(jnp.ones(2))


def test_traced_batches_as_a_leaf_are_a_cure_unless_differentiated():
    def f(x):
        return final(batches=jax.tree_util.Partial(lambda x, t: x, x))

    x = jnp.array([0.5, 0.25])
    np.testing.assert_allclose(jax.jit(f)(x), final(), rtol=1e-6)
    with fails(ValueError, "`batches` is differentiated", "through `theta`"):
        jax.grad(f)(x)


def test_float64_where_it_is_not_set():
    with jax.enable_x64(True):
        params = {"w": jnp.ones(2)}
    with fails(ValueError, "params['w'] is float64", "jax.enable_x64(True)"):
        train(params=params)


@pytest.mark.parametrize("bits", [20.5, "20", 7, 61, True])
def test_a_grid_has_a_whole_number_of_bits(bits):
    with fails(ValueError, "`fraction_bits` must be an integer from 8 to 60", repr(bits)):
        hg.Reversible(fraction_bits=bits)
