"""A run that did not come back has no numbers: every float is NaN, of whatever dtype, wherever nobody raises."""

import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from hypothesis import example, given
from hypothesis import strategies as st

import hypergrad as hg
from hypergrad import _programs as programs
from hypergrad.run.forward import same_losses
from hypergrad.run.step import Slot


W = jnp.array([1.0, 2.0, 3.0])
THETAS = {
    "float32": jnp.float32(1.0),
    "float16": jnp.float16(1.0),
    "bfloat16": jnp.bfloat16(1.0),
    "complex64": jnp.complex64(1.0 + 2.0j),
}


def eagerly(function: Any) -> Any:
    return function


WAYS = (eagerly, jax.jit)


def another() -> Callable[[], np.ndarray]:
    rng = np.random.default_rng(0)
    return lambda *_: rng.normal(size=3).astype(np.float32)


def changing() -> Callable[[Any], Any]:
    """Another batch each time."""
    return lambda t, load=another(): jax.pure_callback(load, jax.ShapeDtypeStruct((3,), jnp.float32), t)  # noqa: B008


def loss(w: Any, theta: Any, batch: Any) -> Any:
    wide = theta.astype(jnp.complex64 if jnp.iscomplexobj(theta) else jnp.float32)
    return jnp.sum(jnp.abs(w - wide * batch) ** 2)


@some_of(("name", "compile"), list(itertools.product(THETAS, WAYS)), ("complex64", jax.jit))
def test_no_number_of_a_run_that_failed(name: str, compile: Any) -> None:
    def f(theta: Any) -> Any:
        return jnp.sum(hg.train(loss, W, hg.SGD(0.1, 0.5), changing(), theta=theta, steps=4, throw=False).params)

    gradient = compile(jax.grad(f))(THETAS[name])
    assert gradient.dtype == THETAS[name].dtype and jnp.isnan(gradient)


@some_of("name", THETAS, "bfloat16")
def test_it_raises_from_compiled_code(name: str) -> None:
    def f(theta: Any) -> Any:
        return jnp.sum(hg.train(loss, W, hg.SGD(0.1, 0.5), changing(), theta=theta, steps=4).params)

    with pytest.raises(jax.errors.JaxRuntimeError, match="hypergrad.ReversalError"):
        jax.block_until_ready(jax.jit(jax.grad(f))(THETAS[name]))


def test_the_meta_loop_is_told() -> None:
    def train_fn(h: Any, key: Any) -> Any:
        theta = h["re"] + 1j * h["im"]
        return hg.train(loss, W, hg.SGD(0.1, 0.5), changing(), theta=theta, steps=4).params

    with pytest.raises(hg.ReversalError):
        hg.optimize(train_fn, jnp.sum, {"re": 1.0, "im": 2.0}, meta_steps=1)


def augmented(w: Any, strength: Any, noise: Any) -> Any:
    """At strength 0 all batches have one gradient and one loss."""
    return jnp.sum((w * W + strength * noise - 1) ** 2)


def saddle(w: Any, theta: Any, batch: Any) -> Any:
    """Weights at zero do not move, and have one gradient whatever the batch; the loss differs."""
    return jnp.mean((w[0] * w[1] * W + 0 * theta - batch) ** 2)


IMPURE = {"strength": (augmented, jnp.zeros(3)), "saddle": (saddle, jnp.zeros(2))}


@some_of(("name", "compile"), list(itertools.product(IMPURE, WAYS)), ("strength", eagerly))
def test_batches_that_change_where_no_gradient_does(name: str, compile: Any) -> None:
    function, params = IMPURE[name]

    def f(w: Any, theta: Any) -> Any:
        return jnp.sum(hg.train(function, w, hg.SGD(0.05, 0.5), changing(), theta=theta, steps=3, throw=False).params)

    assert all(jnp.isnan(x).all() for x in compile(jax.grad(f, (0, 1)))(params, 0.0))
    lying = hg.check_reversal(function, params, hg.SGD(0.05, 0.5), changing(), theta=0.0, steps=3)
    assert not lying.exact and lying.first_mismatch.cause == "batch" and lying.first_mismatch.step == 2


@pytest.mark.parametrize("compile", [eagerly, long(jax.jit)])
def test_a_loss_that_changes_where_its_gradient_does_not(compile: Any) -> None:
    load = another()

    def impure(w: Any, theta: Any, batch: Any) -> Any:
        noise = jax.pure_callback(load, jax.ShapeDtypeStruct((3,), jnp.float32))
        return jnp.mean((w[0] * w[1] * W - noise) ** 2)

    def f(w: Any) -> Any:
        run = hg.train(impure, w, hg.SGD(0.05, 0.5), hg.full_batch(W), steps=3, throw=False)
        return run.params @ jnp.array([1.0, 2.0])

    assert jnp.isnan(compile(jax.grad(f))(jnp.zeros(2))).all()
    assert not hg.check_reversal(impure, jnp.zeros(2), hg.SGD(0.05, 0.5), hg.full_batch(W), steps=3).exact


