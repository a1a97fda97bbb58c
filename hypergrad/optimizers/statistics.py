"""Running statistics: means that follow what the loss measures, such as the averages of batch normalization.

Invariant: what a statistic follows is a function of the old parameters and the batch, and no gradient reads a statistic. So
what to take back is known as soon as the parameters are back, as it is for a link that follows the gradient.
"""

from typing import Any

import equinox as eqx

from hypergrad.optimizers.chain import STATISTICS, Link


MEANS = Link(STATISTICS, lambda h, z, g: (1 - h.decay) * g, decay="decay", wide=True, signal=STATISTICS)


class Statistics(eqx.Module):
    """s <- r s + (1 - r) e: means that follow the evidence e of each step, the second thing that the loss returns then.

    values: initial s, a pytree of real float arrays of any shapes. decay: r in [2^-16, 1 - 2^-16], used as round(r 2^16) /
    2^16; a scalar, a `PerStep`, an array of a statistic's shape, or a pytree prefix of `values` with such leaves. Both are
    differentiated. Quanta (float32): 2^-70 at worst, which adds up to noise of 5.5e-21 at r = 0.999; s may grow to 2^22.
    """

    values: Any
    decay: Any = 0.99
