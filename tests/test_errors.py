"""Bad arguments: each is refused before anything runs, by an error that names the argument, the value and the cure."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long
from tiny import BATCHES, PARAMS, fails, fails_compiled, loss, train

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
    with fails(hg.RangeError, "rounds to 1 on the grid of 1/65536", "got 0.99999236"):
        train(optimizer=hg.SGD(0.1, 0.99999236))  # below 1 - 2^-17, which it is in float32
    with fails(hg.RangeError, "rounds to 0 on the grid of 1/65536"):
        train(optimizer=hg.SGD(0.1, 2.0**-20))
    with fails(hg.RangeError, "would lose more digits than it can keep: below 1/65536"):
        train(optimizer=hg.AdamW(1.0, weight_decay=1 - 2.0**-20))


@pytest.mark.parametrize(
    ("rate", "why"),
    [
        (3.0, "got -0.5 at step 0. With 0 a step forgets"),
        long(-1.0, "got 1.5 at step 0. Above 1 all grows"),
        (np.nan, "It is NaN"),
    ],
)
def test_a_decay_made_of_two_hyperparameters_is_named_by_both(rate, why):
    where = "`1 - learning_rate * weight_decay for params['w']` must be in (0, 1]"
    with fails(hg.RangeError, where, why, "The nearest representable value is"):
        train(optimizer=hg.AdamW(rate, weight_decay=0.5))
    with fails_compiled(hg.RangeError, where, why):
        jax.jit(lambda rate: train(optimizer=hg.AdamW(rate, weight_decay=0.5)).params)(rate)


@pytest.mark.parametrize("bound", [long(-1.0), float("nan"), {"w": hg.PerStep(jnp.array([1.0, -1.0, 1.0]))}])
def test_a_bound_that_clips_nothing_or_all(bound):
    for wrap, field in ((hg.clip, "max_delta"), (hg.clip_by_global_norm, "max_norm")):
        with fails(ValueError, f"hg.{wrap.__name__}: `{field}` must be at least 0; got"):
            wrap(hg.SGD(0.1), bound)
        wrap(hg.SGD(0.1), jnp.inf)
        with fails_compiled(hg.NonFiniteError, "velocity['w'] became NaN"):
            jax.jit(lambda c, wrap=wrap: train(optimizer=wrap(hg.SGD(0.1), c)).params)(jax.tree.map(jnp.asarray, bound))


def test_a_mask_of_numpy_bools_and_of_another_tree():
    frozen = train(optimizer=hg.freeze(hg.SGD(0.1), {"w": np.True_})).params
    np.testing.assert_array_equal(frozen["w"], PARAMS["w"])
    with fails(ValueError, "hg.freeze: `mask` must be one bool or a pytree prefix of `params`"):
        train(optimizer=hg.freeze(hg.SGD(0.1), {"v": True}))


def test_parameters_of_eight_bits():
    with fails(TypeError, "statistics is", "real floats, of 16 bits or more"):
        train(statistics=jnp.zeros(2, jnp.float8_e4m3fn))
    with fails(TypeError, "params['w'] is", "real floats of 16 bits or more"):
        hg.train(loss, {"w": jnp.zeros(2, jnp.float8_e4m3fn)}, hg.SGD(0.1), BATCHES, steps=3)


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
    total, inner = lambda w, *_: jnp.sum(w["net"]["a"]), {f"w{i}": jnp.ones(1) for i in range(99)}  # noqa: E731
    with fails(
        ValueError, " ....", "At ['net'] the former has 'b', which the latter has not, and lacks 'a', 'w0', 'w1', ..."
    ):
        train(total, {"net": {"a": jnp.ones(1)} | inner}, hg.SGD({"net": {"b": 0.1}}))


def test_field_names_are_no_prefix_of_a_model():
    net = eqx.filter(eqx.nn.MLP(1, 1, 2, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    cure = ("A dict of field names is no prefix of MLP", "equinox.tree_at(lambda m: m.layers[0], rates, 0.01)")
    total = lambda w, *_: sum(jnp.sum(x) for x in jax.tree.leaves(w))  # noqa: E731
    with fails(ValueError, "pytree prefix of `params`; got the tree", "for params an equinox MLP", *cure):
        train(total, net, hg.SGD({"layers": 0.1}))
    with fails(ValueError, "optimizer.learning_rate must be one value or a pytree prefix", *cure):
        train(total, {"net": net, "b": jnp.zeros(1)}, hg.SGD({"net": {"layers": 0.1}, "b": 0.2}))
    train(total, net, hg.SGD(eqx.tree_at(lambda m: m.layers[0], jax.tree.map(lambda _: 0.1, net), 0.01)))


def test_a_dict_is_no_prefix_of_what_flax_makes():
    nnx = pytest.importorskip("flax.nnx")
    total = lambda w, *_: sum(jnp.sum(x) for x in jax.tree.leaves(w))  # noqa: E731
    state = nnx.State({"l": jnp.ones(2), "o": jnp.ones(1)})
    with fails(ValueError, "for params a flax State.", "make it a State as well, State({...})"):
        train(total, state, hg.SGD({"l": 0.1, "o": 0.2}))
    train(total, state, hg.SGD(nnx.State({"l": 0.1, "o": 0.2})))


@pytest.mark.parametrize(("rate", "described"), [("fast", "str 'fast'"), (1j, "complex 1j"), (jnp.tanh, "")])
def test_hyperparameter_that_is_no_real_number(rate, described):
    with fails(TypeError, "optimizer.learning_rate for params['w'] must be", described):
        train(optimizer=hg.SGD(rate))


def test_a_schedule_that_is_a_function():
    with fails(TypeError, "optimizer.learning_rate", "got function", "hg.PerStep(jax.vmap(schedule)(jnp.arange(steps)))"):
        train(optimizer=hg.SGD(optax.cosine_decay_schedule(0.1, 3)))


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


@pytest.mark.parametrize(
    ("steps", "error", "text"),
    [
        (None, ValueError, "`steps` is missing"),
        (0, ValueError, "`steps` must be at least 1; got 0"),
        (-1, ValueError, "`steps` must be at least 1; got -1"),
        (2**29, ValueError, "`steps` must be at most 536870910, what the status can count; got 536870912"),
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


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
ALL = "backwards exactly. There are hg.HeavyBall (optax.sgd with momentum), hg.SGD"


@pytest.mark.parametrize(
    ("optimizer", "cure"),
    [
        (optax.sgd(0.1), ALL),
        (optax.sgd(SCHEDULE, 0.9), "Take hg.HeavyBall(learning_rate, momentum). There are"),
        (optax.adam(0.1), "Take hg.Adam(learning_rate, b1, b2, eps)."),
        (optax.adamw(SCHEDULE), "Take hg.AdamW(learning_rate, b1, b2, eps, weight_decay)."),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), "Take hg.AdamW(learning_rate"),
        (optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1)), "Take hg.add_decayed_weights(hg.Adam("),
        (optax.rmsprop(0.1, momentum=0.9), "Take hg.RMSProp(learning_rate, decay, momentum, eps)."),
        (optax.adagrad(0.1), "Take hg.Adagrad(learning_rate, momentum, eps)."),
        (optax.sgd(0.1, 0.9, nesterov=True), "Take hg.Nesterov(learning_rate, momentum)."),
        (optax.nadamw(0.1), "Take hg.NAdamW(learning_rate, b1, b2, eps, weight_decay)."),
        (optax.lion(0.1), "Take hg.Lion(learning_rate, b1, b2, weight_decay)."),
        (optax.lamb(0.1), "Take hg.LAMB(learning_rate, b1, b2, eps, weight_decay)."),
        (optax.contrib.muon(0.1), "Take hg.muon_with_adamw."),
        (optax.contrib.schedule_free_adamw(0.1), "Take hg.ScheduleFreeAdamW("),
        (optax.adabelief(0.1), ALL),
        (optax.adam(0.1)._replace(update=jax.jit(optax.adam(0.1).update)), "backwards exactly."),
        (optax.inject_hyperparams(optax.adam)(0.1), ALL),
    ],
)
def test_an_optax_optimizer(optimizer, cure):
    others = ("hg.AdamW", "hg.clip_by_global_norm", "hg.optimize(..., meta_optimizer=...)")
    with fails(TypeError, "`optimizer` is an optax transformation", cure, *others):
        train(optimizer=optimizer)


def test_arguments_of_another_kind():
    with fails(TypeError, "`optimizer` must be a reversible optimizer such as hg.SGD(0.1, 0.9)", "float"):
        train(optimizer=0.1)
    with fails(TypeError, "`optimizer` must be a reversible optimizer", "got the class SGD itself"):
        train(optimizer=hg.SGD)
    for rates in ([0.1, 0.1, 0.1], hg.PerStep([0.1, 0.1, 0.1])):
        with fails(ValueError, "optimizer.learning_rate must be one value", "make it an array, jnp.array([...])"):
            train(optimizer=hg.SGD(rates))
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
        ({"capacity": 2**70}, "`capacity`"),
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