@given(loss=st.floats(2.0**-96, 2.0**127, width=32), last=st.integers(-32, 32))
@example(loss=0.0, last=0)
def test_the_last_bits_of_a_loss_may_differ(loss: float, last: int) -> None:
    again = np.float32(loss) * np.float32(1 + last * 2.0**-23)
    assert same_losses(jnp.float32(loss), again) and same_losses(jnp.float32(-loss), -again)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_no_more_of_a_loss_may_differ(dtype: str) -> None:
    with jax.enable_x64(True):
        eps = float(jnp.finfo(dtype).eps)
        ones, nan = jnp.ones(3, dtype), jnp.array([jnp.nan, 1, 1], dtype)
        for apart, most in ((True, min(64 * eps, eps**0.5)), (False, eps**0.5)):
            near, far = (ones.at[1].add(-factor * most) for factor in (0.5, 2))
            assert same_losses(ones, near, apart).all()
            assert same_losses(ones, far, apart).tolist() == [True, False, True]
            assert same_losses(nan, nan, apart).tolist() == [False, True, True]


ROUNDED, OTHER = 2.0**-48, 1e-9  # what a kernel of XLA's may differ by in two passes, and what none does


def drifting(change: float) -> Callable[[Any, Any], Any]:
    """A loss with a constant that grows by `change` of itself each time; its gradient does not."""
    count = itertools.count()
    shape = jax.ShapeDtypeStruct((), jnp.float64)

    def function(w: Any, _: Any, batch: Any) -> Any:
        one = jax.pure_callback(lambda _: np.float64(1.0 + next(count) * change), shape, jnp.float64(0.0))
        return jnp.sum((w - batch) ** 4) + jax.lax.stop_gradient(one)

    return function


@pytest.mark.long
@pytest.mark.parametrize("compile", [eagerly, long(jax.jit)])
@pytest.mark.parametrize(("change", "same"), [(ROUNDED, True), long(OTHER, False)])
def test_losses_that_differ_in_their_last_bits_are_the_same(change: float, same: bool, compile: Any) -> None:
    """Where gradients are computed apart from their derivatives: whether the state came back is told by its own bits."""
    with jax.enable_x64(True):
        data, w = jnp.asarray(W, jnp.float64), jnp.zeros(3, jnp.float64)

        def end(w: Any, function: Any, adjoint: Any, throw: bool = True) -> Any:
            run = hg.train(function, w, hg.Adam(0.1), hg.full_batch(data), steps=3, adjoint=adjoint, throw=throw)
            return jnp.sum(run.params**2)

        found = compile(jax.grad(lambda w: end(w, drifting(change), hg.Reversible(), throw=False)))(w)
        if same:
            np.testing.assert_allclose(found, jax.grad(lambda w: end(w, drifting(0.0), hg.Unrolled()))(w), rtol=1e-9)
        else:
            assert jnp.isnan(found).all()
            with pytest.raises(hg.ReversalError, match="losses"):
                jax.grad(lambda w: end(w, drifting(change), hg.Reversible()))(w)
        certificate = hg.check_reversal(drifting(change), w, hg.Adam(0.1), hg.full_batch(data), steps=3)
        assert certificate.exact == same
        assert same or (certificate.first_mismatch.cause, certificate.first_mismatch.place) == ("loss", "the losses")


@pytest.mark.parametrize("change", [ROUNDED, OTHER])
def test_a_record_goes_back_over_losses_of_other_last_bits(change: float, tmp_path: pathlib.Path) -> None:
    """It takes no loss that calls Python, which could drift: so what training saw is changed."""
    with jax.enable_x64(True):
        w, batches = jnp.ones(3, jnp.float64), hg.full_batch(jnp.asarray(W))
        loss = lambda w, _, batch: jnp.sum((w - batch) ** 4)  # noqa: E731
        record = hg.record(loss, w, hg.Adam(0.1), batches, steps=3, folder=tmp_path / "record")
        record._end = record._end._replace(losses=record._end.losses.at[1].multiply(1 + change))
        if change == ROUNDED:
            np.testing.assert_array_equal(record.rewind(0).params, w)
        else:
            with pytest.raises(hg.ReversalError, match="does not lead back to step 0"):
                record.rewind(0)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing compiled before a lie is used under it, nor the other way round."""
    for forget in (jax.clear_caches, programs._PROGRAMS.clear):
        forget()
    yield monkeypatch
    monkeypatch.undo()
    for forget in (jax.clear_caches, programs._PROGRAMS.clear):
        forget()


@pytest.mark.parametrize("derivatives", [True, False], ids=["beside derivatives", "alone"])
def test_a_quantum_lost_in_one_reversal_of_two(derivatives: bool, patch: pytest.MonkeyPatch) -> None:
    """`check_reversal` undoes a run twice, without derivatives and with them: a lie in either is found."""
    from hypergrad import _check
    from hypergrad.adjoints import link

    def off(slot: Slot) -> Slot:
        return slot._replace(value=slot.value._replace(high=slot.value.high + 1))

    if derivatives:
        retreat = link.retreat
        patch.setattr(link, "retreat", lambda b, k, *a: off(retreat(b, k, *a)) if k.decay else retreat(b, k, *a))
    else:
        unstep = _check.unstep
        patch.setattr(_check, "unstep", lambda *a: [own | {"velocity": off(own["velocity"])} for own in unstep(*a)])
    options: Any = {"theta": jnp.float32(1.0), "steps": 3}
    proof = hg.check_reversal(loss, W, hg.SGD(0.1, 0.5), hg.full_batch(W), **options)
    assert not proof.exact and proof.first_mismatch.step == 2 and "velocity" in proof.first_mismatch.place
    assert proof.first_mismatch.cause == ("derivative" if derivatives else "gradient")
