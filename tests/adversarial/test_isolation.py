"""Losses whose gradient XLA:CPU rounds otherwise beside its derivative: they are reversed all the same, at a cost that is
said once."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long
from jax.scipy.ndimage import map_coordinates

import hypergrad as hg
from experiments import _quick
from hypergrad import _programs as programs
from hypergrad._problem import Problem
from hypergrad._set_up import set_up
from hypergrad.adjoints import backward, retry, reversible


class Case(NamedTuple):
    loss: Callable[..., Any]
    params: Any
    theta: float
    data: Any


def convolutions() -> Case:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8, 8, 3)).astype(np.float32)
    y = np.eye(8, dtype=np.float32)[rng.integers(0, 8, 4)]
    shapes = {"a": (3, 3, 3, 4), "b": (3, 3, 4, 8)}
    params = {k: jnp.asarray(rng.normal(size=s) * np.prod(s[:3]) ** -0.5, jnp.float32) for k, s in shapes.items()}

    def layer(x: Any, kernel: Any) -> Any:
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        n, side, _, channels = x.shape
        return jnp.mean(jax.nn.silu(x).reshape(n, side // 2, 2, side // 2, 2, channels), axis=(2, 4))

    def loss(w: Any, theta: Any, batch: Any) -> Any:
        x, y = batch
        logits = jnp.mean(layer(layer(x, w["a"]), w["b"]), axis=(1, 2))
        squares = sum(jnp.sum(x * x) for x in jax.tree.leaves(w))
        return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(logits), axis=1)) + theta * squares

    return Case(loss, params, 1e-2, (x, y))


def turned() -> Case:
    """An input turned by a learned angle."""
    rng = np.random.default_rng(0)
    side = 6
    images, y = rng.normal(size=(3, side, side)).astype(np.float32), rng.normal(size=(3, 2)).astype(np.float32)
    shapes = {"a": (side * side, 8), "b": (8, 2)}
    params = {k: jnp.asarray(rng.normal(size=s) * s[0] ** -0.5, jnp.float32) for k, s in shapes.items()}
    grid = np.stack(np.meshgrid(*[np.arange(side, dtype=np.float32) - (side - 1) / 2] * 2, indexing="ij"))

    def loss(w: Any, angle: Any, batch: Any) -> Any:
        images, y = batch
        c, s = jnp.cos(angle), jnp.sin(angle)
        at = jnp.tensordot(jnp.array([[c, -s], [s, c]]), grid, axes=1) + (side - 1) / 2
        x = jax.vmap(lambda image: map_coordinates(image, list(at), order=1))(images)
        return jnp.mean((jnp.tanh(x.reshape(len(images), -1) @ w["a"]) @ w["b"] - y) ** 2)

    return Case(loss, params, 0.3, (images, y))


STEPS = 3


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """No test profits from what another found out."""
    retry._KNOWN.clear()


@functools.cache
def case(name: str) -> Case:
    return {"convolutions": convolutions, "turned": turned}[name]()


def value(inputs: Any, name: str, **adjoint: Any) -> Any:
    loss, params, _, data = case(name)
    optimizer = hg.SGD(inputs["rate"], 0.75)
    run = hg.train(
        loss, params, optimizer, hg.full_batch(data), theta=inputs["theta"], steps=STEPS, adjoint=hg.Reversible(**adjoint)
    )
    return loss(run.params, 0.0, data)


def inputs(name: str) -> dict[str, Any]:
    return {"rate": 0.1, "theta": case(name).theta}


@functools.cache
def expected(name: str) -> Any:
    gradient = jax.grad(lambda i: value(i, name, isolate=True, driver="scan"))
    return jax.jit(gradient, compiler_options=_quick.OPTIONS)(inputs(name))


def assert_close(ours: Any, theirs: Any) -> None:
    for key in theirs:
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-3, atol=1e-6, err_msg=key)


def told(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it returns, and the warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = jax.block_until_ready(function())
        jax.effects_barrier()
    return result, [str(w.message) for w in caught]


def told_once(function: Callable[[], Any]) -> Any:
    """What it returns, with one warning, which names the cost and the cure."""
    result, texts = told(function)
    assert len(texts) == 1 and "one more gradient a step" in texts[0] and "isolate=True" in texts[0], texts
    return result


@pytest.fixture
def other_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients beside their derivatives have them, on every processor; XLA rounds `convolutions` so on some."""
    products = backward.products

    def rounded(*args: Any, **options: Any) -> Any:
        found, second = products(*args, **options)
        return found._replace(w=[x * (1 + 1e-6) for x in found.w]), second

    monkeypatch.setattr(backward, "products", rounded)
    programs._PROGRAMS.clear()
    yield
    programs._PROGRAMS.clear()
    jax.clear_caches()


@pytest.mark.long
def test_the_scan_takes_the_gradient_apart(other_bits: None) -> None:
    gradient = lambda: jax.grad(lambda i: value(i, "convolutions", driver="scan"))(inputs("convolutions"))  # noqa: E731
    ours = told_once(gradient)
    assert_close(ours, expected("convolutions"))
    assert_close(gradient(), ours)  # what is known needs no second warning: they are errors here


@pytest.mark.long
@pytest.mark.parametrize("transform", [long(lambda f: f, id="eager"), pytest.param(jax.jit, id="jit")])
def test_so_does_a_run_cut_into_segments(transform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reversible, "cut", lambda run, *_: dataclasses.replace(run, first=2, segments=(2,)))
    gradient = transform(jax.grad(lambda i: value(i, "convolutions", memory_budget=1)))
    assert_close(told(lambda: gradient(inputs("convolutions")))[0], expected("convolutions"))


