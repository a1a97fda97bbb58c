"""Curvature in blocks that have factors: multiplied, inverted and taken apart without a matrix of a block's size.

Invariant: a block is Q diag(values) Q' with Q = kron(qa, qb), group by group, in the order in which the layer has [in, out].
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad import _programs as programs
from hypergrad._cpu_kernels import eigh
from hypergrad.curvature._batch import Batch, columns, squares_of_leaf
from hypergrad.curvature._kronecker import Diagonal, Kronecker
from hypergrad.curvature._order import factored
from hypergrad.curvature._passes import Inputs, spread, wide
from hypergrad.curvature._quantities import analysed, gathered, quantities
from hypergrad.curvature._uses import Found


FACTORED = {"kfac": "kfac", "kflr": "kflr", "kfra": "kfra", "ekfac": "kfac", "ekflr": "kflr"}  # -> whose factors


class Eigen(NamedTuple):
    """One parameter's block: kron(qa, qb) diag(values) kron(qa, qb)'."""

    qa: Array | None  # [groups, in, in]; None: the identity
    qb: Array | None  # [groups, out, out]; None: the identity
    values: Array  # [groups, in, out]

    def turned(self, x: Array) -> Array:
        """Q' x: [groups, in, out]."""
        x = x if self.qa is None else self.qa.mT @ x
        return x if self.qb is None else x @ self.qb

    def back(self, x: Array) -> Array:
        """The inverse of `turned`."""
        x = x if self.qa is None else self.qa @ x
        return x if self.qb is None else x @ self.qb.mT

    def diagonal(self) -> Array:
        qa, qb = (None if q is None else q**2 for q in (self.qa, self.qb))
        return Eigen(qa, qb, self.values).back(self.values)


class Factored:
    """The blocks of all parameters, of all batches together."""

    def __init__(self, loss: Any, params: Any, theta: Any, batches: Iterable[Any], matrix: str, key: Array | None) -> None:
        self.leaves, name, parts = jax.tree.leaves(params), FACTORED[matrix], list(batches)
        keys = [None if key is None else jax.random.fold_in(key, i) for i in range(len(parts))]
        self.found = analysed(loss, params, theta, parts[0])[0]
        averaged = functools.partial(_average, parts, keys)
        is_block = lambda x: isinstance(x, (Kronecker, Diagonal))  # noqa: E731
        factors = averaged(lambda batch, key: quantities(loss, params, theta, batch, name, key=key)[name])
        self.blocks = [_eigen(x) for x in jax.tree.leaves(factors, is_leaf=is_block)]
        if matrix != name:
            of_batch = functools.partial(_corrected, loss, params, theta, self.blocks, name == "kfac")
            values = averaged(of_batch)
            self.blocks = [own._replace(values=x) for own, x in zip(self.blocks, values, strict=True)]

    def times(self, leaves: list[Array], power: Callable[[Array], Array] = lambda values: values) -> list[Array]:
        """Q diag(power(values)) Q' of an array for each parameter."""
        result = []
        for i, (x, own) in enumerate(zip(leaves, self.blocks, strict=True)):
            turned = own.turned(arranged(self.found, i, x))
            result.append(_placed(self.found, i, x, own.back(power(own.values) * turned)))
        return result

    def diagonal(self) -> list[Array]:
        return [
            _placed(self.found, i, x, own.diagonal())
            for i, (x, own) in enumerate(zip(self.leaves, self.blocks, strict=True))
        ]

    def trace(self) -> Array:
        return sum((jnp.sum(own.values) for own in self.blocks), jnp.zeros(()))


def _average(batches: list[Any], keys: list[Any], quantity: Callable[[Any, Any], Any]) -> Any:
    """Over batches, each counted by its examples."""
    sizes = [jax.tree.leaves(batch)[0].shape[0] for batch in batches]
    found = [quantity(batch, key) for batch, key in zip(batches, keys, strict=True)]
    total = lambda xs: sum(n * wide(x) for n, x in zip(sizes, xs, strict=True))  # of 16 bits, this may overflow  # noqa: E731
    return jax.tree.map(lambda *xs: (total(xs) / sum(sizes)).astype(xs[0].dtype), *found)


def _eigen(block: Kronecker | Diagonal) -> Eigen:
    if isinstance(block, Diagonal):
        return Eigen(None, None, block.values.reshape(1, 1, -1))
    b, qb = eigh(block.b)
    if block.a is None:
        return Eigen(None, qb, b[:, None, :])
    a, qa = eigh(block.a)
    return Eigen(qa, qb, a[:, :, None] * b[:, None, :])


def _corrected(loss: Any, params: Any, theta: Any, blocks: list[Eigen], sampled: bool, batch: Any, key: Any) -> list[Array]:
    """The diagonal of mean_n J_n' H_n J_n in the eigenvectors of each block, H_n exact or of labels that are drawn."""
    found, end, constants = analysed(loss, params, theta, batch)
    given = Inputs(constants, *(list(map(programs.owned, jax.tree.leaves(x))) for x in (params, theta, batch)))

    def compute(given: Inputs, key: Any, blocks: list[Eigen]) -> list[Array]:
        of_batch: Batch = gathered(found, end, {"kfac" if sampled else "kflr"}, 1, "expand", given, key)
        signals, scales = columns(of_batch, sampled)
        turned = lambda i, own: lambda g: own.turned(arranged(found, i, g))  # noqa: E731
        return [squares_of_leaf(of_batch, i, signals, scales, turned(i, own)) for i, own in enumerate(blocks)]

    return jax.jit(compute)(given, key, blocks)


def arranged(found: Found, leaf: int, x: Array) -> Array:
    """An array like a parameter as its layer has it, [groups, in, out]; of what has no factors: [1, 1, all]."""
    if not factored(found, leaf):
        return x.reshape(1, 1, -1)
    use = found.of(leaf)[0]
    assert use.layer is not None
    return use.layer.arrange(found.flat.equations[use.index], use.place, use.view.places(x))  # in x's own dtype


def _placed(found: Found, leaf: int, like: Array, x: Array) -> Array:
    """The inverse of `arranged`."""
    if not factored(found, leaf):
        return x.reshape(like.shape)
    return spread(found, found.of(leaf)[0], like, x)
