"""Reversal is exact: for each kind of network, eagerly, under jit and vmap; and the certificate notices when it is not."""

import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from problems import NETWORKS, Network, network

import hypergrad as hg
from experiments import _data
from experiments.quickstart import Config, Experiment
from hypergrad import _check
from hypergrad.adjoints import reversible
from hypergrad.exact import Deferred, Fixed, HeadsAndWords, Words
from hypergrad.exact.buffers import Mark
from hypergrad.optimizers import block


STEPS = 300
KINDS = tuple(name for name in NETWORKS if name != "tanh")
MOMENTUM = np.random.default_rng(0).uniform(0.5, 0.995, STEPS).astype(np.float32)


def sgd(learning_rate: Any = 0.2) -> hg.SGD:
    return hg.SGD(learning_rate, hg.PerStep(jnp.asarray(MOMENTUM)))


@pytest.mark.of_bits
@some_of("name", KINDS, "relu")
def test_training_runs_backwards_to_its_first_bits(name: str) -> None:
    net = network(name)
    certificate = hg.check_reversal(net.loss, net.params(), sgd(), net.batches(STEPS), theta=net.theta())
    assert certificate.exact
    assert certificate.first_mismatch is None
    ideal = -np.log2(np.round(MOMENTUM * 2.0**16) / 2**16).sum()
    assert certificate.ideal_bits_per_parameter_step * STEPS == pytest.approx(ideal, rel=1e-5)
    assert certificate.bits_per_parameter_step * STEPS == pytest.approx(ideal, rel=1e-5)


def value_after(net: Network, learning_rate: jax.Array, theta: Any, key: jax.Array) -> jax.Array:
    trained = hg.train(net.loss, net.params(), sgd(learning_rate), net.drawn(key, STEPS), theta=theta)
    return net.value(trained.params)


@pytest.mark.long
@pytest.mark.of_bits
@some_of(
    ("name", "lanes"),
    [*((name, 2) for name in KINDS), ("convolution", 0), ("relu", 0)],
    ("relu", 2),
)
def test_the_certificate_holds_in_compiled_gradients(name: str, lanes: int) -> None:
    """A reversal that is not exact raises from compiled code, and its gradient is NaN."""
    net, key = network(name), jax.random.key(3)
    gradient = jax.grad(functools.partial(value_after, net), argnums=(0,) if lanes else (0, 1))
    if lanes:
        gradient, key = jax.vmap(gradient, (None, None, 0)), jax.random.split(key, lanes)
    gradients = jax.jit(gradient)(jnp.float32(0.2), net.theta(), key)
    assert all(jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients))


def final(size: int, optimizer: Any, adjoint: Any) -> jax.Array:
    """Of a loss that a compiler approximates."""

    def loss(w: jax.Array, _: Any, t: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(1.3 * w + 0.1 * t) ** 2)

    start = jnp.linspace(-1, 1, size)
    return jnp.sum(hg.train(loss, start, optimizer, lambda t: t, steps=60, adjoint=adjoint).params ** 2)


@pytest.mark.long
@pytest.mark.of_bits
@some_of(("size", "isolate"), [(1, False), (8, True), (1, True), (8, False)], (8, True))
def test_a_few_weights_come_back(size: int, isolate: bool) -> None:
    """XLA:CPU would compile so small a loop as one function, and contract across its branches."""
    gradient = jax.grad(lambda rate: final(size, hg.SGD(rate), hg.Reversible(isolate=isolate)))
    expected = jax.jit(jax.grad(lambda rate: final(size, hg.SGD(rate), hg.Unrolled())))(0.1)
    for options in ({}, hg.compiler_options()):
        np.testing.assert_allclose(jax.jit(gradient, compiler_options=options)(0.1), expected, rtol=1e-3)
    np.testing.assert_allclose(jax.jit(jax.vmap(gradient))(jnp.array([0.1, 0.2]))[0], expected, rtol=1e-3)


# From here on, one matrix is trained for a few steps, and not always honestly.

DATA = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
INPUTS = ("params", "velocity", "learning_rate", "momentum", "theta")


def loss(w: jax.Array, theta: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ w - 1) ** 2) + jnp.sum(theta * w**2)


def gradients(batches: Callable[[Any], Any], *inputs: str, momentum: Any = 0.9, **options: Any) -> Any:
    """Of the sum of the trained weights, in some of `INPUTS`; compiled, each time anew."""

    def function(w: Any, velocity: Any, learning_rate: Any, momentum: Any, theta: Any) -> jax.Array:
        optimizer, state = hg.SGD(learning_rate, momentum), {"velocity": velocity}
        fresh = lambda *arguments: loss(*arguments)  # noqa: E731
        return jnp.sum(hg.train(fresh, w, optimizer, batches, theta=theta, state=state, steps=3, **options).params)

    w = jnp.ones(3)
    argnums = tuple(INPUTS.index(name) for name in inputs)
    return jax.grad(jax.jit(function), argnums)(w, w / 10, jnp.float32(0.1), jnp.float32(momentum), w / 100)


def changing() -> Callable[[Any], Any]:
    """Another batch each time, which no program tells: the data come from Python while it runs."""
    calls, like = itertools.count(1), jax.ShapeDtypeStruct(DATA.shape, DATA.dtype)
    return lambda t: jax.pure_callback(lambda t: DATA * np.float32(next(calls)), like, t)


