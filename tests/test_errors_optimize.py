"""Bad arguments and failures of the meta-loop: our classes, with the hyperparameter's path and the meta-step."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long, some_of
from tiny import fails, train

import hypergrad as hg


HYPERS = {"rate": hg.positive(0.1)}


def train_fn(hypers, key):
    return train(optimizer=hg.SGD(hypers["rate"], hypers.get("momentum", 0.9))).params["w"]


def val_fn(w):
    return jnp.sum(w**2)


def flat(w):
    """Zero, with an infinite slope times zero for a derivative: NaN."""
    return jnp.sqrt(jnp.sum(w * 0))


def optimize(hypers=HYPERS, train_fn=train_fn, val_fn=val_fn, meta_steps=2, **options):
    return hg.optimize(train_fn, val_fn, hypers, meta_steps=meta_steps, **options)


def both(hypers=HYPERS, train_fn=train_fn, val_fn=val_fn):
    """The two doors to the same evaluation."""
    return [lambda: optimize(hypers, train_fn, val_fn), lambda: hg.hypergradient(train_fn, val_fn, hypers)]


@pytest.mark.parametrize("hypers", [{}, None, []])
def test_no_hypers(hypers):
    for call in both(hypers):
        with fails(ValueError, "`hypers` is empty"):
            call()


def test_nothing_to_learn():
    for call in both({"rate": hg.fixed(0.1)}):
        with fails(ValueError, "every leaf of `hypers` is hg.fixed"):
            call()


@pytest.mark.parametrize("leaf", [float("nan"), np.array([1.0, np.inf]), jnp.float16(jnp.nan)], ids=str)
def test_a_hyper_that_begins_nowhere(leaf):
    for call in both({"rate": leaf}):
        with fails(ValueError, "hypers['rate'] is not finite"):
            call()


@pytest.mark.parametrize(("leaf", "described"), [(1, "int 1"), ("0.1", "str '0.1'"), (1j, "complex 1j"), (jnp.tanh, "")])
def test_a_hyper_that_is_no_float(leaf, described):
    for call in both({"rate": leaf}):
        with fails(TypeError, f"hypers['rate'] is {described}", "hg.fixed"):
            call()


@pytest.mark.parametrize("meta_steps", [0, -1, 1.5, True, None])
def test_meta_steps_that_are_no_count(meta_steps):
    with fails(ValueError, f"`meta_steps` must be an integer of at least 1; got {meta_steps}"):
        optimize(meta_steps=meta_steps)


@pytest.mark.parametrize(
    "value",
    [
        long(lambda w: w),
        long(lambda w: jnp.argmax(w)),
        long(lambda w: w.sum() * 1j),
        lambda w: (w.sum(), w),
        long(lambda w: None),
    ],
    ids=["vector", "integer", "complex", "tuple", "None"],
)
def test_val_fn_that_is_no_float_scalar(value):
    for call in both(val_fn=value):
        with fails((TypeError, ValueError), "`val_fn` must return one real float; got"):
            call()


def test_val_fn_names_the_shape():
    with fails(ValueError, "`val_fn` must return one real float; got float32[2]", "mean or sum"):
        optimize(val_fn=lambda w: w)


def test_arguments_that_are_no_functions():
    for call in both(train_fn=0.1):
        with fails(TypeError, "`train_fn` must be a function train_fn(hypers, key); got float"):
            call()
    for call in both(val_fn=0.1):
        with fails(TypeError, "`val_fn` must be a function val_fn(trained); got float"):
            call()
    for callbacks in ([3], hg.callbacks.Progress(), [hg.callbacks.Progress]):
        with fails(TypeError, "`callbacks` must be a sequence", "callbacks=[hg.callbacks.Progress()]"):
            optimize(callbacks=callbacks)


def test_functions_of_other_arguments():
    for call in both(train_fn=lambda hypers: None):
        with fails(TypeError, "`train_fn` must take two arguments, train_fn(hypers, key)", "train_fn(hypers, _)"):
            call()
    for call in both(val_fn=lambda trained, data: None):
        with fails(TypeError, "`val_fn` must take one argument, val_fn(trained)", "(trained, data)"):
            call()


def test_val_fn_that_takes_the_whole_run_for_the_parameters():
    with fails(TypeError, "not subscriptable") as caught:
        hg.hypergradient(lambda hypers, key: train(), lambda params: params["w"].sum(), HYPERS)
    assert "trained = Trained(params={'w': f32[2]}" in caught.value.__notes__[0]


def test_a_seed_for_a_key():
    with fails(TypeError, "`key` must be a JAX key such as jax.random.key(0); got int 0"):
        optimize(key=0)


@pytest.mark.parametrize("meta_optimizer", [0.1, hg.SGD(0.1)])
def test_a_meta_optimizer_that_is_not_optax(meta_optimizer):
    with fails(TypeError, "`meta_optimizer` must be an optax transformation", type(meta_optimizer).__name__):
        optimize(meta_optimizer=meta_optimizer)


def test_an_unused_hyperparameter_warns():
    for call in both({"rate": hg.positive(0.1), "unused": hg.positive(1.0)}):
        with pytest.warns(UserWarning, match=r"hypers\['unused'\].* is exactly zero everywhere: is it used\?.*hg\.fixed"):
            call()


def test_an_objective_without_a_slope_warns():
    for call in both(val_fn=lambda w: jnp.sign(w).sum()):
        with pytest.warns(UserWarning, match="exactly zero in every hyperparameter.*piecewise constant, like an accuracy"):
            call()


def test_a_used_hyperparameter_with_a_zero_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, grads = hg.hypergradient(lambda h, key: h["x"], lambda x: jnp.sum(x**2), {"x": jnp.array([0.0, 1.0])})
    assert grads["x"].tolist() == [0, 2]


@pytest.mark.parametrize("jit", [True, long(False)])
def test_a_hypergradient_that_is_not_finite(jit):
    with fails(hg.NonFiniteError, "the hypergradient of hypers['rate']", "at meta-step 0", "skip_nonfinite=True"):
        optimize(val_fn=flat, jit=jit)


def test_hypergradient_that_is_not_finite_is_refused_too():
    with fails(hg.NonFiniteError, "the hypergradient of hypers['rate']"):
        hg.hypergradient(train_fn, flat, HYPERS)


def test_a_validation_value_that_is_not_finite():
    for call in both(val_fn=lambda w: jnp.log(-jnp.sum(w**2))):
        with fails(hg.NonFiniteError, "the validation value is nan", "val_fn"):
            call()


def test_skip_nonfinite_goes_on_and_leaves_the_hypers_alone():
    with pytest.warns(UserWarning, match="no seed of the first two meta-steps gave a finite value and gradient"):
        result = optimize(val_fn=flat, skip_nonfinite=True, meta_steps=3)
    assert [done.step for done in result.history] == [0, 1, 2]
    assert all(np.isnan(done.gradient_norm) for done in result.history)
    np.testing.assert_allclose(hg.natural(result.hypers)["rate"], 0.1, rtol=1e-6)


@pytest.mark.parametrize("jit", [True, long(False)])
def test_skip_nonfinite_skips_a_run_that_diverged(jit):
    # The first key diverges, the others do not: only they move the rate.
    def sometimes(hypers, key):
        worse = jnp.where(jnp.all(jax.random.key_data(key) == jax.random.key_data(first)), 1e6, 1.0)
        return train_fn({"rate": hypers["rate"] * worse}, key)

    first = jax.random.fold_in(jax.random.key(0), 0)
    result = optimize(train_fn=sometimes, skip_nonfinite=True, jit=jit)
    assert [int(done.status.code) != 0 for done in result.history] == [True, False]
    assert np.isnan(result.history[0].value) and result.best.step == 1
    assert float(hg.natural(result.history[1].hypers)["rate"]) == pytest.approx(0.1)
    assert float(hg.natural(result.hypers)["rate"]) != pytest.approx(0.1)


@pytest.mark.parametrize(
    ("hypers", "error", "text", "jit"),
    [
        ({"rate": 1e9}, hg.RangeError, "params['w'] left the range", True),
        long({"rate": 1e9}, hg.RangeError, "params['w'] left the range", False),
        long({"rate": 0.1, "momentum": 1.0}, hg.RangeError, "must be in (0, 1); got", True),
        ({"rate": 0.1, "momentum": 1.0}, hg.RangeError, "must be in (0, 1); got", False),
    ],
)
def test_training_that_fails_inside_optimize(hypers, error, text, jit):
    with fails(error, text) as caught:
        optimize(hypers, jit=jit)
    assert int(caught.value.status.code) != 0


@pytest.mark.parametrize(
    ("hypers", "text"),
    [({"rate": 1e9}, "params['w'] left the range"), ({"rate": 0.1, "momentum": 1.0}, "must be in (0, 1); got")],
)
def test_training_that_fails_inside_hypergradient(hypers, text):
    with fails(hg.RangeError, text):
        hg.hypergradient(train_fn, val_fn, hypers)


MANY, WORDS = 40, 8  # as in test_errors_runs: momentum 0.01 needs 8 words for 40 steps


def forgetful(hypers, key, capacity=None):
    optimizer = hg.SGD(0.1, hypers["momentum"])
    return train(optimizer=optimizer, steps=MANY, adjoint=hg.Reversible(capacity=capacity)).params["w"]


@pytest.mark.long
def test_a_capacity_of_ones_own_that_is_too_small():
    for call in both({"momentum": hg.unit_interval(0.01)}, lambda hypers, key: forgetful(hypers, key, capacity=1)):
        with fails(hg.BufferFullError, f"needs {WORDS} 32-bit words", f"capacity={WORDS}") as caught:
            call()
        assert int(caught.value.status.words) == WORDS


@pytest.mark.long
@some_of("jit", [True, False], True)
def test_a_capacity_left_to_the_library_grows(jit):
    result = optimize({"momentum": hg.unit_interval(0.01)}, forgetful, jit=jit)
    assert [int(done.status.words) for done in result.history] == [WORDS, WORDS]
    assert all(np.isfinite(done.value) and np.isfinite(done.gradient_norm) for done in result.history)


def square(hypers, key):
    return hypers**2


def test_a_bad_start_is_found_before_any_runs():
    ran = []
    with fails(TypeError, "a hyperparameter is a float", "(start 1 of hg.restarts; none has run)"):
        hg.restarts(square, lambda x: x, [1.0, "two"], meta_steps=1, callbacks=[ran.append])
    assert not ran
    for starts in ({"rate": 1.0}, "rate", 1.0, jnp.ones(2), hg.positive(1.0), None):
        with fails(TypeError, "`starts` of hg.restarts must be a list of hypers", type(starts).__name__):
            hg.restarts(square, lambda x: x, starts, meta_steps=1)


def test_restarts_has_the_options_of_optimize():
    with fails(TypeError, "hg.restarts has no option seeds. It takes meta_steps, meta_optimizer, key, seeds_per_step, "):
        hg.restarts(square, lambda x: x, [1.0], seeds=3)


def test_callbacks_of_any_kind_are_called_or_refused():
    for given in (lambda c: iter([c]), lambda c: (x for x in [c]), lambda c: (c,)):
        seen = []
        hg.optimize(square, lambda x: x, 1.0, meta_steps=1, callbacks=given(seen.append))
        assert len(seen) == 1
    for bad in (None, print, [None], 3):
        with fails(TypeError, "`callbacks` must be a sequence of functions of a MetaStep"):
            hg.optimize(square, lambda x: x, 1.0, meta_steps=1, callbacks=bad)


@pytest.mark.parametrize("one", [np.int64(1), jnp.int32(1)], ids=["numpy", "jax"])
def test_integers_of_any_kind_are_counts(one):
    assert len(hg.optimize(square, lambda x: x, 1.0, meta_steps=one, seeds_per_step=one).history) == 1


@pytest.mark.parametrize("around", [jax.jit, lambda f: jax.vmap(f, axis_size=2), jax.grad], ids=["jit", "vmap", "grad"])
def test_traced_hypers_are_refused_in_words(around):
    for call, name in ((hg.hypergradient, "hg.hypergradient"), (hg.optimize, "hg.optimize")):
        with fails(ValueError, f"{name} runs from Python and needs numbers", "Call it outside of them"):
            around(lambda x, call=call: call(square, lambda x: x, x))(jnp.ones(2)[:2] if around is not jax.grad else 1.0)
    with fails(ValueError, "hg.optimize runs from Python"):
        jax.jit(lambda key: hg.optimize(square, lambda x: x, 1.0, key=key).best.value)(jax.random.key(0))


@pytest.mark.long
def test_a_line_search_says_that_it_is_compiled():
    def host(h, _):
        batches = hg.host_batches(lambda t: np.ones(2, np.float32))
        return train(batches=batches, optimizer=hg.SGD(h["rate"])).params["w"]

    for train_, val in ((host, val_fn), (train_fn, lambda w: val_fn(w) * (1 if jax.lax.stop_gradient(w).sum() > 9 else 2))):
        with fails((ValueError, TypeError), "in a line search of hg.optimize, which evaluates in compiled code"):
            optimize(train_fn=train_, val_fn=val, jit=False, meta_optimizer=optax.lbfgs())


def test_hypers_of_one_name_are_told_apart():
    hypers = {"a/b": 1.0, "a": {"b": 2.0, "c": 3.0}}
    f = lambda h, _: h["a/b"] + 10 * h["a"]["b"] + 100 * h["a"]["c"]  # noqa: E731
    done = hg.optimize(f, lambda x: x, hypers, meta_steps=1).history[0]
    assert done.gradients == {"['a/b']": 1.0, "['a']['b']": 10.0, "a/c": 100.0}
    assert done.record()["hypers"] == {"['a/b']": 1.0, "['a']['b']": 2.0, "a/c": 3.0}
