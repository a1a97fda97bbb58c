"""What jaxlib would divide among threads that wait for it goes one matrix after the other, and Fourier transforms get arrays
that lie by rows: in losses, rules, their derivatives, and under vmap."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of

import hypergrad as hg
from hypergrad._cpu_kernels import carefully, careless
from hypergrad.optimizers import Link, Optimizer


N = 40
A = np.random.default_rng(0).normal(size=(3, N, N))
A = A @ A.swapaxes(1, 2) / N + np.eye(N) * np.arange(1, N + 1)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


LOSSES: dict[str, Callable[[jax.Array], Any]] = {
    "cholesky": jnp.linalg.cholesky,
    "qr": lambda a: jnp.linalg.qr(a)[1],
    "solve": lambda a: jnp.linalg.solve(a, a * a),
    "inv": jnp.linalg.inv,
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "eigh": lambda a: jnp.linalg.eigh(a)[0] ** 2 * jnp.linalg.eigh(a)[1][..., 0],
    "svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "cho_solve": lambda a: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), a * a),
    "expm": lambda a: jax.vmap(jax.scipy.linalg.expm)(a / N),
    "fft": lambda a: jnp.fft.fft2(a).real,
    "rfft": lambda a: jnp.abs(jnp.fft.rfft(a.mT, axis=-1)),
    "irfft": lambda a: jnp.fft.irfft(a + 1j * a.mT, n=5, axis=1),
    "in a loop": lambda a: jax.lax.scan(lambda c, _: (c + jnp.mean(jnp.linalg.inv(a + c)), None), 0.0, None, length=3)[0],
    "in a branch": lambda a: jax.lax.cond(a[0, 0, 0] > 0, jnp.linalg.inv, lambda a: a, a),
    "in a checkpoint": jax.checkpoint(jnp.linalg.inv),
}


def orders(function: Callable[[jax.Array], Any], a: jax.Array) -> tuple[Any, ...]:
    """The value, the gradient, and the two products with its Jacobian."""
    scalar = lambda a: jnp.sum(jnp.sin(function(a)))  # noqa: E731
    gradient, along = jax.grad(scalar), jnp.cos(a)
    forward = jax.jvp(gradient, (a,), (along,))[1]
    return scalar(a), gradient(a), forward, jax.grad(lambda a: jnp.vdot(gradient(a), along))(a)


@some_of("name", LOSSES, "cholesky", "svd", "fft", "in a loop")
def test_values_and_derivatives_are_those_of_the_batch(name: str) -> None:
    a = jnp.asarray(A)
    ours, theirs = (jax.jit(lambda a, f=f: orders(f, a))(a) for f in (carefully(LOSSES[name]), LOSSES[name]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), ours, theirs)
    program = jax.make_jaxpr(lambda a: orders(carefully(LOSSES[name]), a))(a)
    assert not careless(program.jaxpr)


@pytest.mark.long
def test_under_vmap_too() -> None:
    a = jnp.asarray(A)
    along = lambda f: jax.jit(jax.vmap(lambda a: orders(f, a)))  # noqa: E731
    ours, theirs = along(carefully(jnp.linalg.cholesky))(a), along(jnp.linalg.cholesky)(a)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), ours, theirs)


def test_twice_is_once() -> None:
    """A rule of the library's goes one by one by itself, and again as part of a block."""
    a = jnp.asarray(A)
    once, twice = jax.jit(carefully(jnp.linalg.eigh)), jax.jit(carefully(carefully(jnp.linalg.eigh)))
    jax.tree.map(np.testing.assert_array_equal, once(a), twice(a))


@pytest.mark.parametrize(("batch", "calls"), [(2, 1), (3, 3)])
def test_small_batches_stay_whole(batch: int, calls: int) -> None:
    """30 cubed is 27,000: two of them are computed by one thread."""
    a = jnp.asarray(A)[:batch, :30, :30]
    text = jax.jit(carefully(jnp.linalg.cholesky)).lower(a).as_text()
    assert ("while" in text) == (calls > 1)


def train(loss: Any, w: Any, optimizer: Any) -> Any:
    return hg.train(loss, w, optimizer, hg.full_batch(jnp.asarray(A)), steps=3, throw=False)


def lowered(loss: Any, w: Any, optimizer: Any) -> str:
    """The program of a hypergradient through training, of a batch of rates."""
    norm = lambda rate: jnp.sum(train(loss, w, optimizer(rate)).params ** 2)  # noqa: E731
    return jax.jit(jax.vmap(jax.grad(norm))).lower(jnp.array([1e-3, 2e-3])).as_text()


def large(text: str) -> list[str]:
    """Calls of LAPACK on more than one matrix at a time."""
    return [line for line in text.splitlines() if "lapack_" in line and f"x{N}x{N}x" in line.split(":")[-1]]


def test_no_large_batch_is_left_in_training_by_a_loss() -> None:
    def loss(w: jax.Array, _: Any, batch: jax.Array) -> jax.Array:
        return jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(batch + w @ w.mT), axis1=-2, axis2=-1)))

    text = lowered(loss, jnp.eye(N), hg.SGD)
    assert "lapack_" in text and not large(text)
    assert large(jax.jit(jax.grad(loss)).lower(jnp.eye(N), None, jnp.asarray(A)).as_text()), "the test sees them"


@pytest.mark.long
def test_a_transform_of_what_lies_by_columns() -> None:
    """jaxlib 0.10.2 does not compile the gradient of this loss."""

    def loss(w: jax.Array, theta: jax.Array, _: Any) -> jax.Array:
        spectrum = jnp.fft.rfft(jnp.linalg.inv(w @ w.mT + jnp.eye(3)), axis=1)
        return theta * jnp.mean(jnp.tanh(jnp.fft.irfft((1 + 1j) * spectrum, n=3, axis=1)))

    w, batches = jnp.arange(9.0).reshape(3, 3), hg.full_batch(None)

    def hypergradient(adjoint: Any) -> Any:
        train = lambda theta: hg.train(loss, w, hg.SGD(0.1, 0.5), batches, theta=theta, steps=3, adjoint=adjoint)  # noqa: E731
        return jax.jit(jax.grad(lambda theta: jnp.sum(train(theta).params ** 2)))(jnp.ones(()))

    np.testing.assert_allclose(hypergradient(hg.Reversible()), hypergradient(hg.Unrolled()), rtol=1e-9)


def apart(g: jax.Array) -> jax.Array:
    return jnp.linalg.solve(g @ g.mT + jnp.eye(N), g)


class Whitened(Optimizer):
    rate: Any
    momentum: Any = 0.5
    chain = (
        Link("momentum", lambda h, z, g: apart(g), decay="momentum"),
        Link("params", lambda h, z: -h.rate * z.momentum),
    )


def test_nor_by_a_rule_of_ones_own() -> None:
    loss = lambda w, _, batch: jnp.sum((w - batch) ** 2)  # noqa: E731
    text = lowered(loss, jnp.asarray(A), Whitened)
    assert "lapack_" in text and not large(text)
