"""Rules of matrices, and rules that branch on leaves, written against `Link`, `Optimizer` and `hg.partition` alone."""

from typing import Any

import jax
import jax.numpy as jnp

from hypergrad.optimizers import Link, Optimizer


def newton_schulz(x: jax.Array, steps: int = 5) -> jax.Array:
    """An approximate polar factor of a matrix: X <- a X + b (X X^T) X + c (X X^T)^2 X, from X / |X|."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.sqrt(jnp.sum(x * x) + 1e-12))

    def once(_: Any, x: jax.Array) -> jax.Array:
        square = x @ x.T
        return a * x + (b * square + c * square @ square) @ x

    x = jax.lax.fori_loop(0, steps, once, x)
    return x.T if tall else x


class Muon(Optimizer):
    """m <- b m + g;  w <- w - a NS(m), for matrices."""

    learning_rate: Any
    momentum: Any = 0.95

    chain = (
        Link("momentum", lambda h, z, g: g, decay="momentum"),
        Link("params", lambda h, z: -h.learning_rate * newton_schulz(z.momentum)),
    )
    linear = True


def inverse_root(a: jax.Array, p: int = 4, steps: int = 12) -> jax.Array:
    """A^(-1/p) of a positive matrix by the coupled Newton iteration: X <- X M, M <- M^p M_k, from a scaled identity."""
    n = a.shape[0]
    eye = jnp.eye(n, dtype=a.dtype)
    a = a + 1e-4 * jnp.trace(a) / n * eye + 1e-8 * eye
    z = (1 + p) / (2 * jnp.sqrt(jnp.sum(a * a)))
    x, m = z ** (1 / p) * eye, z * a

    def once(_: Any, xm: Any) -> Any:
        x, m = xm
        mk = ((p + 1) * eye - m) / p
        square = mk @ mk
        return x @ mk, square @ square @ m

    return jax.lax.fori_loop(0, steps, once, (x, m))[0]


def _side(axis: int) -> Any:
    return lambda w: 0.1 * jnp.eye(w.shape[axis], dtype=w.dtype)


class Shampoo(Optimizer):
    """L <- b L + (1-b) G G^T;  R <- b R + (1-b) G^T G;  v <- m v - L^(-1/4) G R^(-1/4);  w <- w + a v, for matrices."""

    learning_rate: Any
    momentum: Any = 0.9
    b: Any = 0.95

    chain = (
        Link("left", lambda h, z, g: (1 - h.b) * (g @ g.T), decay="b", start=_side(0), wide=True),
        Link("right", lambda h, z, g: (1 - h.b) * (g.T @ g), decay="b", start=_side(1), wide=True),
        Link("velocity", lambda h, z, g: -inverse_root(z.left) @ g @ inverse_root(z.right), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


def squared_gradients(loss: Any, params: Any, theta: Any, batch: Any, key: Any) -> Any:
    """The mean over examples of their squared gradients."""
    of_one = jax.grad(lambda w, x: loss(w, theta, jax.tree.map(lambda a: a[None], x)))
    each = jax.vmap(of_one, (None, 0))(params, batch)
    return jax.tree.map(lambda g: jnp.mean(g * g, axis=0), each)


class PerExample(Optimizer):
    """s <- b s + (1-b) mean_i g_i^2;  v <- m v - g / (sqrt(s) + eps);  w <- w + a v: g_i the gradient of example i."""

    learning_rate: Any
    momentum: Any = 0.9
    b: Any = 0.9

    signals = {"squares": squared_gradients}
    chain = (
        Link("square", lambda h, z, g: (1 - h.b) * g, decay="b", wide=True, signal="squares"),
        Link("velocity", lambda h, z, g: -g / jnp.sqrt(z.square + 1e-3), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


class Whitened(Optimizer):
    """v <- m v - g / (1 + s);  w <- w + a v, with s = statistics["spread"], what it has just come to."""

    learning_rate: Any
    momentum: Any = 0.9

    chain = (
        Link("velocity", lambda h, z, g: -g / (1 + z.statistics["spread"]), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


def _branching(name: str, test: Any) -> type[Optimizer]:
    """A rule of two links beside each other, of which `test(leaf)` says which one the velocity reads, and whether early."""
    later = lambda h, z, g: -g * (1 + (0.1 * z.late if test(g) else 0 * g))  # noqa: E731
    early = lambda h, z, g: (1 - h.c) * (g if test(g) else g * g)  # noqa: E731
    chain = (
        Link("velocity", later, decay="momentum"),
        Link("late", early, decay="c", bits_a_step=2),
        Link("params", lambda h, z: h.learning_rate * (z.velocity if test(z.velocity) else z.velocity + 0.01 * z.late)),
    )
    fields = {"learning_rate": 0.1, "momentum": 0.9, "c": 0.25}
    return type(name, (Optimizer,), {"__annotations__": dict.fromkeys(fields, Any), **fields, "chain": chain})


BRANCHING = {
    name: _branching(name.title().replace(" ", ""), test)
    for name, test in {
        "matrices": lambda x: x.ndim == 2,
        "vectors": lambda x: x.ndim == 1,
        "scalars": lambda x: x.ndim == 0,
        "tall": lambda x: x.ndim == 2 and x.shape[0] > x.shape[1],
        "wide": lambda x: x.ndim == 2 and x.shape[0] < x.shape[1],
        "square": lambda x: x.ndim == 2 and x.shape[0] == x.shape[1],
        "large": lambda x: x.size > 6,
        "small": lambda x: x.size < 4,
        "odd": lambda x: x.size % 2 == 1,
        "even rows": lambda x: x.ndim > 0 and x.shape[0] % 2 == 0,
        "cubes": lambda x: x.ndim == 3,
    }.items()
}
