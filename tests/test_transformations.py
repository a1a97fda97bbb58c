"""`train` under every way of calling it: eager, jit, vmap, map; 32 and 64 bits; any tree of parameters; keys; resumed."""

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value, long

import hypergrad as hg


STEPS = 10
RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(12, 3)).astype(np.float32), RNG.normal(size=12).astype(np.float32)
START = RNG.normal(size=3).astype(np.float32)


def loss(w: Any, theta: Any, batch: Any) -> jax.Array:
    x, y = (jnp.asarray(a, w.dtype) for a in batch)
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2) + jnp.sum(theta * w**2)


def value(learning_rate: Any, momentum: Any, key: jax.Array, dtype: Any = jnp.float32, **options: Any) -> jax.Array:
    w = jnp.asarray(START, dtype)
    batches = hg.minibatches(DATA, 4, key, replacement=True)
    arguments = {"theta": 0.01 * jnp.ones_like(w), "steps": STEPS, **options}
    return jnp.sum(hg.train(loss, w, hg.SGD(learning_rate, momentum), batches, **arguments).params ** 2)


def value_and_gradients(learning_rate: Any, momentum: Any, key: jax.Array) -> Any:
    dtype = jnp.result_type(learning_rate)
    return jax.value_and_grad(value, argnums=(0, 1))(learning_rate, momentum, key, dtype)


def assert_close(got: Any, expected: Any, rtol: float = 2e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol), got, expected)


@pytest.fixture(params=["float64", long("float32 under x64")])
def numbers(request: pytest.FixtureRequest) -> Any:
    """(learning rates, momenta, keys) of three runs, in a type and under a setting of jax_enable_x64."""
    with jax.enable_x64(request.param != "float32"):
        dtype = jnp.dtype(request.param.split()[0])
        yield (
            jnp.asarray([0.1, 0.3, 0.5], dtype),
            jnp.asarray([0.5, 0.9, 0.7], dtype),
            jax.random.split(jax.random.key(7), 3),
        )


@pytest.mark.long
@pytest.mark.of_bits
def test_every_way_of_calling_gives_the_same(numbers: Any) -> None:
    rates, momenta, keys = numbers
    alone = [value_and_gradients(*lane) for lane in zip(*numbers, strict=True)]
    assert all(x.dtype == rates.dtype for x in jax.tree.leaves(alone))
    tolerance = 2e-5 if rates.dtype == jnp.float32 else 1e-9
    assert_close(jax.jit(value_and_gradients)(rates[1], momenta[1], keys[1]), alone[1], tolerance)
    together = jax.jit(jax.vmap(value_and_gradients))(*numbers)
    assert_close(together, jax.tree.map(lambda *x: jnp.stack(x), *alone), tolerance)


@pytest.mark.parametrize("adjoint", [hg.Reversible(), long(hg.Reversible(buffer="host")), long(hg.Truncated(STEPS))])
def test_rows_of_a_jacobian_outside_of_jit_at_a_python_number(adjoint: Any) -> None:
    """JAX hands it on as it is, and the rows are batched on the way back."""

    def end(penalty: Any) -> Any:
        batches = hg.full_batch(DATA)
        return hg.train(loss, START, hg.SGD(0.1, 0.5), batches, theta=penalty, steps=STEPS, adjoint=adjoint).params

    assert_close(jax.jacrev(end)(0.01), jax.jacrev(end)(jnp.float32(0.01)))


@pytest.mark.long
@pytest.mark.of_bits
def test_vmap_outside_of_jit_and_map_give_the_same() -> None:
    lanes = jnp.array([0.1, 0.3]), jnp.array([0.5, 0.9]), jax.random.split(jax.random.key(7), 2)
    mapped = jax.lax.map(lambda lane: value_and_gradients(*lane), lanes)
    assert_close(jax.vmap(value_and_gradients)(*lanes), mapped)


