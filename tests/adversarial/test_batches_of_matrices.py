"""What jaxlib would divide among threads that then wait for it is told beforehand, with the cure."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import hypergrad as hg


STEPS = 2


def factorized(w: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(w @ w.mT + batch), axis1=-2, axis2=-1)))


def train(loss: object, sides: tuple[int, ...]) -> None:
    w = 0.1 * jnp.ones(sides) + jnp.eye(sides[-1])
    hg.train(loss, w, hg.SGD(1e-4), hg.full_batch(jnp.eye(sides[-1])), steps=STEPS)


def test_large_batches_of_factorizations_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    with pytest.warns(UserWarning, match=r"the loss factorizes batches of matrices \(cholesky\).*2 here.*NPROC=16.*lax.map"):
        train(lambda w, _, batch: factorized(w, batch), (2, 64, 64))


@pytest.mark.parametrize(("sides", "threads"), [((64, 64), "2"), ((2, 8, 8), "2"), ((2, 64, 64), "16")])
def test_single_and_small_ones_and_enough_threads_are_not(
    sides: tuple[int, ...], threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", threads)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(lambda w, _, batch: factorized(w, batch), sides)
    assert not said


def test_one_after_the_other_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(lambda w, _, batch: jnp.sum(jax.lax.map(lambda x: factorized(x, batch), w)), (2, 64, 64))
    assert not said
