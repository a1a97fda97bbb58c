"""Bad arguments: each is refused before anything runs, by an error that names the argument, the value and the cure."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import BATCHES, PARAMS, fails, final, loss, train

import hypergrad as hg


SMALLEST, HIGHEST = 2.0**-16, 1 - 2.0**-16
MOMENTA = [(0.0, SMALLEST), (-0.5, SMALLEST), (2.0**-20, SMALLEST)] + [
    (m, HIGHEST) for m in (1.0, 1.5, float("nan"), 1 - 2.0**-20)
]


@pytest.mark.parametrize(("momentum", "nearest"), MOMENTA)
def test_momentum_outside_its_interval(momentum, nearest):
    where = "`optimizer.momentum for params['w']` must be in (0, 1)"
    for optimizer in (hg.SGD(0.1, momentum), hg.HeavyBall(0.1, momentum), hg.SGD(0.1, {"w": momentum})):
        with fails(hg.RangeError, where, f"got {momentum!r}", f"nearest representable value is {nearest!r}") as caught:
            train(optimizer=optimizer)
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, hg.HypergradError)
    with fails(hg.RangeError, where):
        hg.check_reversal(loss, PARAMS, hg.SGD(0.1, momentum), BATCHES, steps=3)


@pytest.mark.parametrize("momentum", [0, 1])
def test_momentum_as_a_python_integer(momentum):
    with fails(hg.RangeError, "must be in (0, 1)", f"got {float(momentum)}"):
        train(optimizer=hg.SGD(0.1, momentum))


def test_momentum_that_rounds_to_an_end_says_so():
    with fails(hg.RangeError, "rounds to 1 on the grid of 1/65536"):
        train(optimizer=hg.SGD(0.1, 1 - 2.0**-20))
    with fails(hg.RangeError, "rounds to 0 on the grid of 1/65536"):
        train(optimizer=hg.SGD(0.1, 2.0**-20))


@pytest.mark.parametrize("momentum", [0.0, 1.0, float("nan")])
def test_per_step_outside_its_domain_names_the_step(momentum):
    values = hg.PerStep(jnp.array([0.5, momentum, 0.5]))
    with fails(hg.RangeError, "`optimizer.momentum for params['w']`", f"got {momentum!r} at step 1"):
        train(optimizer=hg.SGD(0.1, values))
    with fails(ValueError, "hg.unit_interval: leaf .values", "at index (1,)"):
        hg.unit_interval(values)


def test_per_step_of_the_wrong_length():
    with fails(ValueError, "optimizer.learning_rate for params['w'] is hg.PerStep of shape (4,)", "steps=3"):
        train(optimizer=hg.SGD(hg.PerStep(jnp.ones(4))))
    with fails(ValueError, "optimizer.momentum for params['w'] is hg.PerStep of shape (2, 2)", "steps=3"):
        train(optimizer=hg.SGD(0.1, hg.PerStep(jnp.full((2, 2), 0.5))))
    with fails(ValueError, "hg.PerStep of shape ()", "steps=3"):
        train(optimizer=hg.SGD(hg.PerStep(0.1)))


@pytest.mark.parametrize("rate", [jnp.ones(5), hg.PerStep(jnp.ones((3, 5)))])
def test_hyperparameter_of_the_wrong_shape(rate):
    with fails(ValueError, "optimizer.learning_rate for params['w'] has shape (5,)", "own shape (2,)"):
        train(optimizer=hg.SGD(rate))


def test_hyperparameter_that_forgot_its_per_step():
    with fails(ValueError, "has shape (3,)", "Wrap it in hg.PerStep"):
        train(optimizer=hg.SGD(jnp.ones(3)))


def test_hyperparameter_of_another_tree():
    with fails(ValueError, "optimizer.learning_rate must be one value or a pytree prefix of `params`", "'q'", "'w'"):
        train(optimizer=hg.SGD({"q": 0.1}))


@pytest.mark.parametrize(("rate", "described"), [("fast", "str 'fast'"), (1j, "complex 1j"), (jnp.tanh, "")])
def test_hyperparameter_that_is_no_real_number(rate, described):
    with fails(TypeError, "optimizer.learning_rate for params['w'] must be", described):
        train(optimizer=hg.SGD(rate))


@pytest.mark.parametrize(
    ("leaf", "described"),
    [
        (jnp.arange(3), "int32[3]"),
        (np.arange(3), "int64[3]"),
        (jnp.ones(2, bool), "bool[2]"),
        (jnp.ones(2) * 1j, "complex64[2]"),
        (3, "int 3"),
        (jnp.tanh, ""),
        ("name", "str 'name'"),
    ],
)
def test_params_leaf_that_is_no_real_float(leaf, described):
    with fails(TypeError, f"params['w'] is {described}", "equinox.partition", "nnx.split"):
        train(params={"w": leaf})


def test_a_whole_equinox_model_as_params():
    with fails(TypeError, "params.activation is", "equinox.partition(model, equinox.is_inexact_array)"):
        train(params=eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0)))


@pytest.mark.parametrize("params", [{}, None, (), {"a": {}}])
def test_empty_params(params):
    with fails(ValueError, "`params` is empty"):
        train(params=params)


def test_loss_of_two_arguments():
    with fails(TypeError, "loss(params, theta, batch)", "(params, batch)", "Without theta write loss(params, _, batch)"):
        train(loss=lambda params, batch: 0.0)


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


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, params, theta, batch):
        return self.scale * jnp.sum(params["w"] ** 2)

    def method(self, params, theta, batch):
        return self.scale * jnp.sum(params["w"] ** 2)


def scaled(params, theta, batch, scale):
    return scale * jnp.sum(params["w"] ** 2)


def nested(scale):
    def inner(params):
        return scale * jnp.sum(params["w"] ** 2)

    return lambda params, theta, batch: inner(params)


CLOSURES = {
    "cell": (lambda scale: lambda params, theta, batch: scale * jnp.sum(params["w"] ** 2), "`scale`"),
    "cell of an inner function": (nested, "`scale`"),
    "inside a container": (lambda scale: (lambda held: lambda p, t, b: scaled(p, t, b, held["s"]))({"s": scale}), "`held`"),
    "partial argument": (lambda scale: functools.partial(scaled, scale=scale), "`scale`"),
    "default argument": (lambda scale: lambda params, theta, batch, scale=scale: scaled(params, theta, batch, scale), ""),
    "bound method": (lambda scale: Scaled(scale).method, ""),
    "callable object": (lambda scale: Scaled(scale), ""),
    "inside an object": (lambda scale: (lambda held: lambda p, t, b: held(p, t, b))(Scaled(scale)), ""),
}


@pytest.mark.parametrize("case", CLOSURES)
def test_loss_that_closes_over_a_traced_value(case):
    make, name = CLOSURES[case]
    with fails(ValueError, "`loss`", f"closes over the traced value {name}", "through `theta` or the batch"):
        jax.grad(lambda scale: final(loss=make(scale)))(1.0)


def test_loss_that_closes_over_a_traced_value_under_jit():
    with fails(ValueError, "`loss`", "closes over the traced value `scale`"):
        jax.jit(lambda scale: final(loss=CLOSURES["cell"][0](scale)))(1.0)


def test_batches_that_close_over_a_traced_value():
    with fails(ValueError, "`batches`", "closes over the traced value `x`", "jax.tree_util.Partial(function, value)"):
        jax.jit(lambda x: final(batches=lambda t: x))(jnp.ones(2))


def test_traced_batches_as_a_leaf_are_a_cure_unless_differentiated():
    def f(x):
        return final(batches=jax.tree_util.Partial(lambda x, t: x, x))

    x = jnp.array([0.5, 0.25])
    np.testing.assert_allclose(jax.jit(f)(x), final(), rtol=1e-6)
    with fails(ValueError, "`batches` is differentiated", "through `theta`"):
        jax.grad(f)(x)


@pytest.mark.parametrize(
    ("steps", "error", "text"),
    [
        (None, ValueError, "`steps` is missing"),
        (0, ValueError, "`steps` must be at least 1; got 0"),
        (-1, ValueError, "`steps` must be at least 1; got -1"),
        (2.5, TypeError, "`steps` must be a Python integer"),
        (True, TypeError, "`steps` must be a Python integer"),
    ],
)
def test_steps_that_are_no_count(steps, error, text):
    with fails(error, text):
        train(steps=steps)


def test_steps_that_contradict_the_data():
    with fails(ValueError, "steps=3 contradicts `batches`", "4"):
        train(batches=hg.stacked(jnp.ones((4, 2))), steps=3)


def test_steps_that_are_traced():
    with fails(TypeError, "`steps` must be a Python integer"):
        jax.jit(lambda steps: train(steps=steps).params)(3)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1)])
def test_an_optax_optimizer(optimizer):
    with fails(TypeError, "`optimizer` is an optax transformation", "hg.SGD", "meta_optimizer"):
        train(optimizer=optimizer)


def test_arguments_of_another_kind():
    with fails(TypeError, "`optimizer` must be a reversible optimizer such as hg.SGD(0.1, 0.9)", "float"):
        train(optimizer=0.1)
    with fails(TypeError, "`adjoint` must be hg.Reversible(), hg.Unrolled() or hg.Checkpointed()", "'reversible'"):
        train(adjoint="reversible")


def test_state_that_fits_no_run():
    with fails(ValueError, "`state`", "['velocity']", "['v']"):
        train(state={"v": PARAMS})
    with fails(ValueError, "state['velocity']['w'] must be a float array of shape (2,)", "float32[3]"):
        train(state={"velocity": {"w": jnp.ones(3)}})
    with fails(ValueError, "state['velocity'] must have the tree of `params`"):
        train(state={"velocity": jnp.ones(2)})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capacity": -1}, "`capacity`"),
        ({"fraction_bits": 61}, "`fraction_bits`"),
        ({"driver": "gpu"}, "`driver`"),
        ({"buffer": "disk"}, "`buffer`"),
        ({"buffer": "gmpy2", "driver": "scan"}, 'driver="host"'),
    ],
)
def test_adjoint_options(options, text):
    with fails(ValueError, text):
        hg.Reversible(**options)


def test_host_driver_inside_jit():
    with fails(ValueError, 'driver="host"', "jax.jit", 'driver="scan"'):
        jax.jit(lambda params: train(params=params, adjoint=hg.Reversible(driver="host")).params)(PARAMS)
