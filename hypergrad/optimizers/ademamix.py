"""AdEMAMix, AdamW with a second, slower mean of the gradient, in optax's conventions."""

from typing import Any

from jax import Array

from hypergrad.exact import FINE_DENOMINATOR
from hypergrad.optimizers.adam import MEAN, SQUARE, AdamW, root_of
from hypergrad.optimizers.chain import Link, View
from hypergrad.optimizers.decoupled import decaying


def _step(h: View, z: View) -> Array:
    return -h.learning_rate * (h.unbias_mean * z.mean + h.alpha * z.slow) / (root_of(h, z) + h.eps)


class AdEMAMix(AdamW):
    """m, s as for `Adam`;  n <- b3 n + (1 - b3) g;  w <- (1 - a wd) w - a (m / c1 + alpha n) / (sqrt(s / c2) + eps).

    b3: of the slow mean, which begins at zero and is not corrected for it; used as a multiple of 2^-24, so that 0.9999 is
    what it says. Both it and alpha are scheduled by their authors: pass a `hg.PerStep`, or learn one. The others as for
    `AdamW`. As `optax.contrib.ademamix` (Pagliardini, Ablin and Grangier 2024), whose weight decay is 0 too. State: {"mean",
    "slow", "square": like params; "mean_weight", "square_weight"}.

    Quanta (float32 parameters): increments of n are rounded to 2^-32, so that at b3 = 0.9999 an entry has none where |g|
    stays below 1.2e-6, and one off by up to a fifth at 3e-6; those of a b3 for each weight to 2^-24. Scale the loss up: the
    steps do not see its unit.
    """

    b3: Any = 0.9999
    alpha: Any = 5.0
    weight_decay: Any = 0.0

    entrywise = True
    chain = (
        MEAN,
        Link("slow", lambda h, z, g: (1 - h.b3) * g, decay="b3", denominator=FINE_DENOMINATOR, bits_a_step=1 / 16),
        SQUARE,
        decaying(_step),
    )
