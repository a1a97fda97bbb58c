"""Every entry is a loss as people write them, tiny and drawn once with NumPy: the same numbers in float32 and in float64.

The entries themselves are in the modules `zoo_*`, which register here; `entries()` has all of them by name, in a fixed
order. `experiments/zoo.py` trains each for a few steps and compares its hypergradient along `hg.Reversible` with that along
`hg.Unrolled`, which must work on every entry.
"""

import importlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np


DISTINCT = 5  # batches of an entry: a run goes through them again and again
MODULES = (
    "activations",
    "layers",
    "sequences",
    "arrays",
    "control",
    "criteria",
    "models",
    "solvers",
    "precision",
    "rules",
    "surrogates",
)


class Problem(NamedTuple):
    """What a run takes: everything that `hg.train` is given, but for the rule and the number of steps."""

    loss: Callable[..., Any]  # (params, theta, batch) -> scalar, or (scalar, evidence) where there are statistics
    params: Any
    theta: Any  # its float leaves matter to the trained parameters, each of them
    data: Any  # pytree with leading axis `DISTINCT`: what a step sees
    value: Callable[[Any], jax.Array] | None = None  # of what `hg.train` returns; None: `probe` of its parameters
    statistics: Any = None
    rate: float = 0.3  # of `hg.SGD` with momentum 0.9


class Entry(NamedTuple):
    name: str
    make: Callable[[Any], Problem]  # of a dtype; call it inside of `jax.enable_x64` for float64
    smooth: bool  # central differences of the run make sense
    own_rule: bool  # a derivative rule of its own, by which what training follows is not a gradient field
    tolerance: float  # relative, in float64: roads that round 16-bit numbers in another order agree to that precision only
    alone: bool  # known to be rounded otherwise in the two passes by some version: never diluted by others in one program


ENTRIES: dict[str, Entry] = {}


def entry(
    smooth: bool = True, own_rule: bool = False, tolerance: float = 1e-9, alone: bool = False
) -> Callable[[Callable[["Draw"], Problem]], Callable[["Draw"], Problem]]:
    """Registers a function of a `Draw` under its own name."""

    def register(function: Callable[["Draw"], Problem]) -> Callable[["Draw"], Problem]:
        name = function.__name__
        if name in ENTRIES:
            raise ValueError(f"two entries are called {name!r}.")
        make = lambda dtype: function(Draw(name, dtype))  # noqa: E731
        ENTRIES[name] = Entry(name, make, smooth, own_rule, tolerance, alone)
        return function

    return register


def entries() -> dict[str, Entry]:
    """All of them."""
    for module in MODULES:
        importlib.import_module(f"zoo_{module}")
    return ENTRIES


class Draw:
    """Numbers of one entry, the same whenever it is made: of float32's precision, in the dtype that is asked for."""

    def __init__(self, name: str, dtype: Any) -> None:
        self.rng, self.dtype = np.random.default_rng(zlib.crc32(name.encode())), dtype
        self.seed = zlib.crc32(name.encode()) % 2**31

    def __call__(self, *shape: int, scale: float = 1.0) -> jax.Array:
        """Normal draws: parameters."""
        return self.number(scale * self.rng.normal(size=shape))

    def number(self, x: Any) -> jax.Array:
        return jnp.asarray(np.asarray(x, np.float32), self.dtype)

    def full(self, value: float, *shape: int) -> jax.Array:
        return self.number(np.full(shape, value))

    def rows(self, *shape: int, scale: float = 1.0) -> jax.Array:
        """Normal draws for each batch."""
        return self(DISTINCT, *shape, scale=scale)

    def integers(self, high: int, *shape: int) -> jax.Array:
        """From 0 to high - 1, for each batch."""
        return jnp.asarray(self.rng.integers(0, high, (DISTINCT, *shape)), jnp.int32)

    def keys(self) -> jax.Array:
        """A key for each batch."""
        return jax.random.split(jax.random.key(self.seed), DISTINCT)


def probe(params: Any) -> jax.Array:
    """A number in which every parameter counts, each with another weight: the cotangent that a reverse pass starts from."""
    return sum(jnp.mean(jnp.sin(3 * w.astype(_wide(w)) + i)) for i, w in enumerate(jax.tree.leaves(params)) if w.size)


def _wide(w: jax.Array) -> Any:
    return jnp.promote_types(w.dtype, jnp.float32)


def uniform(key: jax.Array, like: jax.Array) -> jax.Array:
    """Draws from (0, 1), made of bits: the same however they are compiled, in float32 and in float64."""
    return jax.random.uniform(key, like.shape, jnp.float32).astype(like.dtype) * (1 - 2.0**-12) + 2.0**-13


def normal(key: jax.Array, like: jax.Array) -> jax.Array:
    return jax.scipy.special.ndtri(uniform(key, like))


def mse(prediction: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((prediction - y) ** 2)


def squares(params: Any) -> jax.Array:
    """Of all weights: what an L2 penalty is made of."""
    return sum(jnp.sum(w * w) for w in jax.tree.leaves(params))


def mlp(draw: Draw, inputs: int = 3, hidden: int = 5, outputs: int | None = None) -> dict[str, jax.Array]:
    """The parameters of one hidden layer; one output is a vector of weights."""
    shape = (hidden,) if outputs is None else (hidden, outputs)
    return {"w": draw(inputs, hidden, scale=0.7), "b": draw(hidden, scale=0.1), "v": draw(*shape, scale=0.6)}


def net(p: Any, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jnp.tanh) -> jax.Array:
    return activation(x @ p["w"] + p["b"]) @ p["v"]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))
