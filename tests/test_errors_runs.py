"""Runs that go wrong: the same sentence eagerly (our class) and out of compiled code, and NaN in every number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from tiny import BATCHES, PARAMS, fails, fails_compiled, final, loss, sentence, train

import hypergrad as hg
from hypergrad.exact import DEFERRED


def trained_with(momentum):
    return train(optimizer=hg.SGD(0.1, momentum)).params


MOMENTA = [0.0, 1.0, -0.5, float("nan"), 1 - 2.0**-20]
jitted_trained_with = jax.jit(trained_with)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_momentum_under_jit(momentum):
    with fails_compiled(hg.RangeError, "momentum", "params['w']", "must be in (0, 1)", "nearest representable value"):
        jitted_trained_with(momentum)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_momentum_under_jit_gets_the_same_sentence(momentum):
    with fails(hg.RangeError) as eager:
        trained_with(momentum)
    with fails(jax.errors.JaxRuntimeError) as compiled:
        jitted_trained_with(momentum)
    assert sentence(compiled.value) == str(eager.value)


@pytest.mark.parametrize("momentum", [0.0, float("nan")])
def test_momentum_under_an_eager_gradient(momentum):
    with fails(hg.RangeError, "momentum", "must be in (0, 1); got", repr(momentum)):
        jax.grad(lambda m: final(optimizer=hg.SGD(0.1, m)))(momentum)


@pytest.mark.parametrize("momenta", [(0.9, 1.5), long((1.5, 0.9)), (float("nan"), 1.5)])
def test_of_several_decays_the_first_that_is_out_of_range_is_named(momenta):
    leaf = "b" if momenta[0] == 0.9 else "a"
    params, square = {"a": jnp.ones(2), "b": jnp.ones(2)}, lambda p, *_: sum(jnp.sum(x**2) for x in p.values())
    rule = lambda x: hg.SGD(0.1, {"a": x[0], "b": x[1]})  # noqa: E731
    with fails_compiled(hg.RangeError, f"params['{leaf}']", f"got {max(momenta) if leaf == 'b' else momenta[0]}"):
        jax.jit(lambda x: train(loss=square, params=params, optimizer=rule(x)).params)(jnp.array(momenta))


def test_per_step_momentum_under_jit_names_the_step():
    with fails_compiled(hg.RangeError, "momentum", "params['w']", "must be in (0, 1); got", "0.0 at step 1"):
        jax.jit(lambda m: trained_with(hg.PerStep(m)))(jnp.array([0.5, 0.0, 0.5]))


# w_b gains 10 v a step, and v = 500, 750, 875 at momentum 0.5 and slope -1000: w_b = 5000, 12500, 21250 leaves +-2^14.
def downhill(params, theta, batch):
    return jnp.sum(params["a"] ** 2) - 1000 * jnp.sum(params["b"])


LEAVING = {
    "loss": downhill,
    "params": {"a": jnp.ones(2), "b": jnp.zeros(3)},
    "optimizer": hg.SGD({"a": 0.1, "b": 10.0}, 0.5),
    "steps": 4,
}
LEFT = ("params['b'] left the range", "at step 2", "magnitude 2.125e+04", "range +-1.638e+04", "Lower the learning rate")


def test_weights_that_leave_the_range():
    with fails(hg.RangeError, *LEFT) as caught:
        train(**LEAVING)
    assert (int(caught.value.status.step), float(caught.value.status.magnitude)) == (2, 21250.0)
    with fails(hg.RangeError, *LEFT):
        hg.check_reversal(downhill, LEAVING["params"], LEAVING["optimizer"], BATCHES, steps=4)


@pytest.mark.parametrize("adjoint", [hg.Unrolled(), long(hg.Checkpointed()), hg.Reversible(driver="host")])
def test_weights_that_leave_the_range_on_every_road(adjoint):
    with fails(hg.RangeError, *LEFT):
        train(**LEAVING, adjoint=adjoint)


@pytest.mark.long
def test_weights_that_leave_the_range_under_jit():
    with fails_compiled(hg.RangeError, *LEFT):
        jax.jit(lambda params: train(**{**LEAVING, "params": params}).params)(LEAVING["params"])


def test_the_leaf_is_named_that_left_though_its_neighbours_lie_in_the_same_vector():
    def uphill(params, theta, batch):
        return sum(jnp.sum(x**2) for x in params.values()) - jnp.where(batch[0] > 0, 1e9, 0) * params["c"][1]

    params = {name: jnp.ones((2, 3)) for name in "abc"} | {"c": jnp.ones(4), "large": jnp.ones(1000)}
    batches = hg.stacked(jnp.arange(-2.0, 4.0)[:, None])
    with fails(hg.RangeError, "velocity['c'] left the range", "at step 3", "magnitude 1e+08", "range +-1.638e+04"):
        train(loss=uphill, params=params, optimizer=hg.SGD(0.01, 0.9), batches=batches, steps=6)


def test_fewer_fraction_bits_is_a_cure():
    trained = train(**LEAVING, adjoint=hg.Reversible(fraction_bits=44))
    np.testing.assert_allclose(trained.params["b"], 5000 + 7500 + 8750 + 9375, rtol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), long(float("inf")), -1e9])
def test_params_that_start_outside_the_range(value):
    # Whatever converting them to integers makes of them: NaN would become 0, and training go on from there.
    params = {"w": jnp.array([1.0, value])}
    with fails((hg.NonFiniteError, hg.RangeError), "params['w']", "before the first step"):
        train(params=params)
    with fails(jax.errors.JaxRuntimeError, "params['w']", "before the first step"):
        jax.jit(lambda params: train(params=params).params)(params)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e9])
def test_state_that_starts_outside_the_range(value):
    with fails((hg.NonFiniteError, hg.RangeError), "velocity['w']", "before the first step"):
        train(state={"velocity": {"w": jnp.array([0.0, value])}})


def test_nan_names_the_step_and_what_may_be_its_reason():
    nan_at_1 = hg.stacked(jnp.array([1.0, jnp.nan, 1.0]))
    with fails(hg.NonFiniteError, "NaN or infinite at step 1", "learning rate") as caught:
        train(loss=lambda params, theta, batch: batch * jnp.sum(params["w"]), batches=nan_at_1)
    assert isinstance(caught.value, FloatingPointError) and int(caught.value.status.step) == 1
    with fails(hg.NonFiniteError, "the loss became NaN or infinite at step 1"):  # its gradient is fine
        train(loss=lambda params, theta, batch: batch + jnp.sum(params["w"]), batches=nan_at_1)
    with fails(hg.NonFiniteError, "NaN or infinite at step 0", "look for NaN in the batch and in the hyperparameters"):
        train(optimizer=hg.SGD(jnp.nan, 0.9))


def test_nan_loss_under_jit_names_the_step():
    nan_loss = lambda params, theta, batch: jnp.sum(params["w"]) + jnp.log(theta)  # noqa: E731
    with fails_compiled(hg.NonFiniteError, "the loss became NaN or infinite at step 0"):
        jax.jit(lambda theta: train(loss=nan_loss, theta=theta).losses)(-1.0)


# momentum 0.01 is 655/2^16: 40 steps lose 40 log2(2^16/655) = 266 bits, eight times 32 of them in words.
MANY, WORDS = 40, 8
ROADS = hg.Reversible(), hg.Unrolled(), hg.Checkpointed()
FULL = (f"needs {WORDS} 32-bit words per parameter", f"hg.Reversible(capacity={WORDS})")


def forgetful(momentum, capacity=None):
    return final(optimizer=hg.SGD(0.1, momentum), steps=MANY, adjoint=hg.Reversible(capacity=capacity))


def test_words_of_the_forgetful_run():
    halves = DEFERRED.words_needed(np.full(MANY, round(0.01 * 2**16)), 2**16)
    assert -(-halves // 2) == WORDS


@pytest.mark.parametrize("capacity", [long(None), long(0), WORDS - 1], ids=["one bit a step", "no room", "one word short"])
def test_too_little_capacity_under_jit(capacity):
    with fails_compiled(hg.BufferFullError, *FULL):
        jax.jit(jax.grad(lambda m: forgetful(m, capacity)))(0.01)


def test_too_little_capacity_eagerly():
    with fails(hg.BufferFullError, *FULL) as caught:
        jax.grad(lambda m: forgetful(m, WORDS - 1))(0.01)
    assert int(caught.value.status.words) == WORDS


def test_the_capacity_asked_for_is_enough():
    exact, enough = jax.grad(forgetful)(0.01), jax.jit(jax.grad(lambda m: forgetful(m, WORDS)))(0.01)
    np.testing.assert_allclose(enough, exact, rtol=1e-6)


class OfFive(hg.SGD):
    """Its decay is not what the field says: momentum^5."""

    def prepare(self, h, steps):
        return {**h, "momentum": h["momentum"] ** 5}


def test_room_for_a_decay_that_prepare_changes():
    slope = lambda rule, m: jax.grad(lambda rate: final(optimizer=rule(rate, m), steps=MANY))(0.1)  # noqa: E731
    nearest = round(0.01 * 2**16) / 2**16
    np.testing.assert_allclose(slope(OfFive, nearest**0.2), slope(hg.SGD, nearest), rtol=1e-4)
    with fails(hg.RangeError, "momentum", "params['w']", "must be in (0, 1)"):
        slope(OfFive, 0.05)  # the field may be that, its fifth power may not


def impure():
    """Another batch whenever the compiled code asks for one."""
    calls = []

    def load(t):
        calls.append(t)
        return np.array([0.5, 0.25], np.float32) * len(calls)

    return lambda t: jax.pure_callback(load, jax.ShapeDtypeStruct((2,), jnp.float32), t)


def impure_final(params, **options):
    return final(params=params, batches=impure(), **options)


REVERSAL = ("saw other batches than the training", "`batches` a pure function of t", "hg.check_reversal(...)")


@pytest.mark.parametrize("driver", ["scan", long("host")])
def test_a_batch_function_that_changes(driver):
    with fails(hg.ReversalError, *REVERSAL):
        jax.grad(lambda params: impure_final(params, adjoint=hg.Reversible(driver=driver)))(PARAMS)


def test_a_batch_function_that_changes_under_jit():
    with fails_compiled(hg.ReversalError, *REVERSAL):
        jax.jit(jax.grad(impure_final))(PARAMS)


@pytest.mark.long
def test_a_batch_function_that_changes_without_raising():
    grads = jax.grad(lambda params: impure_final(params, throw=False))(PARAMS)
    assert jnp.isnan(grads["w"]).all()


def test_a_batch_function_that_changes_is_found_by_check_reversal():
    honest = hg.check_reversal(loss, PARAMS, hg.SGD(0.1, 0.9), BATCHES, steps=3)
    assert honest.exact and honest.first_mismatch is None
    lying = hg.check_reversal(loss, PARAMS, hg.SGD(0.1, 0.9), impure(), steps=3)
    assert not lying.exact
    # Step 2 is the first that the reverse pass undoes; w needs no gradient to come back, the velocity does.
    assert lying.first_mismatch == (2, "velocity['w']", "batch")


def diverging(rate, adjoint=hg.Reversible()):  # noqa: B008 (frozen)
    optimizer, quartic = hg.SGD(rate, 0.5), lambda params, theta, batch: jnp.sum(params["w"] ** 4)
    return train(loss=quartic, optimizer=optimizer, adjoint=adjoint, throw=False)


def test_without_throw_numbers_are_nan_and_the_status_tells():
    trained = diverging(1e4)
    for x in jax.tree.leaves((trained.params, trained.losses, trained.state)):
        assert jnp.isnan(x).all()
    assert int(trained.status.code) != 0 and int(trained.status.step) == 0
    assert "left the range" in trained.status.sentence()


def test_without_throw_every_lane_has_its_own_status():
    trained = jax.jit(jax.vmap(diverging))(jnp.array([0.1, 1e4, 0.2]))
    assert np.asarray(trained.status.code != 0).tolist() == [False, True, False]
    assert np.asarray(trained.status.step).tolist() == [-1, 0, -1]
    for x in jax.tree.leaves((trained.params, trained.losses, trained.state)):
        assert np.isfinite(x[jnp.array([0, 2])]).all() and np.isnan(x[1]).all()
    alone = diverging(0.2)
    np.testing.assert_allclose(trained.params["w"][2], alone.params["w"], rtol=1e-6)


@some_of(("adjoint", "compiled"), [(a, c) for a in ROADS for c in (False, True)], (ROADS[0], False), (ROADS[1], True))
def test_without_throw_the_gradient_of_a_failed_run_is_nan_and_not_zero(adjoint, compiled):
    slope = jax.grad(lambda rate: diverging(rate, adjoint).params["w"].sum())
    slope = jax.jit(slope) if compiled else slope
    assert jnp.isnan(slope(1e4))
    assert jnp.isfinite(slope(0.1))


@pytest.mark.parametrize("adjoint", [hg.Reversible(), long(hg.Unrolled())], ids=["exact", "unrolled"])
def test_a_gradient_of_all_lanes_together_is_nan_in_the_failed_one_alone(adjoint):
    together = lambda rates: jnp.sum(jax.vmap(lambda rate: diverging(rate, adjoint).params["w"].sum())(rates))  # noqa: E731
    assert np.isfinite(jax.jit(jax.grad(together))(jnp.array([0.1, 1e4, 0.2]))).tolist() == [True, False, True]


@pytest.mark.long
def test_without_throw_gradients_of_the_other_lanes_are_finite():
    grads = jax.vmap(jax.grad(lambda rate: diverging(rate).params["w"].sum()))(jnp.array([0.1, 1e4]))
    assert np.isfinite(grads).tolist() == [True, False]


def test_one_lane_that_diverges_raises_under_vmap():
    with fails_compiled(hg.RangeError, "params['w'] left the range", "at step 0"):
        jax.vmap(lambda rate: final(loss=lambda p, t, b: jnp.sum(p["w"] ** 4), optimizer=hg.SGD(rate, 0.5)))(
            jnp.array([0.1, 1e4])
        )


def final_at_rate(rate, adjoint):
    return final(optimizer=hg.SGD(rate, 0.9), adjoint=adjoint)


@pytest.mark.parametrize("second", [jax.grad, jax.jacfwd, jax.jacrev])
def test_differentiating_reversible_twice(second):
    with fails(TypeError, "hg.Reversible", "a second time", "hg.Unrolled()"):
        second(jax.grad(lambda rate: final_at_rate(rate, hg.Reversible())))(0.1)


@pytest.mark.parametrize("adjoint", [hg.Reversible(driver="host"), hg.Truncated(2)], ids=["host", "truncated"])
def test_any_reversal_that_is_differentiated_twice_names_the_cure(adjoint):
    with fails((TypeError, ValueError), "a second time", "hg.Unrolled()") as caught:
        jax.hessian(lambda rate: final_at_rate(rate, adjoint))(0.1)
    assert "hg.Reversible has first" not in str(caught.value)


@pytest.mark.long
def test_unrolled_is_the_cure_for_second_derivatives():
    curvature = jax.grad(jax.grad(lambda rate: final_at_rate(rate, hg.Unrolled())))(0.1)
    assert np.isfinite(curvature) and curvature != 0
