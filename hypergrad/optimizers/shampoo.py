"""Shampoo, which divides a gradient by roots of its own second moments along each axis."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.adam import bias_correction
from hypergrad.optimizers.chain import Link, Optimizer, View
from hypergrad.optimizers.choices import check_choice, check_int, check_of_leaves, check_positive
from hypergrad.optimizers.decoupled import decay_of, decaying
from hypergrad.optimizers.held import held_link, schedule
from hypergrad.optimizers.roots import inverse_power, inverse_root
from hypergrad.optimizers.tiles import Tiles, tiles


GRAFTS = ("none", "sgd", "adagrad", "rmsprop", "adam")


class Shampoo(Optimizer):
    """L <- b2 L + (1 - b2) G G^T;  R <- b2 R + (1 - b2) G^T G;  v <- m v - (1 - m) L^-e G R^-e;  w <- (1 - a wd) w + a v.

    For leaves of any order: a factor for each of n axes, small ones joined, and e = 1/(2n). learning_rate: a; momentum: m;
    weight_decay: wd, each a scalar, a `PerStep`, an array of a parameter's shape, or a pytree prefix of the parameters with
    such leaves; the others one value a leaf, or one per step. b2: None for sums, L <- L + G G^T (Gupta, Koren and Singer
    2018); else averages, divided by 1 - b2^t. exponent: e, if not 1/(2n); it can be learned. ridge, eps: a root is that of
    L + (ridge tr(L)/n + eps) I.

    every: k, roots are computed at steps 0, k, 2k, .. and held between, as the identity where there was no gradient yet. The
    link that holds them is set anew then but for 2^-16 of what it held, which costs 16/k bits an entry and step.
    block_size: axes are cut into pieces of at most that, each tile a leaf of its own; axes of a leaf of more than two that
    fit together into one piece are one. None: no cuts. Axes longer than max_size, and leaves of one axis, have a diagonal.
    graft: the size of a leaf's step is that of another rule, "sgd", "adagrad", "rmsprop" or "adam" (rmsprop with its
    correction), with the same eps, before the momentum. root: "eigh", or "newton", products alone, for e = 1/(2n).
    preconditioner: "constant" takes no derivative through the factors: hypergradients are approximate then, which
    `Trained.status` says.

    State: {"factors": a vector for each leaf, upper triangles and diagonals; "roots", of the same form, if k > 1; "square",
    like params, with adagrad, rmsprop and adam; "velocity": like params; "factors_weight": 1 - b2^t}.
    Source: Algorithms I and II of Anil et al. (2020), with the moments of Gupta et al.
    """

    learning_rate: Any
    momentum: Any = 0.9
    b2: Any = 0.999
    weight_decay: Any = 0.0
    exponent: Any = None
    ridge: Any = 1e-6
    eps: Any = 1e-10
    every: int = eqx.field(static=True, kw_only=True, default=1)
    block_size: int | None = eqx.field(static=True, kw_only=True, default=128)
    max_size: int = eqx.field(static=True, kw_only=True, default=8192)
    graft: str = eqx.field(static=True, kw_only=True, default="none")
    root: str = eqx.field(static=True, kw_only=True, default="eigh")
    preconditioner: str = eqx.field(static=True, kw_only=True, default="differentiated")

    def __check_init__(self) -> None:
        for field in ("every", "max_size", *(["block_size"] if self.block_size is not None else [])):
            check_int(self, field, 1)
        check_choice(self, "graft", GRAFTS)
        check_choice(self, "root", ("eigh", "newton"))
        check_choice(self, "preconditioner", ("differentiated", "constant"))
        check_positive(self, "exponent")
        if self.b2 is None and self.graft in ("rmsprop", "adam"):
            raise ValueError(f'hg.Shampoo: graft={self.graft!r} is made of averages: give `b2`, or take "adagrad".')
        if self.root == "newton" and self.exponent is not None:
            raise ValueError('hg.Shampoo: root="newton" has e = 1/(2n) alone; for an `exponent`, take root="eigh".')

    @property
    def chain(self) -> tuple[Link, ...]:  # type: ignore[override]
        cut = (self.every, self.block_size, self.max_size)
        return _chain(_Form(*cut, self.graft, self.root, self.preconditioner == "constant", self.b2 is not None))

    @property
    def weights(self) -> dict[str, str]:  # type: ignore[override]
        return {} if self.b2 is None else {"factors_weight": "b2"}

    @property
    def approximate(self) -> str:  # type: ignore[override]
        return "hg.Shampoo's preconditioner is taken as constant" if self.preconditioner == "constant" else ""

    @property
    def by_step(self) -> bool:  # type: ignore[override]
        return self.every == 1

    def hyperparameters(self) -> dict[str, Any]:
        return {name: x for name, x in super().hyperparameters().items() if x is not None}

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        check_of_leaves(self, h, ("b2", "exponent", "ridge", "eps"))
        new = {key: value for key, value in h.items() if key not in self.weights} | decay_of(h, steps)
        if self.b2 is not None:
            new["unbias"] = 1 / bias_correction(h["b2"], h.get("factors_weight"), steps)
        return new | schedule(h, self.every, steps) if self.every > 1 else new


class _Form(NamedTuple):
    """What of the rule is fixed; hashable."""

    every: int
    block_size: int | None
    max_size: int
    graft: str
    root: str
    constant: bool
    averages: bool

    def tiles(self, leaf: Array) -> Tiles:
        return tiles(leaf.shape, self.block_size, self.max_size)

    def start(self, leaf: Array) -> Array:
        if leaf.ndim < 2:
            _say_once()
        return jnp.zeros_like(self.tiles(leaf).identity(leaf.dtype))

    def factors(self, h: View, z: View, g: Array) -> Array:
        return _share(h, self.averages) * self.tiles(g).squares(g)

    def square(self, h: View, z: View, g: Array) -> Array:
        return _share(h, self.graft != "adagrad") * g * g

    def roots_of(self, h: View, factors: Array, own: Tiles) -> Array:
        """Of the ridged factors: the vector."""
        factors = factors * h.unbias if self.averages else factors
        e = getattr(h, "exponent", 1 / (2 * own.order))

        def power(a: Array) -> Array:
            n = a.shape[-1]
            trace = jnp.trace(a, axis1=-2, axis2=-1)
            a = self.begun(trace, a, lambda: jnp.eye(n, dtype=a.dtype))
            ridge = h.ridge * trace / n + h.eps
            if self.root == "eigh":
                return inverse_power(a, e, ridge)
            return inverse_root(a + ridge[:, None, None] * jnp.eye(n, dtype=a.dtype), 2 * own.order)

        def of_numbers(d: Array) -> Array:
            mean = jnp.mean(d, axis=-1, keepdims=True)
            return (self.begun(mean, d, lambda: jnp.ones_like(d)) + h.ridge * mean + h.eps) ** -e

        return own.powers(factors, power, of_numbers)

    def begun(self, size: Array, factor: Array, one: Callable[[], Array]) -> Array:
        """One in place of zero, where no gradient has come yet and roots are held: the next ones would be multiplied by
        eps^-e, and 2^-16 of it would stay."""
        if self.every == 1:
            return factor
        return jnp.where(jnp.expand_dims(size, range(size.ndim, factor.ndim)) == 0, one(), factor)

    def velocity(self, h: View, z: View, g: Array) -> Array:
        roots = z.roots if self.every > 1 else self.roots_of(h, z.factors, self.tiles(g))
        step = self.tiles(g).times(jax.lax.stop_gradient(roots) if self.constant else roots, g)
        if self.graft != "none":
            step = step * (_norm(self.grafted(h, z, g)) / _norm(step))
        return (h.momentum - 1) * step

    def grafted(self, h: View, z: View, g: Array) -> Array:
        """The step whose size is taken."""
        if self.graft == "sgd":
            return g
        return g * jax.lax.rsqrt((z.square * h.unbias if self.graft == "adam" else z.square) + h.eps)


@functools.cache
def _chain(form: _Form) -> tuple[Link, ...]:
    decay = "b2" if form.averages else None
    links = [Link("factors", form.factors, decay=decay, start=form.start, wide=True)]
    if form.every > 1:
        nothing = lambda leaf: jnp.zeros_like(form.tiles(leaf).identity(leaf.dtype))  # noqa: E731
        roots = lambda h, z, g: form.roots_of(h, z.factors, form.tiles(g))  # noqa: E731
        links.append(held_link("roots", roots, form.every, nothing, wide=True))
    if form.graft in ("adagrad", "rmsprop", "adam"):
        decay = None if form.graft == "adagrad" else "b2"
        links.append(Link("square", form.square, decay=decay, wide=True))
    links.append(Link("velocity", form.velocity, decay="momentum"))
    return (*links, decaying(lambda h, z: h.learning_rate * z.velocity))


def _share(h: View, averaged: bool) -> Any:
    return 1 - h.b2 if averaged else 1


def _norm(x: Array) -> Array:
    """Frobenius, with a finite derivative at zero."""
    return jnp.sqrt(jnp.sum(x * x) + jnp.finfo(x.dtype).tiny)


@functools.cache
def _say_once() -> None:
    warnings.warn(
        "hg.Shampoo: leaves of fewer than two axes have a diagonal of second moments in place of matrices (Adagrad, or "
        "RMSProp with b2). For another rule there, see hg.partition.",
        stacklevel=2,
    )
