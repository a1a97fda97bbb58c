"""Steps divided by a diagonal of curvature: the batch's own, averaged over steps."""

from collections.abc import Callable
from typing import Any

from jax import Array

from hypergrad.curvature import quantities
from hypergrad.optimizers.chain import Link, Optimizer, View


EXACT, SAMPLED = "ggn_diagonal", "ggn_diagonal_mc"  # signals


def _exact(loss: Callable[..., Any], params: Any, theta: Any, batch: Any, key: Array) -> Any:
    return quantities(loss, params, theta, batch, EXACT)[EXACT]


def sampled(loss: Callable[..., Any], params: Any, theta: Any, batch: Any, key: Array) -> Any:
    return quantities(loss, params, theta, batch, SAMPLED, key=key)[SAMPLED]


def _velocity(h: View, z: View, g: Array) -> Array:
    return -(1 - h.momentum) * (g + h.l2 * z.params) / (z.curvature + h.damping + h.l2)


def _chain(signal: str) -> tuple[Link, ...]:
    return (
        Link("curvature", lambda h, z, g: (1 - h.decay) * g, decay="decay", wide=True, signal=signal),
        Link("velocity", _velocity, decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


class DiagonalGGN(Optimizer):
    """c <- r c + (1 - r) diag G;  v <- m v - (1 - m) (g + l2 w) / (c + damping + l2);  w <- w + a v.

    G: the batch's generalized Gauss-Newton matrix at the old parameters (`hg.curvature.quantities`, "ggn_diagonal"), for any
    loss that is a mean over examples. learning_rate: a; damping, l2; momentum: m; decay: r, the last two in
    [2^-16, 1 - 2^-16], used as multiples of 2^-16. Each a scalar, a `PerStep`, an array of a parameter's shape, or a pytree
    prefix of the parameters with such leaves. State: {"curvature", "velocity": like params}. log2(1/r) + log2(1/m) bits per
    parameter and step.

    Source: Equation 4 of BackPACK (Dangel, Kunstner and Hennig 2020), which has neither momentum nor average. The least that
    a rule needs to have an inverse are decays of 2^-16: momentum and decay of 2^-16 are that rule to 1.5e-5, at 32 bits per
    parameter and step.
    """

    learning_rate: Any
    damping: Any = 1e-2
    momentum: Any = 0.9
    decay: Any = 0.9
    l2: Any = 0.0

    signals = {EXACT: _exact}
    of_examples = True
    chain = _chain(EXACT)


class DiagonalGGNMC(DiagonalGGN):
    """`DiagonalGGN` with the diagonal of one label that the model draws an example, by the step's own key.

    As cheap as two gradients, whatever the number of outputs. The loss must end in a likelihood that is known: one of
    optax's cross entropies or squared errors, `jax.nn.log_softmax`, or `hg.curvature.likelihood`. Hyperparameters and state
    as for `DiagonalGGN`.
    """

    signals = {SAMPLED: sampled}
    chain = _chain(SAMPLED)
