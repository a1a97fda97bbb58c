"""Kronecker factors: two second moments a layer, of its inputs and of derivatives in its outputs."""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Literal

from hypergrad.curvature._batch import Batch, Signals, columns, leaf_diagonal
from hypergrad.curvature._order import factored
from hypergrad.curvature._passes import factor, wide
from hypergrad.curvature._uses import Found


class Kronecker(NamedTuple):
    """The factors of a block of curvature: of a weight arranged as [groups, in, out], group by group, about kron(a, b).

    a: [groups, in, in] of the layer's inputs, or None for what is only added (a bias: its block is b itself).
    b: [groups, out, out] of derivatives in the layer's outputs.
    """

    a: Array | None
    b: Array


class Diagonal(NamedTuple):
    """The diagonal of a block that has no factors, like the parameter."""

    values: Array


def factors(batch: Batch, sampled: bool) -> list[Kronecker | Diagonal]:
    """KFAC (labels drawn by the model) or KFLR (the exact Hessian in the outputs)."""
    signals, scales = columns(batch, sampled)
    return [_factors(batch, i, signals, scales) for i in range(len(batch.weights))]


def _factors(batch: Batch, leaf: int, signals: Signals, scales: Array) -> Kronecker | Diagonal:
    found = batch.passes.found
    if leaf in found.shifts:
        b = jax.vmap(lambda signal: batch.gradients(leaf, signal))(signals)
        return Kronecker(None, _output_factor(b.reshape(*scales.shape, 1, 1, -1), scales))
    if not factored(found, leaf):
        return Diagonal(leaf_diagonal(batch, leaf, signals, scales).astype(batch.weights[leaf].dtype))
    a, b = _stacked(batch, leaf, signals)
    if batch.sharing == "reduce":
        a, b = a.mean(2, keepdims=True), b.sum(3, keepdims=True)
    return Kronecker(input_factor(a), _output_factor(b, scales))


def input_factor(a: Array) -> Array:
    """The second moment of inputs, mean over examples and positions: [groups, in, in]."""
    a = wide(a) / math.sqrt(a.shape[0] * a.shape[2])  # before: a pass over the result would be the longer one
    return _products(a, a)


def _output_factor(b: Array, scales: Array) -> Array:
    """The second moment of derivatives in outputs, over columns and positions, mean over examples: [groups, out, out]."""
    b = wide(b)
    scaled = b * scales.astype(b.dtype)[..., None, None, None]
    rows = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    return _products(rows(scaled), rows(b)) / scales.shape[1]


def _products(x: Array, y: Array) -> Array:
    """[rows, groups, positions, in] -> sum over rows and positions of x' y, [groups, in, in]."""
    if x.shape[1] > 1:
        return jnp.einsum("ngti,ngtj->gij", x, y)
    return (x.reshape(-1, x.shape[3]).T @ y.reshape(-1, y.shape[3]))[None]  # a group is a batch to XLA, which takes longer


def _stacked(batch: Batch, leaf: int, signals: Signals) -> tuple[Array, Array]:
    """(A [examples, groups, positions, in], B with a leading axis of columns): uses are further positions of a weight."""
    uses = batch.passes.found.of(leaf)
    pairs = [jax.vmap(lambda b, use=use: batch.matrices(use, b))(signals[0][use.index]) for use in uses]
    return jnp.concatenate([a[0] for a, _ in pairs], 2), jnp.concatenate([b for _, b in pairs], 3)


def kfra(batch: Batch) -> list[Kronecker | Diagonal]:
    """G of the outputs is the mean of H_n; G of a layer's output is the mean of J_n' G J_n, J_n to the next layer's."""
    found, averages = batch.passes.found, _averages(batch)
    return [_averaged(batch, found, i, averages) for i in range(len(batch.weights))]


def _averaged(batch: Batch, found: Found, leaf: int, averages: dict[int, Array]) -> Kronecker | Diagonal:
    uses = found.of(leaf)
    if len(uses) != 1 or not (leaf in found.shifts or factored(found, leaf)):
        raise ValueError(
            "'kfra' passes averages from layer to layer, and knows dense layers and biases, each used once, in sequence; "
            f"parameter leaf {leaf} is used otherwise. Take 'kflr', which has no such limits."
        )
    use, g = uses[0], averages[uses[0].index]
    shape = found.flat.equations[use.index].outvars[0].aval.shape
    count = g.shape[0]
    rows = jnp.eye(count, dtype=g.dtype).reshape(count, *shape)
    place = lambda row: jnp.broadcast_to(row, (batch.count, *shape))  # noqa: E731
    a, b = jax.vmap(lambda row: batch.matrices(use, place(row)))(rows)  # B of a unit of the output: which entry it is
    if a.shape[3] != 1:
        raise ValueError(
            "'kfra' is for layers that are used at one position an example; take 'kflr' for convolutions and sequences."
        )
    order = b[:, 0, :, 0]  # [outputs, groups, out]
    b = jnp.einsum("ogi,op,pgj->gij", order, g, order)
    return Kronecker(None if leaf in found.shifts else input_factor(a[0]), b)


def _averages(batch: Batch) -> dict[int, Array]:
    """G by the place of a layer's equation, as a matrix of its flat outputs."""
    passes, found, end = batch.passes, batch.passes.found, batch.passes.end
    assert end is not None
    chain = [i for i in passes.places if i <= end.outputs]
    _in_sequence(found, chain, end.outputs)
    g, last = _hessian(batch), end.outputs
    averages: dict[int, Array] = {}
    for place in reversed(chain):
        if place != last:
            jacobians = _jacobians(batch, place, last)
            g = jnp.einsum("noi,op,npj->ij", jacobians, g, jacobians) / batch.count
        averages[place], last = g, place
    return averages


def _hessian(batch: Batch) -> Array:
    """The mean over examples of the loss's Hessian in the outputs, flat."""

    def one(b: list[Array]) -> Array:
        inputs = batch.given._replace(batch=b)
        outputs = batch.passes.forward(inputs, batch.passes.taps(), {})[0].outputs
        found, scales = factor(batch.passes, inputs, outputs)
        flat = wide(found.reshape(found.shape[0], -1))
        return flat.T @ (flat * scales[:, None].astype(flat.dtype))

    return jnp.mean(jax.vmap(one)(batch.given.batch), 0)


def _jacobians(batch: Batch, place: int, last: int) -> Array:
    """Of the output at `last` in the output at `place`, flat: [examples, out, in]."""
    passes, zero = batch.passes, batch.passes.taps()

    def one(b: list[Array]) -> Array:
        inputs = batch.given._replace(batch=b)

        def outputs(tap: Array) -> Any:
            return passes.at(inputs, {**zero, place: tap}, last).reshape(-1)

        return jax.jacrev(outputs)(zero[place]).reshape(-1, zero[place].size)

    return jax.vmap(one)(batch.given.batch)


def _in_sequence(found: Found, chain: list[int], end: int) -> None:
    """An error unless each layer's output reaches the model's through the next one's alone."""
    equations = found.flat.equations
    for place, following in itertools.pairwise(chain):
        reached = set(equations[place].outvars)
        for i, e in enumerate(equations):
            if i not in (place, following) and any(not isinstance(x, Literal) and x in reached for x in e.invars):
                reached.update(e.outvars)
        if set(equations[end].outvars) & reached:
            raise ValueError(
                "'kfra' passes averages from layer to layer, and the layers of this loss are not in sequence: what a "
                f"{equations[place].primitive.name} gives reaches the end on more than one way. Take 'kflr', which has no "
                "such limit."
            )
