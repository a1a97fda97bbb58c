"""The meta-loop: descent, one compilation, history, callbacks, and the same numbers as JAX by hand."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import network

import hypergrad as hg


STEPS = 12
NETWORK = network("tanh")


class Counted:
    """A train function that counts how often it is traced or called."""

    def __init__(self, adjoint=None):
        self.calls, self.adjoint = 0, adjoint or hg.Reversible()

    def __call__(self, hypers, key):
        self.calls += 1
        params = jax.tree.map(lambda w: hypers["scale"] * w, NETWORK.params())
        sgd = hg.SGD(hypers["rate"], hypers["momentum"])
        batches = hg.minibatches(NETWORK.data, 8, key)
        return hg.train(NETWORK.loss, params, sgd, batches, theta=NETWORK.theta(), steps=STEPS, adjoint=self.adjoint).params


def hypers(momentum=0.8):
    return {
        "rate": hg.positive(hg.PerStep(jnp.full(STEPS, 0.1))),
        "momentum": hg.unit_interval(momentum),
        "scale": 1.0,
    }


def test_the_value_falls_and_history_tells():
    result = hg.optimize(Counted(), NETWORK.value, hypers(), meta_steps=15, meta_optimizer=optax.adam(0.1))
    values = [step.value for step in result.history]
    assert values[-1] < 0.9 * values[0]
    assert [step.step for step in result.history] == list(range(15))
    assert result.best.value == min(values)
    assert all(step.gradient_norm > 0 and step.seconds > 0 for step in result.history)
    assert 0.2 < result.history[0].bits_per_parameter_step < 0.7  # log2(1/0.8) = 0.32 and the head
    assert bool(result.history[-1].status.ok)
    assert hg.natural(result.hypers)["rate"].values.shape == (STEPS,)


def test_all_meta_steps_share_one_compilation():
    train_fn = Counted()
    hg.optimize(train_fn, NETWORK.value, hypers(), meta_steps=4)
    assert train_fn.calls == 1


def test_a_full_buffer_costs_one_compilation_more():
    train_fn = Counted()  # log2(1/0.001) = 10 bits a step, against one provided for
    result = hg.optimize(train_fn, NETWORK.value, hypers(0.001), meta_steps=3)
    assert train_fn.calls == 2
    assert len(result.history) == 3 and int(result.history[0].status.words) > 1


def test_meta_step_i_uses_the_key_folded_with_i():
    key = jax.random.key(5)
    result = hg.optimize(Counted(), NETWORK.value, hypers(), meta_steps=2, key=key, meta_optimizer=optax.sgd(0.0))
    for i, step in enumerate(result.history):
        value, _ = hg.hypergradient(Counted(), NETWORK.value, hypers(), jax.random.fold_in(key, i))
        assert step.value == pytest.approx(float(value), rel=1e-5)


def test_hypergradient_is_jax_grad_in_stored_coordinates():
    key = jax.random.key(0)
    value, grads = hg.hypergradient(Counted(), NETWORK.value, hypers(), key)

    def f(stored):
        return NETWORK.value(Counted()(hg.natural(stored), key))

    stored = {**hypers(), "scale": jnp.float32(1.0)}
    expected_value, expected = jax.jit(jax.value_and_grad(f))(stored)
    assert float(value) == pytest.approx(float(expected_value), rel=1e-5)
    for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-3, atol=1e-6)


def test_fixed_hypers_stay_and_have_zero_gradient():
    given = {**hypers(), "momentum": hg.fixed(0.8)}
    _, grads = hg.hypergradient(Counted(), NETWORK.value, given)
    assert float(grads["momentum"].unconstrained) == 0
    result = hg.optimize(Counted(), NETWORK.value, given, meta_steps=2, meta_optimizer=optax.adamw(0.1))
    assert hg.natural(result.hypers)["momentum"] == np.float32(0.8)


def test_any_optax_chain_works():
    chain = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(optax.cosine_decay_schedule(0.1, 3)))
    assert len(hg.optimize(Counted(), NETWORK.value, hypers(), meta_steps=3, meta_optimizer=chain).history) == 3


def test_without_jit_a_host_driver_works_and_agrees():
    slow = hg.optimize(Counted(hg.Reversible(driver="host")), NETWORK.value, hypers(), meta_steps=2, jit=False)
    fast = hg.optimize(Counted(), NETWORK.value, hypers(), meta_steps=2)
    assert [s.value for s in slow.history] == pytest.approx([s.value for s in fast.history], rel=1e-4)


def test_a_true_callback_stops():
    seen = []
    stop = lambda done: seen.append(done.step) or done.step == 1  # noqa: E731
    result = hg.optimize(Counted(), NETWORK.value, hypers(), meta_steps=9, callbacks=[stop])
    assert seen == [0, 1] and len(result.history) == 2


def test_progress_and_json_lines(tmp_path):
    shown, path = io.StringIO(), tmp_path / "run.jsonl"
    callbacks = [hg.callbacks.Progress(shown), hg.callbacks.JsonLines(path)]
    result = hg.optimize(Counted(), NETWORK.value, hypers(), meta_steps=2, callbacks=callbacks)
    assert shown.getvalue().count("meta-step") == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["value"] for line in lines] == [step.value for step in result.history]
    assert [line["status"] for line in lines] == [0, 0]


@pytest.mark.parametrize(
    "norms, stops",
    [
        ([1, 0.5, 6, 6], [False, False, False, True]),
        ([1, 20, 1, 20], [False] * 4),
        ([1, np.nan, np.nan], [False, False, True]),
    ],
)
def test_stop_on_growth(norms, stops):
    callback = hg.callbacks.StopOnGrowth(factor=10, patience=2)
    steps = [hg.MetaStep(i, 0.0, float(n), 0.0, None, 0.0, None) for i, n in enumerate(norms)]
    assert [callback(step) for step in steps] == stops
