"""Schedule-Free AdamW, which averages its iterates instead of decaying its rate, by a gradient link."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._placement import at_hand
from hypergrad.exact import FINE_DENOMINATOR
from hypergrad.hypers import natural
from hypergrad.optimizers.adam import SQUARE, bias_correction, root
from hypergrad.optimizers.chain import PARAMS, Link, View
from hypergrad.optimizers.decoupled import kept
from hypergrad.optimizers.expand import broadcast_prefix
from hypergrad.optimizers.gradient_link import GradientLinked
from hypergrad.schedules import PerStep, spread


_KEPT = "(1 - c) (1 - (1 - b1) learning_rate weight_decay)"  # of the parameters, as errors name it


def _direction(h: View, z: View, g: Array) -> Array:
    return h.learning_rate * g / (root(z.square * h.unbias_square) + h.eps)


def _base(h: View, z: View, g: Array) -> Array:
    del g
    return -_direction(h, z, z.gradient) - (h.learning_rate * h.weight_decay) * z.params


def _step(h: View, z: View, g: Array) -> Array:
    return h.share * z.base - ((1 - h.share) * (1 - h.b1)) * _direction(h, z, g)


class ScheduleFreeAdamW(GradientLinked):
    """z <- z - a u;  x <- (1 - c) x + c z;  the gradient is taken at y = b1 x + (1 - b1) z (Defazio et al. 2024).

    u = d / (sqrt(s / c2) + eps) + weight_decay y, with s <- b2 s + (1 - b2) g^2 and d <- 2^-k d + (1 - 2^-k) g in place of
    g, without which the step has no inverse (`with_gradient_link`); c = a'^p / sum a'^p over the steps so far, a' the
    largest rate so far and p = weight_lr_power. `params` are y; evaluate the model at x, which is `averaged(params, state)`.
    As `optax.contrib.schedule_free_adamw` but for d: there x is recovered from y and z, here y moves directly, y <- (1 - c)
    y + c z - (1 - c) (1 - b1) a u with the new z. c is 1 at the first step, where 1 - 2^-15 is used. Where rates are
    `PerStep`, a' has the step's own; optax's has the next step's. Of rates that tie for the largest, which are a kink of a',
    each has its share of the derivative.

    Hyperparameters as for `AdamW`; b1 in (0, 1), the same at all steps; bits: k, from 1 to 16, an int. A run that goes on
    from a `state` begins its average anew. k + log2(1/b2) bits a parameter and step, and log2 T in all for T steps. State:
    {"gradient", "square", "base": like params; "square_weight"}; "base", z, begins where the parameters do.
    """

    learning_rate: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: Any = 1e-8
    weight_decay: Any = 0.0
    weight_lr_power: Any = 2.0

    rule_chain = (
        SQUARE,
        Link("base", _base, start=lambda w: w, position=True),
        Link(PARAMS, _step, decay=_KEPT, denominator=FINE_DENOMINATOR, may_be_one=True, bits_a_step=1 / 4),
    )
    weights = {"square_weight": "b2"}
    entrywise = True

    def hyperparameters(self) -> dict[str, Any]:
        for x in jax.tree.leaves(spread(self.b1), is_leaf=lambda x: isinstance(x, PerStep)):
            if isinstance(x, PerStep):
                _check_constant(jnp.shape(jax.tree.leaves(x.values)[0]))
        return super().hyperparameters()

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        _check_share(h["b1"])
        rate = jnp.broadcast_to(h["learning_rate"], (steps, *h["learning_rate"].shape[1:]))
        largest = jax.lax.cummax(rate, axis=0)
        power, unit = h["weight_lr_power"], jax.lax.stop_gradient(largest[-1:])
        unit = jnp.where(unit > 0, unit, 1)
        weight = (largest / unit) ** power  # by a number that share does not depend on: 1 where rates are alike
        if power.shape[0] > 1:
            weight *= jnp.exp((power - jax.lax.stop_gradient(power[-1:])) * jnp.log(unit))
        total = jnp.cumsum(weight, axis=0)
        nothing = total == 0
        share = jnp.minimum(jnp.where(nothing, 0, weight / jnp.where(nothing, 1, total)), 1 - 2.0**-15)
        decay = (1 - h["b1"]) * h["learning_rate"] * h["weight_decay"]
        lost = share + decay - share * decay
        c2 = bias_correction(h["b2"], h.get("square_weight"), steps)
        given = {key: value for key, value in h.items() if key not in self.weights}
        return {**super().prepare(given, steps), "share": share, _KEPT: kept(lost, steps), "unbias_square": 1 / c2}

    def averaged(self, params: Any, state: dict[str, Any]) -> Any:
        """x = (y - (1 - b1) z) / b1, where the model is evaluated. params, state: as `hg.train` returns them; leaves that
        another rule moves, which have no z, stay as they are."""
        leaves, tree = jax.tree.flatten(params)
        decays = broadcast_prefix("b1", natural(self.b1), params)
        places = tree.flatten_up_to(state["base"])  # type: ignore[attr-defined]
        return jax.tree.unflatten(tree, [_average(*row) for row in zip(leaves, places, decays, strict=True)])


def _average(y: Array, z: Array | None, b1: Any) -> Array:
    if z is None:
        return y
    if isinstance(b1, PerStep):
        _check_constant(jnp.shape(b1.values))
        b1 = b1.values[0]
    _check_share(b1)
    return ((y - (1 - b1) * z) / b1).astype(y.dtype)


def _check_share(b1: Any) -> None:
    """Where its values are known."""
    if at_hand(b1) and not np.all((np.asarray(b1) > 0) & (np.asarray(b1) < 1)):
        raise ValueError(f"hg.ScheduleFreeAdamW: `b1` must be in (0, 1), the share of x in y; got {b1!s}.")


def _check_constant(shape: tuple[int, ...]) -> None:
    if (steps := math.prod(shape[:1])) > 1:
        raise ValueError(
            f"hg.ScheduleFreeAdamW: `b1` has a value for each of {steps} steps. y = b1 x + (1 - b1) z moves directly, which "
            "holds for one b1 alone: where it grew, y would have to grow too, not decay. Give one for all steps."
        )