@pytest.mark.long
@pytest.mark.parametrize("isolate", [None, True])
def test_from_python_both_passes_call_one_gradient(isolate: bool | None) -> None:
    assert_close(
        jax.grad(lambda i: value(i, "convolutions", driver="host", isolate=isolate))(inputs("convolutions")),
        expected("convolutions"),
    )


@pytest.mark.long
def test_from_python_gradients_are_taken_apart_too(other_bits: None) -> None:
    gradient = lambda: jax.grad(lambda i: value(i, "turned", driver="host"))(inputs("turned"))  # noqa: E731
    assert_close(told_once(gradient), expected("turned"))
    assert_close(gradient(), expected("turned"))
    with pytest.raises(hg.ReversalError, match="isolate=False"):
        jax.grad(lambda i: value(i, "turned", driver="host", isolate=False))(inputs("turned"))


@pytest.mark.long
def test_what_python_trained_may_be_reversed_by_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """`jax.jacrev` traces the way back alone."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    loss, params, theta, data = case("convolutions")

    def results(rate: Any, adjoint: Any) -> Any:
        run = hg.train(loss, params, hg.SGD(rate), hg.full_batch(data), theta=theta, steps=STEPS, adjoint=adjoint)
        return jnp.stack([jnp.sum(x**2) for x in run.params.values()])

    # An oracle need not have the bits of anything.
    oracle = jax.jit(jax.jacrev(lambda rate: results(rate, hg.Unrolled())), compiler_options=_quick.OPTIONS)
    expected = oracle(0.01)
    np.testing.assert_allclose(jax.jacrev(lambda rate: results(rate, hg.Reversible()))(0.01), expected, rtol=1e-3)


def test_so_does_a_program_of_the_users(other_bits: None) -> None:
    ours = told_once(lambda: jax.jit(jax.grad(lambda i: value(i, "convolutions")))(inputs("convolutions")))
    assert_close(ours, expected("convolutions"))


@pytest.mark.long
def test_so_does_the_meta_loop(other_bits: None) -> None:
    loss, params, _, data = case("convolutions")

    def train_fn(h: Any, key: Any) -> Any:
        batches, adjoint = hg.full_batch(data), hg.Reversible(driver="scan")
        run = hg.train(loss, params, hg.SGD(h["rate"], 0.75), batches, theta=h["theta"], steps=STEPS, adjoint=adjoint)
        return run.params

    arguments = train_fn, lambda w: loss(w, 0.0, data), inputs("convolutions")
    result = told_once(lambda: hg.optimize(*arguments, meta_steps=2))
    assert [step.status.sentence() for step in result.history] == ["", ""]
    assert told_once(lambda: hg.check_gradient(*arguments)).verdict != "disagrees"
    _, gradient = hg.hypergradient(*arguments)  # which the check has done before, so that it is known
    assert_close(gradient, expected("convolutions"))


@pytest.mark.long
def test_who_insists_is_refused_with_the_first_difference(other_bits: None) -> None:
    loss, params, theta, data = case("convolutions")
    arguments: Any = loss, params, hg.SGD(0.1, 0.75), hg.full_batch(data)
    options: dict[str, Any] = {"theta": theta, "steps": STEPS}
    insisting = hg.Reversible(isolate=False, driver="scan")
    with pytest.raises(hg.ReversalError, match="isolate=False"):
        jax.grad(lambda i: value(i, "convolutions", isolate=False, driver="scan"))(inputs("convolutions"))
    refused = hg.check_reversal(*arguments, **options, adjoint=insisting)
    assert not refused.exact
    assert refused.first_mismatch.cause == "derivative" and 0 <= refused.first_mismatch.step < STEPS
    assert refused.first_mismatch.place in {f"{link}['{leaf}']" for link in ("velocity", "params") for leaf in params}
    proof = hg.check_reversal(*arguments, **options, adjoint=hg.Reversible(driver="scan"))
    assert proof.exact and proof.isolated


@pytest.mark.long
def test_an_input_turned_by_a_learned_angle() -> None:
    """Whether its gradient has other bits depends on the processor: apart or not, it is right."""
    gradient = jax.grad(lambda i: value(i, "turned"))
    ours, texts = told(lambda: gradient(inputs("turned")))
    assert len(texts) <= 1
    lanes = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), inputs("turned"))
    batched, _ = told(lambda: jax.jit(jax.vmap(gradient))(lanes))
    for found in (ours, jax.tree.map(lambda x: x[1], batched)):
        assert_close(found, expected("turned"))


@pytest.mark.parametrize(("isolate", "apart"), [(None, True), (False, False), (True, True)])
def test_on_a_gpu_gradients_are_apart_from_the_start(isolate: bool | None, apart: bool, monkeypatch: Any) -> None:
    """On one each program has other kernels for products (docs/performance.md), so beside a derivative none came back."""

    def isolated() -> bool:
        loss = lambda w, _, batch: jnp.sum((w - batch) ** 2)  # noqa: E731
        adjoint = hg.Reversible(isolate=isolate)
        return set_up(Problem(loss, jnp.ones(2), hg.SGD(0.1), hg.full_batch(0.0), steps=3), adjoint)[0].isolate

    assert isolated() == bool(isolate)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert isolated() == apart
