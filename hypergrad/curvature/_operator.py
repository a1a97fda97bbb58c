"""Curvature as a linear operator: products without the matrix, over one batch or many.

Invariant: `operator @ v` is linear in v and symmetric; every other answer is made of such products, or of factors.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from hypergrad import _programs as programs
from hypergrad.curvature._passes import Inputs, Passes, draws
from hypergrad.curvature._quantities import DECLARE, analysed, quantities


MATRICES = ("hessian", "ggn", "fisher", "fisher_mc", "empirical_fisher")
DIAGONALS = {
    "hessian": "hessian_diagonal", "ggn": "ggn_diagonal", "fisher": "ggn_diagonal", "empirical_fisher": "second_moment",
}  # fmt: skip


class Operator:
    """A matrix of curvature of the mean loss over all examples, in the order of the flat parameters.

    `matrix`: "hessian"; "ggn", mean_n J_n' H_n J_n; "fisher", the same where the loss is a likelihood that is known;
    "fisher_mc", with one label an example that the model draws by `key`; "empirical_fisher", mean_n g_n g_n'.
    `batches`: a batch, or with `many=True` an iterable of batches that can be gone through again (a list), streamed at each
    product; each counts by its number of examples.

    `operator @ v` takes a pytree like `params`, a flat vector or a matrix of flat columns. Cost of a product: two to four
    gradients. Source of the products: Pearlmutter 1994; Schraudolph 2002.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        params: Any,
        theta: Any,
        batches: Any,
        matrix: str = "ggn",
        *,
        key: Array | None = None,
        many: bool = False,
    ) -> None:
        if matrix not in MATRICES:
            raise ValueError(f"`matrix` must be one of {', '.join(MATRICES)}; got {matrix!r}.")
        if matrix == "fisher_mc" and key is None:
            raise ValueError("'fisher_mc' draws labels of the model: give it a `key`, as jax.random.key(0).")
        if many and iter(batches) is batches:
            raise TypeError("`batches` can be gone through once only; give a list, or an object whose iterator begins anew.")
        self.loss, self.params, self.theta, self.matrix, self.key = loss, params, theta, matrix, key
        self.batches: Iterable[Any] = batches if many else [batches]
        flat, self._tree = ravel_pytree(params)
        self.shape, self.dtype = (flat.size, flat.size), flat.dtype
        if matrix in ("fisher", "fisher_mc"):
            end = analysed(loss, params, theta, next(iter(self.batches)))[1]
            if end is None or end.kind is None:
                raise ValueError(f"{matrix!r} needs a likelihood that is known: {DECLARE}. 'ggn' takes any loss.")

    def __matmul__(self, v: Any) -> Any:
        if isinstance(v, (jax.Array, np.ndarray)) and v.ndim == 2 and jnp.shape(v)[0] == self.shape[0]:
            return jnp.stack([self @ column for column in jnp.asarray(v).T], 1)
        if isinstance(v, (jax.Array, np.ndarray)) and jnp.shape(v) == self.shape[:1]:
            return self._product(jnp.asarray(v))
        if not eqx.tree_equal(*(jax.tree.map(jnp.shape, x) for x in (v, self.params))):
            size = self.shape[0]
            raise ValueError(f"a product takes a pytree like `params`, or arrays [{size}] or [{size}, columns].")
        return self._tree(self._product(ravel_pytree(v)[0]))

    def _product(self, v: Array) -> Array:
        total, count = jnp.zeros_like(v), 0
        for i, batch in enumerate(self.batches):
            size = jax.tree.leaves(batch)[0].shape[0]
            total, count = total + size * self._of_batch(v, batch, i), count + size
        return total / count

    def _of_batch(self, v: Array, batch: Any, i: int) -> Array:
        found, end, constants = analysed(self.loss, self.params, self.theta, batch)
        given = Inputs(constants, *(list(map(programs.owned, jax.tree.leaves(x))) for x in (self.params, self.theta, batch)))
        key = None if self.key is None else jax.random.fold_in(self.key, i)
        mark = end and (end.kind and end.kind.name, end.outputs, end.values)
        by = "curvature product", found.flat.program.bare(), mark, self.matrix
        whole = lambda p, b: self.loss(p, self.theta, b)  # noqa: E731
        if self.matrix == "hessian":
            gradient = jax.grad(lambda w: whole(self._tree(w), batch))
            return jax.jvp(gradient, (ravel_pytree(self.params)[0],), (v,))[1]
        passes = Passes(found, end, ())
        make = lambda: jax.jit(functools.partial(_product, passes, self.matrix))  # noqa: E731
        return programs.kept(by, make)(given, v, key)

    def diagonal(self) -> Array:
        """Exact, flat: as `hg.curvature.quantities` has it."""
        if self.matrix not in DIAGONALS:
            raise ValueError(f"{self.matrix!r} has no exact diagonal here; take hg.curvature.quantities' 'ggn_diagonal_mc'.")
        name, total, count = DIAGONALS[self.matrix], jnp.zeros(self.shape[0], self.dtype), 0
        for batch in self.batches:
            size = jax.tree.leaves(batch)[0].shape[0]
            found = quantities(self.loss, self.params, self.theta, batch, name)[name]
            total, count = total + size * ravel_pytree(found)[0], count + size
        return total / count

    def trace(self, key: Array, samples: int = 32) -> tuple[Array, Array]:
        """(estimate, its standard error) from random signs. Source: Hutchinson 1990."""
        signs = jax.random.rademacher(key, (samples, self.shape[0]), self.dtype)
        found = jnp.stack([jnp.vdot(s, self @ s) for s in signs])
        return jnp.mean(found), jnp.std(found, ddof=1) / samples**0.5

    def top_eigenvalues(self, k: int = 1, tolerance: float = 1e-6) -> tuple[np.ndarray, np.ndarray]:
        """The k largest eigenvalues in magnitude, largest first, and their vectors [parameters, k]: scipy's Lanczos."""
        import scipy.sparse.linalg

        if not 1 <= k < self.shape[0]:
            raise ValueError(f"`k` must be at least 1 and less than the {self.shape[0]} parameters; got {k}.")
        start = np.random.default_rng(0).normal(size=self.shape[0])
        values, vectors = scipy.sparse.linalg.eigsh(self.to_scipy(), k, v0=start, tol=tolerance)
        order = np.argsort(-np.abs(values))
        return values[order], vectors[:, order]

    def inverse(self, damping: float, tolerance: float = 1e-6, steps: int | None = None) -> Callable[[Any], Any]:
        """v -> (matrix + damping)^-1 v, by conjugate gradients (`jax.scipy.sparse.linalg.cg`): for a matrix without
        negative eigenvalues below -damping."""
        if not damping >= 0:
            raise ValueError(f"`damping` must not be negative; got {damping}.")

        def solve(v: Any) -> Any:
            flat = ravel_pytree(v)[0]
            product = lambda x: self._product(x) + damping * x  # noqa: E731
            found = jax.scipy.sparse.linalg.cg(product, flat, tol=tolerance, maxiter=steps)[0]
            return found if isinstance(v, jax.Array) and v.ndim == 1 else self._tree(found)

        return solve

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` of float64."""
        import scipy.sparse.linalg

        product = lambda v: np.asarray(self @ jnp.asarray(v.reshape(-1), self.dtype), np.float64)  # noqa: E731
        return scipy.sparse.linalg.LinearOperator(self.shape, matvec=product, rmatvec=product, dtype=np.float64)


def _product(passes: Passes, matrix: str, given: Inputs, v: Array, key: Array | None) -> Array:
    """mean_n J_n' M_n J_n v; M_n: the loss's Hessian in the outputs, or s s' of a gradient in them; or mean_n g_n g_n' v."""
    flat, tree = ravel_pytree(given.weights)
    count = given.batch[0].shape[0]
    keys = None if key is None else jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))

    def one(batch: list[Array], key: Any) -> Array:
        at = lambda w: given._replace(weights=tree(w), batch=batch)  # noqa: E731
        if matrix == "empirical_fisher":
            gradient = jax.grad(lambda w: passes.forward(at(w), passes.taps(), {})[0].loss)(flat)
            return gradient * jnp.vdot(gradient, v)
        outputs, pull = jax.vjp(lambda w: passes.forward(at(w), passes.taps(), {})[0].outputs, flat)
        moved = jax.jvp(lambda w: passes.forward(at(w), passes.taps(), {})[0].outputs, (flat,), (v,))[1]
        if matrix == "fisher_mc":
            (s,) = draws(passes, at(flat), outputs, key, 1)
            return pull(s * jnp.vdot(s, moved))[0]
        assert passes.end is not None
        end = passes.end.outputs
        return pull(jax.jvp(jax.grad(lambda f: passes.loss_from(at(flat), end, f)), (outputs,), (moved,))[1])[0]

    return jnp.mean(jax.vmap(one)([x[:, None] for x in given.batch], keys), 0)
