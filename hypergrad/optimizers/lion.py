"""Lion, whose parameters move by signs, and its smooth form."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.chain import Link, Optimizer, View
from hypergrad.optimizers.decoupled import decay_of, decaying


_LEAK = "what is left of the direction before"


def _ahead(h: View, z: View, g: Array) -> Array:
    return h.b1 * z.mean + (1 - h.b1) * g  # the old mean: its link comes after


_MEAN = Link("mean", lambda h, z, g: (1 - h.b2) * g, decay="b2")
_SIGNS = (
    Link("direction", lambda h, z, g: jnp.sign(_ahead(h, z, g)), decay=_LEAK, bits_a_step=2),
    _MEAN,
    decaying(lambda h, z: -h.learning_rate * jnp.round(z.direction)),
)
_SMOOTH = (
    Link("direction", lambda h, z, g: (15 / 16) * jnp.tanh(_ahead(h, z, g) / h.temperature), decay=_LEAK, bits_a_step=4),
    _MEAN,
    decaying(lambda h, z: -h.learning_rate * z.direction),
)


class Lion(Optimizer):
    """u <- u/4 + sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g;  w <- (1 - a wd) w - a round(u) (Chen et al. 2023).

    |u| never exceeds 4/3, so that round(u) is the sign: this is `optax.lion` itself, at 2 + log2(1/b2) bits a parameter and
    step. learning_rate: a; weight_decay: wd; b1: of the direction; b2: in [2^-16, 1 - 2^-16]. Each a scalar, a `PerStep`, an
    array of a parameter's shape, or a pytree prefix of the parameters with such leaves.

    A sign has no derivative: only the learning rate, the decay and the initial parameters have a gradient, which does not
    know that a sign may change. With a `temperature` T, a hyperparameter like the others, the direction is smooth instead,
    u <- u/16 + (15/16) tanh((b1 m + (1 - b1) g) / T) and w <- (1 - a wd) w - a u: another algorithm, at 4 + log2(1/b2) bits,
    close to Lion where T is small beside the gradients, and every hyperparameter has its gradient. Increments of m are
    rounded to 2^-32 (float32 parameters): none is left where |g| stays below 1.2e-8 at b2 = 0.99.
    State: {"direction", "mean": like params}.
    """

    learning_rate: Any
    b1: Any = 0.9
    b2: Any = 0.99
    weight_decay: Any = 1e-3
    temperature: Any = None

    entrywise = True
    by_step = True

    @property
    def chain(self) -> tuple[Link, ...]:  # type: ignore[override]
        return _SIGNS if self.temperature is None else _SMOOTH

    def hyperparameters(self) -> dict[str, Any]:
        return {name: x for name, x in super().hyperparameters().items() if x is not None}

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        left = 1 / 4 if self.temperature is None else 1 / 16
        return {**h, **decay_of(h, steps), _LEAK: jnp.full((1,), left, h["learning_rate"].dtype)}
