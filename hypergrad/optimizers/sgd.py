"""Stochastic gradient descent with momentum, in the thesis's and in the deep-learning libraries' conventions."""

from typing import Any

from hypergrad.optimizers.chain import Link, Optimizer


class SGD(Optimizer):
    """v <- m v - (1 - m) g;  w <- w + a v  with the new v (thesis, Algorithm 5 with the index of v corrected).

    learning_rate: a; momentum: m in [2^-16, 1 - 2^-16], used as round(m 2^16) / 2^16. Each a scalar, a `PerStep`, an array
    of a parameter's shape, or a pytree prefix of the parameters with such leaves. State: {"velocity": like params}.
    """

    learning_rate: Any
    momentum: Any = 0.9

    chain = (
        Link("velocity", lambda h, z, g: (h.momentum - 1) * g, decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )
    linear = True
    entrywise = True


class HeavyBall(Optimizer):
    """v <- m v - g;  w <- w + a v  with the new v: `optax.sgd` and `torch.optim.SGD`, and SGD(a / (1 - m), m).

    learning_rate: a; momentum: m, as for `SGD`. State: {"velocity": like params}, minus the trace of those libraries.
    """

    learning_rate: Any
    momentum: Any = 0.9

    chain = (
        Link("velocity", lambda h, z, g: -g, decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )
    linear = True
    entrywise = True
