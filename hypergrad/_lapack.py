"""Batches of matrices on a CPU, where they may wait for each other.

jaxlib (0.10.2) divides a batch of factorizations among the threads that run the program, and waits for them. Where as many
batches are computed at a time as there are threads, two on two cores, all wait and none works: the program never ends.
"""

import math
import os
import warnings

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr

from hypergrad._program_keys import equations


_DIVIDED = ("cholesky", "eigh", "lu", "qr")  # primitives that were seen to wait
_LARGE = 100_000  # a batch times the cube of a side; 65,000 is computed by one thread, 500,000 by several


def warn_of_batches(jaxpr: Jaxpr, what: str) -> None:
    """Where what a step computes may wait for itself: its gradient, and once more for the derivative."""
    if jax.default_backend() != "cpu":
        return
    found = [
        e.primitive.name for e in equations(jaxpr) if e.primitive.name in _DIVIDED and _is_large(e.invars[0].aval.shape)
    ]
    threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    if found and 2 * len(found) >= threads:
        warnings.warn(
            f"{what} factorizes batches of matrices ({', '.join(sorted(set(found)))}). On a CPU, jaxlib divides a batch "
            f"among the threads that run the program, of which there are {threads} here, and waits for them: if all of "
            "them wait, training never ends. Give it more threads, by the environment variable NPROC=16 before JAX "
            "starts, or factorize one matrix after the other, by jax.lax.map.",
            stacklevel=2,
        )


def _is_large(shape: tuple[int, ...]) -> bool:
    batch = math.prod(shape[:-2])
    return batch > 1 and batch * max(shape[-2:]) ** 3 > _LARGE


@jax.custom_batching.sequential_vmap
def _of_one(a: Array) -> tuple[Array, Array]:
    w, q = jnp.linalg.eigh(a, symmetrize_input=False)
    return w, q


@jax.custom_jvp
def eigh(a: Array) -> tuple[Array, Array]:
    """(w, Q) of symmetric A = Q diag(w) Q^T, w ascending: [.., n, n] -> [.., n], [.., n, n].

    One matrix after the other on a CPU, under `jax.vmap` too. dw = diag(Q^T dA Q) and dQ = Q (F * (Q^T dA Q)) with F_ij =
    1 / (w_j - w_i), F_ii = 0: infinite where eigenvalues are equal, as eigenvectors are not determined there.
    """
    if jax.default_backend() != "cpu":
        w, q = jnp.linalg.eigh(a, symmetrize_input=False)
        return w, q
    if a.ndim == 2:
        return _of_one(a)
    w, q = jax.lax.map(_of_one, a.reshape(-1, *a.shape[-2:]))
    return w.reshape(a.shape[:-1]), q.reshape(a.shape)


@eigh.defjvp
def _eigh_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    w, q = eigh(primals[0])
    inner = q.mT @ ((tangents[0] + tangents[0].mT) / 2) @ q
    gaps = w[..., None, :] - w[..., :, None]
    own = jnp.eye(w.shape[-1], dtype=bool)
    slopes = jnp.where(own, 0, 1 / jnp.where(own, 1, gaps))
    return (w, q), (jnp.diagonal(inner, axis1=-2, axis2=-1), q @ (slopes * inner))