def assert_all_nan(tree: Any) -> None:
    assert all(jnp.all(jnp.isnan(x)) for x in jax.tree.leaves(tree))


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing compiled before a patch is used under it, nor the other way round."""
    jax.clear_caches()
    yield monkeypatch
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.long
def test_a_batch_function_that_changes_is_found_out() -> None:
    certificate = hg.check_reversal(loss, jnp.ones(3), hg.SGD(0.1), changing(), theta=jnp.ones(3), steps=3)
    assert not certificate.exact
    assert certificate.first_mismatch.cause == "batch"
    assert certificate.first_mismatch.step == 2


@pytest.mark.long
def test_a_batch_function_that_changes_has_no_gradient() -> None:
    function = lambda a: jnp.sum(hg.train(loss, jnp.ones(3), hg.SGD(a), changing(), theta=jnp.ones(3), steps=3).params)  # noqa: E731
    with pytest.raises(hg.ReversalError, match="the reversed run saw other batches than the training.*pure function of t"):
        jax.grad(function)(0.1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="hypergrad.ReversalError: the reversed run saw other batches"):
        jax.block_until_ready(gradients(changing(), "params"))


@pytest.mark.of_bits
def test_an_honest_run_has_finite_gradients() -> None:
    assert all(jnp.all(jnp.isfinite(g)) for g in gradients(hg.full_batch(DATA), *INPUTS, throw=False))


@some_of("inputs", [INPUTS, *((name,) for name in INPUTS)], INPUTS, ids=" ".join)
def test_every_gradient_is_nan_when_reversal_fails(inputs: tuple[str, ...]) -> None:
    """Each alone too: a check tied to one gradient would be dead code where only another is asked for."""
    assert_all_nan(gradients(changing(), *inputs, throw=False))


@pytest.mark.parametrize("masked", [long(0, id="values"), pytest.param(1, id="hyperparameters"), long(2, id="theta")])
def test_a_flag_tied_to_some_gradients_is_caught(masked: int, patch: pytest.MonkeyPatch) -> None:
    mask = reversible.mask
    lying = lambda ok, tree: tuple(mask(ok, x) if i == masked else x for i, x in enumerate(tree))  # noqa: E731
    patch.setattr(reversible, "mask", lying)
    with pytest.raises(AssertionError):
        assert_all_nan(gradients(changing(), *INPUTS, throw=False))


def test_an_inverse_off_by_a_quantum_is_caught(patch: pytest.MonkeyPatch) -> None:
    subtract = Fixed.subtract

    def lying(self: Fixed, *arguments: Any) -> Fixed:
        right = subtract(self, *arguments)
        return right._replace(high=right.high + 1)

    patch.setattr(Fixed, "subtract", lying)
    with pytest.raises(AssertionError, match="unstep did not undo step 2: .* off by up to 1 quanta"):
        hg.testing.check_inverse(hg.SGD(0.1), steps=3)
    assert_all_nan(gradients(hg.full_batch(DATA), *INPUTS, throw=False))
    assert not hg.check_reversal(loss, jnp.ones(3), hg.SGD(0.1), hg.full_batch(DATA), theta=jnp.ones(3), steps=3).exact


@pytest.mark.parametrize("momentum", [long(2.0**-16, id="shared"), pytest.param(np.full(3, 0.9), id="per weight")])
def test_a_digit_lost_by_the_buffer_is_caught(patch: pytest.MonkeyPatch, momentum: Any) -> None:
    def lossy(digits: Any) -> Any:
        if isinstance(digits, Words):
            return Words(None if digits.stack is None else digits.stack ^ 1)
        return digits._replace(head=digits.head & ~1)

    for name, kind in (("DEFERRED", Deferred), ("HEADS", HeadsAndWords)):

        class Lossy(kind):  # type: ignore[misc,valid-type]
            def multiply_by(self, *arguments: Any) -> Any:
                digits, value = super().multiply_by(*arguments)
                return lossy(digits), value

        patch.setattr(block, name, Lossy())
    assert_all_nan(gradients(hg.full_batch(DATA), *INPUTS, momentum=momentum, throw=False))


@pytest.mark.long
@pytest.mark.of_bits
def test_a_hundred_seeds_at_once_come_back() -> None:
    """Batched, the gradient inside the jvp of this network has other bits than in the forward pass: it is isolated there."""
    experiment = Experiment(Config(steps=3, hidden=(16, 16)), _data.load("digits", 0))
    hypers = experiment.hypers(0.5)

    def value(hypers: Any, key: Any) -> jax.Array:
        arguments, options = experiment.arguments(hg.natural(hypers), key)
        return experiment.val_fn(hg.train(*arguments, **options, throw=False).params)

    keys = jax.random.split(jax.random.key(0), 100)
    gradients = jax.jit(jax.vmap(jax.grad(value), in_axes=(None, 0)))(hypers, keys)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_bits_in_buffers_are_counted_beyond_32_bits() -> None:
    """Of 2^28 weights with nine words each."""
    link = SimpleNamespace(name="velocity", decay="momentum")
    buffer = SimpleNamespace(length=lambda digits, words: 16 * words)
    block = SimpleNamespace(chain=[link], buffer=lambda link: buffer)
    run = SimpleNamespace(blocks=[block], shared=[(0,)], steps=100, parameters=(0,))
    size = SimpleNamespace(size=2**28)
    plan, end = [SimpleNamespace(end=Mark(None, jnp.int32(9)))], [{"velocity": SimpleNamespace(digits=None)}]
    found = _check._content(run, SimpleNamespace(values=[{"velocity": size, "params": size}]), plan, end)
    np.testing.assert_allclose(found, 16 * 9 / 100, rtol=1e-6)
