"""Linear algebra inside the loss, and layers that are the solution of something: their derivatives are JAX's own rules."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.sparse.linalg
from zoo import Draw, Problem, entry, mlp, mse, net, squares


def definite(w: jax.Array, ridge: Any) -> jax.Array:
    return w @ w.T + ridge * jnp.eye(w.shape[0], dtype=w.dtype)


def of_matrix(draw: Draw, function: Any, theta: float, rate: float = 0.03) -> Problem:
    """function(a matrix of parameters, theta, x), fitted to y."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        return mse(function(p["w"], theta, x) + x @ p["v"], y) + 0.01 * squares(p)

    params = {"w": draw(3, 3, scale=0.6), "v": draw(3)}
    return Problem(loss, params, draw.number(theta), (draw.rows(5, 3), draw.rows(5)), rate=rate)


@entry()
def solve(draw: Draw) -> Problem:
    return of_matrix(draw, lambda w, ridge, x: jnp.linalg.solve(definite(w, ridge), x.T)[0], 1.0)


@entry()
def inverse_and_determinant(draw: Draw) -> Problem:
    def function(w: jax.Array, ridge: Any, x: jax.Array) -> jax.Array:
        a = definite(w, ridge) + 0.2 * (w - w.T)
        return jnp.einsum("ni,ij,nj->n", x, jnp.linalg.inv(a), x) + jnp.linalg.slogdet(a)[1] + 0.1 * jnp.linalg.det(a)

    return of_matrix(draw, function, 1.5)


@entry()
def gaussian_process(draw: Draw) -> Problem:
    """The marginal likelihood by a Cholesky factor and triangular solves; a length scale and noise in theta."""

    def loss(p: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        z = jnp.tanh(x @ p["w"])
        apart = jnp.sum((z[:, None] - z[None]) ** 2, axis=-1)
        factor = jnp.linalg.cholesky(jnp.exp(-apart / theta["length"]) + theta["noise"] * jnp.eye(5, dtype=x.dtype))
        whitened = jax.scipy.linalg.solve_triangular(factor, y - p["mean"], lower=True)
        both = jax.scipy.linalg.cho_solve((factor, True), y)
        return jnp.mean(whitened**2) / 2 + jnp.mean(jnp.log(jnp.diag(factor))) + 0.01 * jnp.mean(both**2)

    theta = {"length": draw.number(1.3), "noise": draw.number(0.4)}
    params = {"w": draw(3, 3, scale=0.6), "mean": draw()}
    return Problem(loss, params, theta, (draw.rows(5, 3), draw.rows(5)), rate=0.1)


@entry()
def eigenvectors(draw: Draw) -> Problem:
    """`eigh` of a symmetric matrix whose eigenvalues stay apart; signs do not matter."""

    def function(w: jax.Array, gap: Any, x: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(gap * jnp.diag(jnp.arange(3.0, dtype=w.dtype)) + 0.3 * (w + w.T))
        return (x @ vectors) ** 2 @ jnp.tanh(values)

    return of_matrix(draw, function, 2.0)


@entry()
def orthogonal_factor(draw: Draw) -> Problem:
    """`qr` with its signs made positive, a pseudoinverse, and a matrix norm."""

    def function(w: jax.Array, shift: Any, x: jax.Array) -> jax.Array:
        q, r = jnp.linalg.qr(w + shift * jnp.eye(3, dtype=w.dtype))
        turned = x @ (q * jnp.sign(jnp.diag(r)))
        return jnp.sin(turned).sum(axis=-1) + x @ jnp.linalg.pinv(w + 2 * shift * jnp.eye(3, dtype=w.dtype))[0]

    return of_matrix(draw, function, 1.5)


@entry()
def matrix_exponential(draw: Draw) -> Problem:
    """A rotation as `expm` of an antisymmetric matrix, for a time in theta."""
    return of_matrix(draw, lambda w, time, x: jnp.tanh(x @ jax.scipy.linalg.expm(time * (w - w.T)))[:, 0], 0.7)


@entry()
def conjugate_gradients(draw: Draw) -> Problem:
    """`cg` to convergence: an implicit derivative by another solution."""

    def function(w: jax.Array, ridge: Any, x: jax.Array) -> jax.Array:
        a = definite(w, ridge)
        found, _ = jax.scipy.sparse.linalg.cg(lambda v: a @ v, x.T, tol=0.0, maxiter=20)
        return found[0]

    return of_matrix(draw, function, 1.0)


@entry()
def custom_linear_solution(draw: Draw) -> Problem:
    """`jax.lax.custom_linear_solve` of a matrix that is not symmetric, with a solver that JAX cannot look into."""

    def function(w: jax.Array, ridge: Any, x: jax.Array) -> jax.Array:
        a = definite(w, ridge) + 0.3 * (w - w.T)
        answer = lambda matrix: lambda _, b: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(matrix), b)  # noqa: E731
        return jax.vmap(lambda b: jax.lax.custom_linear_solve(lambda v: a @ v, b, answer(a), answer(a.T))[0])(x)

    return of_matrix(draw, function, 1.0)


@entry()
def implicit_layer(draw: Draw) -> Problem:
    """A deep equilibrium by `jax.lax.custom_root`: z = tanh(W z + x), its contraction in theta."""

    def loss(p: Any, contraction: Any, batch: Any) -> jax.Array:
        x, y = batch
        w = contraction * p["w"] / (1 + jnp.sum(p["w"] ** 2))

        def equilibrium(x: jax.Array) -> jax.Array:
            miss = lambda z: jnp.tanh(w @ z + x) - z  # noqa: E731
            iterate = lambda f, z: jax.lax.fori_loop(0, 60, lambda _, z: z + f(z), z)  # noqa: E731
            dense = lambda g, b: jnp.linalg.solve(jax.jacobian(g)(b), b)  # noqa: E731
            return jax.lax.custom_root(miss, jnp.zeros_like(x), iterate, dense)

        return mse(jax.vmap(equilibrium)(x) @ p["v"], y)

    params = {"w": draw(3, 3), "v": draw(3)}
    return Problem(loss, params, draw.number(0.8), (draw.rows(4, 3), draw.rows(4)))


@entry()
def sinkhorn(draw: Draw) -> Problem:
    """Entropic transport: eight iterations in log space, the temperature in theta."""

    def loss(p: Any, heat: Any, batch: Any) -> jax.Array:
        x, y = batch
        cost = jnp.sum((net(p, x)[:, None] - y[None]) ** 2, axis=-1)

        def balance(potentials: Any, _: None) -> Any:
            f, g = potentials
            f = -heat * jax.nn.logsumexp((g[None] - cost) / heat, axis=1)
            g = -heat * jax.nn.logsumexp((f[:, None] - cost) / heat, axis=0)
            return (f, g), None

        (f, g), _ = jax.lax.scan(balance, (jnp.zeros(4, x.dtype), jnp.zeros(4, x.dtype)), None, length=8)
        plan = jnp.exp((f[:, None] + g[None] - cost) / heat)
        return jnp.sum(plan * cost) / 4

    return Problem(loss, mlp(draw, 3, 4, 2), draw.number(0.8), (draw.rows(4, 3), draw.rows(4, 2)), rate=0.1)
