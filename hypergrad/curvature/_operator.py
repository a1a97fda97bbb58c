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
from hypergrad.curvature._factored import FACTORED, Factored
from hypergrad.curvature._flat import examples
from hypergrad.curvature._means import check_mean
from hypergrad.curvature._passes import Inputs, Passes, draws, wide
from hypergrad.curvature._quantities import DECLARE, analysed, check_key, needs_end, quantities
from hypergrad.errors import NonFiniteError


MATRICES = ("hessian", "ggn", "fisher", "fisher_mc", "empirical_fisher", *FACTORED)
DRAWN = ("fisher_mc", "kfac", "ekfac")
DIAGONALS = {
    "hessian": "hessian_diagonal", "ggn": "ggn_diagonal", "fisher": "ggn_diagonal", "empirical_fisher": "second_moment",
}  # fmt: skip


class Operator:
    """A matrix of curvature of the mean loss over all examples, in the order of the flat parameters.

    `matrix`: "hessian"; "ggn", mean_n J_n' H_n J_n; "fisher", the same where the loss is a likelihood that is known;
    "fisher_mc", with one label an example that the model draws by `key`; "empirical_fisher", mean_n g_n g_n'. And in blocks,
    one a parameter: "kfac", "kflr", "kfra", the Kronecker factors of `quantities`, averaged over batches; "ekfac", "ekflr",
    their eigenvectors with the diagonal that the Fisher matrix or the GGN has in them (George et al. 2018).
    `batches`: a batch, or with `many=True` an iterable of batches that can be gone through again (a list), streamed at each
    product; each counts by its number of examples. The loss must be a mean over the examples of a batch, but for products
    with the "hessian" of one batch, and what is made of them.

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
        if matrix in DRAWN and key is None:
            raise ValueError(f"{matrix!r} draws labels of the model: give it a `key`, as jax.random.key(0).")
        check_key(key)
        if many and iter(batches) is batches:
            raise TypeError("`batches` can be gone through once only; give a list, or an object whose iterator begins anew.")
        self.loss, self.params, self.theta, self.matrix, self.key = loss, params, theta, matrix, key
        self.many = many
        self.batches: Iterable[Any] = batches if many else [batches]
        flat, self._tree = ravel_pytree(params)
        self.shape, self.dtype = (flat.size, flat.size), flat.dtype
        self._check()
        self.factored: Factored | None = None
        if matrix in FACTORED:
            self.factored = Factored(loss, params, theta, self.batches, matrix, key)

    def _check(self) -> None:
        """That the loss is one whose matrix this is. The Hessian of one batch is a derivative of the loss as it is."""
        first = next(iter(self.batches), None)
        if first is None:
            raise ValueError("`batches` is empty: there is no example to take curvature of.")
        _, end, constants = analysed(self.loss, self.params, self.theta, first)
        if self.matrix == "ggn":
            needs_end(self.matrix, end)
        if self.matrix in ("fisher", "fisher_mc") and (end is None or end.kind is None):
            raise ValueError(f"{self.matrix!r} needs a likelihood that is known: {DECLARE}. 'ggn' takes any loss.")
        if self.matrix == "hessian" and not self.many:
            return
        telling = next((batch for batch in self.batches if examples(batch) > 1), first)  # of one example a sum is a mean
        check_mean(self.loss, self.params, self.theta, telling, constants)

    def __matmul__(self, v: Any) -> Any:
        return self._mapped(self._product, v)

    def _mapped(self, function: Callable[[Array], Array], v: Any) -> Any:
        """A function of a flat vector, of all that a product takes."""
        size, is_array = self.shape[0], isinstance(v, (jax.Array, np.ndarray))
        if is_array and v.ndim == 2 and v.shape[0] == size:
            return jnp.stack([function(self._real(column)) for column in jnp.asarray(v).T], 1)
        if is_array and v.shape == (size,):
            return function(self._real(v))
        if not eqx.tree_equal(*(jax.tree.map(jnp.shape, x) for x in (v, self.params))):
            raise ValueError(f"a product takes a pytree like `params`, or arrays [{size}] or [{size}, columns].")
        return self._tree(function(self._real(ravel_pytree(v)[0])))

    def _real(self, v: Any) -> Array:
        if jnp.issubdtype(v.dtype, jnp.complexfloating):
            raise TypeError(f"a product takes real numbers; got {v.dtype}. Take it of real and imaginary parts apart.")
        return jnp.asarray(v, self.dtype)

    def _product(self, v: Array) -> Array:
        if self.factored is not None:
            return self._flat(self.factored.times(jax.tree.leaves(self._tree(v))))
        total, count = wide(jnp.zeros_like(v)), 0  # of 16 bits, a sum may overflow where the mean does not
        for i, batch in enumerate(self.batches):
            size = examples(batch)
            total, count = total + size * wide(self._of_batch(v, batch, i)), count + size
        return (total / count).astype(v.dtype)

    def _flat(self, leaves: list[Array]) -> Array:
        return ravel_pytree(jax.tree.unflatten(jax.tree.structure(self.params), leaves))[0].astype(self.dtype)

    def _of_batch(self, v: Array, batch: Any, i: int) -> Array:
        found, end, constants = analysed(self.loss, self.params, self.theta, batch)
        given = Inputs(constants, *(list(map(programs.owned, jax.tree.leaves(x))) for x in (self.params, self.theta, batch)))
        key = None if self.key is None else jax.random.fold_in(self.key, i)
        mark = end and (end.kind and end.kind.name, end.outputs, end.values)
        by = "curvature product", found.flat.program.bare(), found.key, mark, self.matrix
        whole = lambda p, b: self.loss(p, self.theta, b)  # noqa: E731
        if self.matrix == "hessian":
            gradient = jax.grad(lambda w: whole(self._tree(w), batch))
            return jax.jvp(gradient, (ravel_pytree(self.params)[0],), (v,))[1]
        passes = Passes(found, end, ())
        make = lambda: jax.jit(functools.partial(_product, passes, self.matrix))  # noqa: E731
        return programs.kept(by, make)(given, v, key)

    def diagonal(self) -> Array:
        """Exact, flat: as `hg.curvature.quantities` has it."""
        if self.factored is not None:
            return self._flat(self.factored.diagonal())
        if self.matrix not in DIAGONALS:
            raise ValueError(f"{self.matrix!r} has no exact diagonal here; take hg.curvature.quantities' 'ggn_diagonal_mc'.")
        name, total, count = DIAGONALS[self.matrix], wide(jnp.zeros(self.shape[0], self.dtype)), 0
        for batch in self.batches:
            size = examples(batch)
            found = quantities(self.loss, self.params, self.theta, batch, name)[name]
            total, count = total + size * wide(ravel_pytree(found)[0]), count + size
        return (total / count).astype(self.dtype)

    def trace(self, key: Array, samples: int = 32, method: str = "xtrace") -> tuple[Array, Array]:
        """(estimate, its standard error) from `samples` products with random signs; exact of a matrix in blocks.

        "xtrace" takes the trace in the range of half of the products exactly, and estimates the rest (Epperly, Tropp and
        Webber 2024): far nearer where few eigenvalues are large, and exact of no more parameters than samples. "hutchinson":
        the mean of s' M s (1990).
        """
        if method not in ("xtrace", "hutchinson"):
            raise ValueError(f"`method` must be 'xtrace' or 'hutchinson'; got {method!r}.")
        if samples < 4:
            raise ValueError(f"`samples` must be at least 4; got {samples}.")
        check_key(key)
        if self.factored is not None:
            return self.factored.trace(), jnp.zeros(())
        if self.shape[0] <= samples and method == "xtrace":
            return jnp.trace(self @ jnp.eye(self.shape[0], dtype=self.dtype)), jnp.zeros(())
        count = min(samples // 2, self.shape[0] - 1) if method == "xtrace" else samples
        signs = jax.random.rademacher(key, (self.shape[0], count), self.dtype)
        found = jnp.sum(signs * (self @ signs), 0) if method == "hutchinson" else _without_each(self, signs)
        return jnp.mean(found), jnp.std(found, ddof=1) / count**0.5

    def top_eigenvalues(self, k: int = 1, tolerance: float = 1e-6) -> tuple[np.ndarray, np.ndarray]:
        """The k largest eigenvalues in magnitude, largest first, and their vectors [parameters, k]: scipy's Lanczos."""
        import scipy.sparse.linalg

        if not 1 <= k < self.shape[0]:
            raise ValueError(f"`k` must be at least 1 and less than the {self.shape[0]} parameters; got {k}.")
        start = np.random.default_rng(0).normal(size=self.shape[0])
        values, vectors = scipy.sparse.linalg.eigsh(self.to_scipy(), k, v0=start, tol=tolerance)
        order = np.argsort(-np.abs(values))
        return values[order], vectors[:, order]

    def inverse(self, damping: Any, tolerance: float = 1e-6, steps: int | None = None) -> Callable[[Any], Any]:
        """v -> (matrix + damping)^-1 v, by conjugate gradients: for a matrix without
        negative eigenvalues below -damping. Of a matrix in blocks by its eigenvectors, exactly. tolerance: of the residual,
        relative to v; steps: at most so many, and the residual is what it is then. Far from that it is `NonFiniteError`, or
        NaN where values are traced."""
        if not isinstance(damping, jax.core.Tracer) and not damping >= 0:
            raise ValueError(f"`damping` must not be negative; got {damping}.")
        damping = jnp.asarray(damping, self.dtype)

        def solve(flat: Array) -> Array:
            if self.factored is not None:
                return self._flat(
                    self.factored.times(jax.tree.leaves(self._tree(flat)), lambda values: 1 / (values + damping))
                )
            product = lambda x: self._product(x) + damping * x  # noqa: E731
            stop = functools.partial(_conjugate_gradients, tolerance=tolerance, steps=steps)
            found, off = jax.lax.custom_linear_solve(product, flat, stop, symmetric=True, has_aux=True)
            return _said(found, off, tolerance if steps is None else 1.0)

        return functools.partial(self._mapped, solve)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` of float64."""
        import scipy.sparse.linalg

        product = lambda v: np.asarray(self @ jnp.asarray(v.reshape(-1), self.dtype), np.float64)  # noqa: E731
        return scipy.sparse.linalg.LinearOperator(self.shape, matvec=product, rmatvec=product, dtype=np.float64)


def _conjugate_gradients(
    product: Callable[[Array], Array], v: Array, tolerance: float, steps: int | None
) -> tuple[Array, Array]:
    """(the solution, NaN if it is none; its residual relative to v), as `jax.scipy.sparse.linalg.cg` has it, but of v over
    its largest entry: norms count in squares, for which small numbers are too small, and large ones too large."""
    largest = jnp.max(jnp.abs(v), initial=0)
    scale = jnp.where(largest == 0, 1, largest)
    v = v / scale
    norm, most = jnp.vdot(v, v), 10 * v.size if steps is None else steps

    def step(carry: Any) -> Any:
        x, r, p, square, k = carry
        q = product(p)
        along = square / jnp.vdot(p, q)
        r = r - along * q
        new = jnp.vdot(r, r)
        return x + along * p, r, r + (new / square) * p, new, k + 1

    going_on = lambda carry: (carry[3] > tolerance**2 * norm) & (carry[4] < most)  # noqa: E731
    found = jax.lax.while_loop(going_on, step, (jnp.zeros_like(v), v, v, norm, jnp.int32(0)))[0]
    off = jnp.linalg.norm(product(found) - v) / jnp.where(largest == 0, 1, jnp.sqrt(norm))
    return jnp.where(_good(off, tolerance if steps is None else 1.0), scale * found, jnp.nan), off


def _good(off: Array, tolerance: float) -> Array:
    """Rounding takes the true residual away from the one by which conjugate gradients stop: what is ten times the root of
    the dtype's unit is more than that."""
    return off <= 10 * max(tolerance, float(jnp.finfo(off.dtype).eps) ** 0.5)


def _said(found: Array, off: Array, tolerance: float) -> Array:
    """The solution; an error if it is none, where that is known."""
    good = _good(off, tolerance)
    if not isinstance(good, jax.core.Tracer) and not good:
        raise NonFiniteError(
            f"conjugate gradients did not converge: their residual is {float(off):.2g} of the right side, where "
            f"{tolerance:.2g} was asked for. The matrix is singular, indefinite or badly conditioned: raise `damping`, or "
            "`steps`, or allow a larger `tolerance`."
        )
    return found


def _without_each(matrix: Operator, signs: Array) -> Array:
    """XTrace, before its mean: for each sign vector s_i the trace in the range of the others' products, exactly, and s_i's
    estimate of the rest.

    With Y = M S = Q R and u_i the unit vector along the i-th column of R^-T, the range of the others is that of
    Q (I - u_i u_i'): tr Q'MQ - u_i' Q'MQ u_i + r_i' M r_i, r_i = s_i - Q x_i, x_i = (I - u_i u_i') Q' s_i.
    """
    y = matrix @ signs
    q, r = jnp.linalg.qr(y)
    z = matrix @ q
    h, w = q.T @ z, q.T @ signs
    least = jnp.finfo(r.dtype).eps * jnp.max(jnp.abs(r)) + jnp.finfo(r.dtype).tiny  # of a matrix of a lower rank
    u = jnp.linalg.inv(r + least * jnp.eye(len(r), dtype=r.dtype)).T
    u = u / jnp.linalg.norm(u, axis=0)
    x = w - u * jnp.sum(u * w, 0)
    rest = jnp.sum(signs * y, 0) - 2 * jnp.sum((z.T @ signs) * x, 0) + jnp.sum(x * (h @ x), 0)
    return jnp.trace(h) - jnp.sum(u * (h @ u), 0) + rest


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
