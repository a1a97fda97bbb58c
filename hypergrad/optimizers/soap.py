"""SOAP, Adam in the eigenbasis of Shampoo's factors."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.adam import bias_correction, root
from hypergrad.optimizers.chain import Link, Optimizer, View
from hypergrad.optimizers.choices import check_int, check_of_leaves
from hypergrad.optimizers.decoupled import decay_of, decaying
from hypergrad.optimizers.held import held_link, schedule
from hypergrad.optimizers.roots import eigenvectors
from hypergrad.optimizers.tiles import from_upper, upper


class SOAP(Optimizer):
    """L, R: means of G G^T, G^T G;  s <- b2 s + (1 - b2) (P^T G Q)^2;  w <- w - a P (P^T m Q / (sqrt(s) + eps)) Q^T.

    Beside it w decays by 1 - a wd. P, Q: eigenvectors of L, R as columns; m: the mean of G; m and s are divided by 1 - b1^t
    and 1 - b2^t (Vyas et al. 2024). For matrices; an axis longer than max_size is not rotated, and leaves of other orders
    are AdamW's. learning_rate: a; b1, b2 and factor_decay (of L and R) in [2^-16, 1 - 2^-16]; weight_decay: wd; one value a
    leaf or one per step, of the rate, the decay and eps also one for each weight. every: k, eigenvectors are computed at
    steps 1, 1 + k, 1 + 2k, .. and held between, which costs 16/k bits an entry of P and Q and step. Its authors' form, by QR
    from the basis before, reads that basis itself, and has no inverse.

    The first step is AdamW's: in the eigenbasis of the first gradient alone that is a diagonal, and a step is noise over
    noise. Eigenvectors are not determined where eigenvalues meet, as where a factor has not full rank (of more inputs than
    rows so far): hypergradients are no derivatives then, and may be far off. `Trained.status` says so of every run, as it
    cannot tell. Between eigenvalues closer than 10^-6 of the largest the derivative is taken as zero. State: {"factors":
    upper triangles; "basis": P and Q; "mean", "square": like params; the weights of both means}.
    """

    learning_rate: Any
    b1: Any = 0.95
    b2: Any = 0.95
    eps: Any = 1e-8
    weight_decay: Any = 0.0
    factor_decay: Any = 0.95
    every: int = eqx.field(static=True, kw_only=True, default=10)
    max_size: int = eqx.field(static=True, kw_only=True, default=8192)

    weights = {"mean_weight": "b1", "square_weight": "b2"}
    approximate = "hg.SOAP's basis where a factor has not full rank: it is not determined there"

    def __check_init__(self) -> None:
        check_int(self, "every", 1)
        check_int(self, "max_size", 1)

    @property
    def chain(self) -> tuple[Link, ...]:  # type: ignore[override]
        return _chain(_Form(self.every, self.max_size))

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        check_of_leaves(self, h, ("b1", "b2", "factor_decay"))
        c1, c2 = (bias_correction(h[decay], h.get(name), steps) for name, decay in self.weights.items())
        given = {key: value for key, value in h.items() if key not in self.weights}
        unbias = {"unbias_mean": 1 / c1, "unbias_square": 1 / c2}
        return {**given, **unbias, **schedule(h, self.every, steps, first=1), **decay_of(h, steps)}


class _Form(NamedTuple):
    """What of the rule is fixed; hashable."""

    every: int
    max_size: int

    def sides(self, leaf: Array) -> list[int]:
        """The axes that are rotated."""
        return [axis for axis, n in enumerate(leaf.shape) if leaf.ndim == 2 and n <= self.max_size]

    def factors(self, h: View, z: View, g: Array) -> Array:
        squares = [g @ g.T if axis == 0 else g.T @ g for axis in self.sides(g)]
        return (1 - h.factor_decay) * _joined([upper(x[None])[0] for x in squares], g)

    def no_factors(self, leaf: Array) -> Array:
        return _joined(
            [jnp.zeros(n * (n + 1) // 2, leaf.dtype) for n in (leaf.shape[axis] for axis in self.sides(leaf))], leaf
        )

    def basis(self, h: View, z: View, g: Array) -> Array:
        found, begin = [], 0
        for axis in self.sides(g):
            n = g.shape[axis]
            length = n * (n + 1) // 2
            found.append(eigenvectors(from_upper(z.factors[None, begin : begin + length], n)[0]).reshape(-1))
            begin += length
        return _joined(found, g)

    def identity(self, leaf: Array) -> Array:
        return _joined([jnp.eye(leaf.shape[axis], dtype=leaf.dtype).reshape(-1) for axis in self.sides(leaf)], leaf)

    def turned(self, z: View, x: Array, back: bool = False) -> Array:
        """P^T x Q; P x Q^T on the way back."""
        begin = 0
        for axis in self.sides(x):
            n = x.shape[axis]
            q = z.basis[begin : begin + n * n].reshape(n, n)
            q = q if back else q.T
            x = q @ x if axis == 0 else x @ q.T
            begin += n * n
        return x

    def square(self, h: View, z: View, g: Array) -> Array:
        return (1 - h.b2) * self.turned(z, g) ** 2

    def step(self, h: View, z: View) -> Array:
        scaled = h.unbias_mean * self.turned(z, z.mean) / (root(z.square * h.unbias_square) + h.eps)
        return -h.learning_rate * self.turned(z, scaled, back=True)


@functools.cache
def _chain(form: _Form) -> tuple[Link, ...]:
    return (
        Link("factors", form.factors, decay="factor_decay", start=form.no_factors, wide=True),
        held_link("basis", form.basis, form.every, form.identity, wide=False),
        Link("mean", lambda h, z, g: (1 - h.b1) * g, decay="b1"),
        Link("square", form.square, decay="b2", wide=True),
        decaying(form.step),
    )


def _joined(parts: list[Array], like: Array) -> Array:
    return jnp.concatenate(parts) if parts else jnp.zeros(0, like.dtype)
