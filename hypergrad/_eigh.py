"""Eigenvalues of symmetric matrices, one matrix after the other.

On a CPU, jaxlib's `eigh` (0.10.2) divides a batch among the threads that run the program, and waits for them: two batches at
a time, on two cores, wait for each other and never end.
"""

import jax
import jax.numpy as jnp
from jax import Array


@jax.custom_batching.sequential_vmap
def _of_one(a: Array) -> tuple[Array, Array]:
    w, q = jnp.linalg.eigh(a, symmetrize_input=False)
    return w, q


@jax.custom_jvp
def eigh(a: Array) -> tuple[Array, Array]:
    """(w, Q) of symmetric A = Q diag(w) Q^T, w ascending: [.., n, n] -> [.., n], [.., n, n].

    dw = diag(Q^T dA Q) and dQ = Q (F * (Q^T dA Q)) with F_ij = 1 / (w_j - w_i), F_ii = 0: infinite where eigenvalues are
    equal, as eigenvectors are not determined there.
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
    slopes = jnp.where(jnp.eye(w.shape[-1], dtype=bool), 0, 1 / jnp.where(jnp.eye(w.shape[-1], dtype=bool), 1, gaps))
    return (w, q), (jnp.diagonal(inner, axis1=-2, axis2=-1), q @ (slopes * inner))