@pytest.mark.long
@pytest.mark.of_bits
def test_vmap_over_keys_or_over_hyperparameters_alone() -> None:
    rates, momentum, keys = jnp.array([0.1, 0.3]), jnp.float32(0.9), jax.random.split(jax.random.key(7), 2)
    both = jax.jit(jax.vmap(jax.vmap(value_and_gradients, (None, None, 0)), (0, None, None)))(rates, momentum, keys)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        one = jax.jit(value_and_gradients)(rates[i], momentum, keys[j])
        assert_close(jax.tree.map(lambda x, i=i, j=j: x[i, j], both), one)


@pytest.mark.long
@pytest.mark.of_bits
def test_isolated_gradients_give_the_same() -> None:
    lane = jnp.float32(0.3), jnp.float32(0.9), jax.random.key(7)
    one = lambda isolate: jax.grad(lambda *a: value(*a, adjoint=hg.Reversible(isolate=isolate)), (0, 1))(*lane)  # noqa: E731
    assert_close(one(True), one(False))


@pytest.mark.long
def test_one_lane_that_fails_leaves_the_others() -> None:
    rates = jnp.array([0.1, 1e9])
    values = jax.jit(jax.vmap(lambda a: value(a, 0.9, jax.random.key(7), throw=False)))(rates)
    assert_close(values[0], value(rates[0], 0.9, jax.random.key(7)))
    assert jnp.isnan(values[1])


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp
from test_transformations import value_and_gradients
arguments = jnp.float32(0.3), jnp.float32(0.9), jax.random.key(7)
results = jax.tree.leaves(jax.jit(value_and_gradients)(*arguments))
print(json.dumps([jax.config.jax_enable_x64, [x.dtype.name for x in results], [float(x) for x in results]]))
"""


@pytest.mark.long
def test_a_process_with_x64_gives_the_same() -> None:
    arguments = [sys.executable, "-W", "error::UserWarning", "-c", SCRIPT, os.path.dirname(__file__)]
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    x64, dtypes, results = json.loads(done.stdout)
    assert x64 is True
    assert dtypes == ["float32"] * 3
    here = jax.jit(value_and_gradients)(jnp.float32(0.3), jnp.float32(0.9), jax.random.key(7))
    assert_close(results, [float(x) for x in jax.tree.leaves(here)])


@every_value("adjoint, x64", [hg.Reversible(), hg.Unrolled()], [False, True])
def test_the_loss_runs_under_the_setting_of_the_caller(adjoint: Any, x64: bool) -> None:
    seen = set()

    def watching(w: Any, theta: Any, batch: Any) -> jax.Array:
        seen.add(("loss", jnp.arange(2.0).dtype.name, jnp.arange(2).dtype.name, batch.dtype.name))
        return jnp.sum((w - batch) ** 2)

    def batches(t: jax.Array) -> jax.Array:
        seen.add(("batch", t.dtype.name))
        return jnp.linspace(0.0, 1.0, 3)

    with jax.enable_x64(x64):
        function = lambda a: jnp.sum(hg.train(watching, jnp.ones(3), hg.SGD(a), batches, steps=2, adjoint=adjoint).params)  # noqa: E731
        jax.grad(function)(0.1)
    bits = 64 if x64 else 32
    assert seen == {("loss", f"float{bits}", f"int{bits}", f"float{bits}"), ("batch", "int32")}
    assert jax.config.jax_enable_x64 is False


def test_narrow_parameters_keep_their_type() -> None:
    def run(learning_rate: Any, dtype: Any) -> hg.Trained:
        w = jnp.asarray(START, dtype)
        batches = hg.full_batch(DATA)
        return hg.train(loss, w, hg.SGD(learning_rate), batches, theta=0.01 * jnp.ones_like(w), steps=STEPS)

    def squared(learning_rate: Any, dtype: Any) -> Any:
        trained = run(learning_rate, dtype)
        return jnp.sum(trained.params.astype(jnp.float32) ** 2), trained

    (_, trained), gradient = jax.value_and_grad(squared, has_aux=True)(0.3, jnp.bfloat16)
    assert trained.params.dtype == jnp.bfloat16
    assert trained.losses.dtype == jnp.bfloat16
    assert trained.state["velocity"].dtype == jnp.float32
    (_, exact), expected = jax.value_and_grad(squared, has_aux=True)(0.3, jnp.float32)
    np.testing.assert_allclose(trained.params.astype(jnp.float32), exact.params, atol=0.03)
    np.testing.assert_allclose(gradient, expected, rtol=0.1)


def test_no_64_bit_integer_leaves_the_library() -> None:
    run = lambda: hg.train(loss, jnp.asarray(START), hg.SGD(0.3), hg.full_batch(DATA), theta=0.1, steps=STEPS)  # noqa: E731
    for trained in (run(), jax.jit(run)()):
        assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves(trained))


class Layer(NamedTuple):
    weight: Any
    bias: Any


def assert_learns(params: Any, apply: Any) -> None:
    """Training moves every leaf and keeps the tree, and so does its derivative."""

    def final(params: Any, learning_rate: Any) -> Any:
        mean_square = lambda p, _, batch: jnp.mean((apply(p, batch[0]) - batch[1]) ** 2)  # noqa: E731
        trained = hg.train(mean_square, params, hg.SGD(learning_rate), hg.full_batch(DATA), steps=STEPS)
        return mean_square(trained.params, None, DATA), trained

    (last, trained), gradient = jax.jit(jax.value_and_grad(final, has_aux=True))(params, 0.1)
    assert last < trained.losses[0]
    for tree in (trained.params, trained.state["velocity"], gradient):
        assert jax.tree.structure(tree) == jax.tree.structure(params)
        assert all(jnp.any(x != 0) for x in jax.tree.leaves(tree))


@pytest.mark.long
def test_a_named_tuple_and_a_nested_dict_with_none_are_parameters() -> None:
    params = {
        "hidden": Layer(jnp.ones((3, 2)), None),
        "out": [{"weight": jnp.ones(2)}, None, ()],
        "offset": jnp.float32(0.1),
    }
    apply = lambda p, x: jnp.tanh(x @ p["hidden"].weight) @ p["out"][0]["weight"] + p["offset"]  # noqa: E731
    assert_learns(params, apply)


@pytest.mark.long
def test_a_partitioned_module_is_parameters() -> None:
    model = eqx.nn.MLP(3, "scalar", 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    assert_learns(params, lambda p, x: jax.vmap(eqx.combine(p, static))(x))


@pytest.mark.of_bits
@pytest.mark.parametrize(("dtype", "tolerance"), [long("float32", 1e-6), ("float64", 1e-9)])
def test_a_run_resumed_is_one_run(dtype: str, tolerance: float) -> None:
    """Up to the digits of the grid: what the first part's buffer held is gone."""
    drawn = np.random.default_rng(1).integers(0, 12, (STEPS, 4))
    rows = jax.tree.map(lambda x: x[drawn], DATA)

    def run(w: Any, part: slice, state: Any = None) -> hg.Trained:
        batches = hg.stacked(jax.tree.map(lambda x: x[part], rows))
        return hg.train(loss, w, hg.SGD(0.3, 0.8), batches, theta=jnp.full_like(w, 0.01), state=state)

    with jax.enable_x64(dtype == "float64"):
        w = jnp.asarray(START, dtype)
        once, half = run(w, slice(None)), run(w, slice(4))
        rest = run(half.params, slice(4, None), half.state)
    losses = jnp.concatenate([half.losses, rest.losses])
    for x, y in ((rest.params, once.params), (rest.state["velocity"], once.state["velocity"]), (losses, once.losses)):
        np.testing.assert_allclose(x, y, atol=tolerance)


@pytest.mark.long
def test_typed_and_legacy_keys_draw_the_same_batches() -> None:
    """To rounding: they are two programs. Other batches are far away."""
    typed, legacy, other = jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(4)
    results = [jax.jit(value_and_gradients)(jnp.float32(0.3), jnp.float32(0.9), key) for key in (typed, legacy, other)]
    assert_close(*results[:2])
    assert abs(results[2][0] / results[0][0] - 1) > 1e-3
