"""Inverse powers of positive matrices, with derivatives that are finite at equal and at vanishing eigenvalues."""

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad._cpu_kernels import eigh


def inverse_power(a: Array, e: Array | float, ridge: Array | float = 0.0) -> Array:
    """(A + ridge I)^-e = Q diag((w + ridge)^-e) Q^T for symmetric A = Q diag(w) Q^T, w >= 0.

    [.., n, n], [], [..] -> [.., n, n]

    dA^-e = Q (F * (Q^T dA Q)) Q^T (Daleckii and Krein 1965), with the divided differences of w^-e
    F_ij = -(w_i w_j)^(-(e + 1) / 2) sinh(e d / 2) / sinh(d / 2), d = log(w_i / w_j), which is F_ii = -e w_i^(-e - 1) where
    eigenvalues are equal. The ridge is added to the eigenvalues: to the matrix, it is lost where roundings of the largest
    make zeros negative, in float32 below 10^-7 of that.
    """
    return _inverse_power(a, jnp.asarray(e, a.dtype), jnp.broadcast_to(jnp.asarray(ridge, a.dtype), a.shape[:-2]))


def _eigen(a: Array, ridge: Array) -> tuple[Array, Array]:
    w, q = eigh(a)
    return jnp.maximum(jnp.maximum(w, 0) + ridge[..., None], jnp.finfo(a.dtype).tiny), q


def _power(w: Array, q: Array, e: Array) -> Array:
    return (q * (w**-e)[..., None, :]) @ q.mT


@jax.custom_jvp
def _inverse_power(a: Array, e: Array, ridge: Array) -> Array:
    return _power(*_eigen(a, ridge), e)


@_inverse_power.defjvp
def _inverse_power_jvp(primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    (a, e, ridge), (da, de, dridge) = primals, tangents
    w, q = _eigen(a, ridge)
    log_w = jnp.log(w)
    mean = (log_w[..., :, None] + log_w[..., None, :]) / 2
    half = (log_w[..., :, None] - log_w[..., None, :]) / 2
    slopes = -jnp.exp(-(e + 1) * mean) * _ratio_of_sinh(e, half)
    da = (da + da.mT) / 2 + dridge[..., None, None] * jnp.eye(a.shape[-1], dtype=a.dtype)
    along_a = q @ (slopes * (q.mT @ da @ q)) @ q.mT
    along_e = (q * (-log_w * w**-e)[..., None, :]) @ q.mT
    return _power(w, q, e), along_a + de * along_e


def _ratio_of_sinh(e: Array, x: Array) -> Array:
    """sinh(e x) / sinh(x), e at zero."""
    near = jnp.abs(x) < 1e-2
    safe = jnp.where(near, 1, x)
    series = e * (1 + (e * e - 1) * x * x / 6 * (1 + (3 * e * e - 7) * x * x / 60))
    return jnp.where(near, series, jnp.sinh(e * safe) / jnp.sinh(safe))


def inverse_root(a: Array, p: int, steps: int = 25) -> Array:
    """A^(-1/p) by the coupled Newton iteration: X <- X M', M <- M'^p M with M' = ((p + 1) I - M) / p. [.., n, n]

    From X = z^(1/p) I and M = z A with z = (1 + p) / (2 |A|), Frobenius norm (Anil et al. 2020, Algorithm II). The
    derivative is that of the iteration, which is as exact as it has converged: `steps` of 25 are enough up to a condition of
    10^6 in float32. Products alone, so that it needs no library for eigenvalues.
    """
    identity = jnp.eye(a.shape[-1], dtype=a.dtype)
    z = (1 + p) / (2 * jnp.sqrt(jnp.sum(a * a, axis=(-2, -1), keepdims=True)))

    def once(xm: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        x, m = xm
        change = ((p + 1) * identity - m) / p
        return (x @ change, jnp.linalg.matrix_power(change, p) @ m), None

    (x, _), _ = jax.lax.scan(once, (z ** (1 / p) * identity, z * a), None, length=steps)
    return x


@jax.custom_jvp
def eigenvectors(a: Array) -> Array:
    """The columns of Q in symmetric A = Q diag(w) Q^T, w ascending. [n, n] -> [n, n]

    dQ = Q (F * (Q^T dA Q)) with F_ij = 1 / (w_j - w_i), taken as zero between eigenvalues that are closer than 10^-6 of the
    largest, where eigenvectors are not determined.
    """
    return eigh(a)[1]


@eigenvectors.defjvp
def _eigenvectors_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    w, q = eigh(primals[0])
    gaps = w[None, :] - w[:, None]
    apart = jnp.abs(gaps) > 1e-6 * jnp.max(jnp.abs(w))
    slopes = jnp.where(apart, 1 / jnp.where(apart, gaps, 1), 0)
    return q, q @ (slopes * (q.T @ ((tangents[0] + tangents[0].T) / 2) @ q))
