"""Muon and NorMuon, which orthogonalize the momentum of a matrix, and the usual split with AdamW."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.adam import AdamW
from hypergrad.optimizers.chain import Link, Optimizer, View
from hypergrad.optimizers.choices import check_choice, check_of_leaves
from hypergrad.optimizers.decoupled import decay_of, decaying
from hypergrad.optimizers.gradient_link import BITS, check_bits, forgotten, gradient_link
from hypergrad.optimizers.orthogonal import METHODS, orthogonalized
from hypergrad.optimizers.partition import Partition, partition


_MOMENTUM = Link("momentum", lambda h, z, g: (1 - h.momentum) * g, decay="momentum")
SCALES: dict[str, Callable[[int, int], float]] = {  # of a matrix [inputs, outputs]
    "width": lambda rows, columns: math.sqrt(max(1, columns / max(rows, 1))),
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "none": lambda rows, columns: 1.0,
}


class _Form(NamedTuple):
    """What of a rule is fixed; hashable."""

    nesterov: bool
    bits: int
    method: str
    scale: str

    def direction(self, name: str, h: View, z: View) -> Array:
        """NS of what the step follows."""
        m = h.momentum * z.momentum + (1 - h.momentum) * z.gradient if self.nesterov else z.momentum
        if m.ndim != 2:
            raise ValueError(
                f"hg.{name} orthogonalizes matrices; a leaf of shape {m.shape} is none. Give it another rule, as "
                "hg.muon_with_adamw does, or hg.partition."
            )
        return orthogonalized(m, self.method)

    def scaled(self, x: Array) -> Array:
        return SCALES[self.scale](*x.shape) * x

    def linked(self, *chain: Link) -> tuple[Link, ...]:
        return (gradient_link(self.bits), *chain) if self.nesterov else chain


class Muon(Optimizer):
    """m <- b m + (1 - b) g;  w <- (1 - a wd) w - a s NS(m), for matrices (Jordan et al. 2024).

    NS: five steps of Newton and Schulz, or of `method="polar_express"`, that take the singular values towards 1
    (`hypergrad.optimizers.orthogonal`). learning_rate: a; momentum: b in [2^-16, 1 - 2^-16]; weight_decay: wd. Each a
    scalar, a `PerStep`, an array of a parameter's shape, or a pytree prefix of the parameters with such leaves. scale: s of
    a matrix [inputs, outputs]: "width", sqrt(max(1, outputs / inputs)), as `optax.contrib.muon` and its authors; "rms", 0.2
    sqrt(max(inputs, outputs)), with which AdamW's rates do (Liu et al. 2025); or "none".

    log2(1/b) bits a parameter and step, 0.074 at 0.95. With `nesterov`, NS(b m + (1 - b) d) with d <- 2^-k d + (1 - 2^-k) g
    in place of g, at k = `bits` more (`with_gradient_link`). NS is blind to the size of m, so that a correction for its
    start, as optax has one, changes nothing; with `nesterov` optax corrects m and g each for itself, so that g weighs more
    in the first 1/(1 - b) steps than here and in its authors' code. State: {"momentum": like params}, and "gradient" with
    `nesterov`.
    """

    learning_rate: Any
    momentum: Any = 0.95
    weight_decay: Any = 0.0
    nesterov: bool = eqx.field(static=True, kw_only=True, default=False)
    bits: int = eqx.field(static=True, kw_only=True, default=BITS)
    method: str = eqx.field(static=True, kw_only=True, default="newton_schulz")
    scale: str = eqx.field(static=True, kw_only=True, default="width")

    linear = True
    by_step = True

    def __check_init__(self) -> None:
        check_bits(self)
        check_choice(self, "method", METHODS)
        check_choice(self, "scale", SCALES)

    @property
    def _form(self) -> _Form:
        return _Form(self.nesterov, self.bits, self.method, self.scale)

    @property
    def chain(self) -> tuple[Link, ...]:  # type: ignore[override]
        return _muon(self._form)

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        return {**h, **decay_of(h, steps), **(forgotten(h, self.bits) if self.nesterov else {})}


@functools.cache
def _muon(form: _Form) -> tuple[Link, ...]:
    def step(h: View, z: View) -> Array:
        return -h.learning_rate * form.scaled(form.direction("Muon", h, z))

    return form.linked(_MOMENTUM, decaying(step))


class NorMuon(Muon):
    """`Muon` whose columns have the same size: v <- b2 v + (1 - b2) mean_rows(O^2), and O / sqrt(v) in place of O = NS(m).

    w <- (1 - a wd) w - a s P |O| / |P|, with P = O / sqrt(v + 1e-16) and Frobenius norms: a column is a neuron, of a matrix
    [inputs, outputs] (Li et al. 2025). b2: in [2^-16, 1 - 2^-16], one value a leaf or one per step; all others as for
    `Muon`. O is computed twice a step. State: {"momentum": like params, "neurons": [1, outputs]}, and "gradient" with
    `nesterov`.
    """

    b2: Any = 0.95

    linear = True
    by_step = True

    @property
    def chain(self) -> tuple[Link, ...]:  # type: ignore[override]
        return _normuon(self._form)

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        check_of_leaves(self, h, ("b2",), "means over its rows do")
        return super().prepare(h, steps)


@functools.cache
def _normuon(form: _Form) -> tuple[Link, ...]:
    def neurons(h: View, z: View, g: Array) -> Array:
        del g
        squares = form.direction("NorMuon", h, z) ** 2
        return (1 - h.b2) * jnp.sum(squares, axis=0, keepdims=True)[: len(squares)] / max(len(squares), 1)

    def step(h: View, z: View) -> Array:
        whole = form.direction("NorMuon", h, z)
        even = whole * jax.lax.rsqrt(z.neurons + 1e-16)
        return -h.learning_rate * form.scaled(even * (_norm(whole) / _norm(even)))

    return form.linked(_MOMENTUM, Link("neurons", neurons, decay="b2", start=_one_a_column), decaying(step))


def _norm(x: Array) -> Array:
    """Frobenius, whose derivative at zero is zero."""
    return jnp.sqrt(jnp.sum(x * x) + 1e-16)


def _one_a_column(w: Array) -> Array:
    return jnp.zeros_like(w[:1])


def muon_with_adamw(
    learning_rate: Any,
    momentum: Any = 0.95,
    weight_decay: Any = 0.0,
    *,
    adam_learning_rate: Any = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    labels: Any = None,
    **options: Any,
) -> Partition:
    """Matrices by `Muon`, all else by `AdamW`: the usual split, that of `optax.contrib.muon`.

    Its defaults are others: there Nesterov's momentum for both, and a decay of AdamW's own. adam_learning_rate: None is that
    of Muon, which fits with `scale="rms"`. labels: "muon" or "adamw" for each leaf, a pytree prefix or a function of the
    parameters (`hg.partition`); None: "muon" for every leaf of two axes. Embeddings and the last layer are matrices, too,
    which Muon's authors give to AdamW. options: of `Muon`. The gradient of the result has what Muon got in `rules["muon"]`,
    what AdamW got in `rules["adamw"]`; weight_decay is one value for both, differentiated in each.
    """
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    rules = {
        "muon": Muon(learning_rate, momentum, weight_decay, **options),
        "adamw": AdamW(rate, b1, b2, eps, weight_decay),
    }
    return partition(rules, matrices if labels is None else labels)


def matrices(params: Any) -> Any:
    """ "muon" for every leaf of two axes, "adamw" for the others."""
    return jax.tree.map(lambda x: "muon" if jnp.ndim(x) == 2 else "adamw", params)
