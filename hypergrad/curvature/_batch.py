"""From what stands at the layers of every example to quantities like the parameters.

Invariant: the gradient of example n in a leaf is the sum over its uses of A_n' B_n, plus what the loss adds without looking
at examples. Where a leaf has one use and one position, and is read entry by entry, its squares are (A^2)' (B^2) and no
gradient of an example is made. Squares are of float32 at least: those of a shorter type may be beyond its range.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.curvature._passes import Example, Inputs, Passes, layer_matrices, spread, wide
from hypergrad.curvature._uses import Use


Signals = tuple[dict[int, Array], dict[int, Array]]  # derivatives in taps and in general leaves, of all examples


@dataclasses.dataclass(frozen=True)
class Batch:
    passes: Passes
    given: Inputs  # the batch: examples of one, stacked
    examples: Example  # with a leading axis of examples
    count: int
    sharing: str

    @property
    def weights(self) -> list[Array]:
        return self.given.weights

    def loss(self, inputs: Inputs) -> Array:
        """Of one example."""
        return self.passes.forward(inputs, self.passes.taps(), {})[0].loss

    @functools.cached_property
    def penalties(self) -> dict[int, Array]:
        """Gradients of what the loss adds without looking at examples, of the leaves that have such."""
        inputs = self.given._replace(batch=[x[0] for x in self.given.batch])
        free = {i: self.weights[i] for i in sorted(self.passes.found.penalized)}
        return jax.grad(lambda w: self.passes.forward(inputs, self.passes.taps(), w)[0].loss)(free)

    def matrices(self, use: Use, b: Array) -> tuple[Array, Array]:
        """(A [examples, groups, positions, in], B [examples, groups, positions, out])."""
        make = functools.partial(layer_matrices, self.passes.found, use, self.weights)
        return jax.vmap(make)(self.examples.operands[use.index], b)

    def spread(self, use: Use, matrix: Array) -> Array:
        return spread(self.passes.found, use, self.weights[use.leaf], matrix)

    def rounded(self, leaves: list[Array]) -> list[Array]:
        """In the dtypes of the parameters."""
        return [x.astype(w.dtype) for x, w in zip(leaves, self.weights, strict=True)]

    def gradients(self, leaf: int, signals: Signals) -> Array:
        """A leading axis of examples, and the shape of the leaf; without penalties."""
        taps, free = signals
        if leaf in free:
            return free[leaf]
        found = jnp.zeros((self.count, *self.weights[leaf].shape), self.weights[leaf].dtype)
        for use in self.passes.found.of(leaf):
            a, b = self.matrices(use, taps[use.index])
            matrices = jnp.einsum("ngti,ngto->ngio", a, b)
            found += jax.vmap(functools.partial(self.spread, use))(matrices).astype(found.dtype)
        return found

    def one_use(self, leaf: int) -> Use | None:
        """The use of a leaf that has one, and no part in a penalty."""
        uses = self.passes.found.of(leaf)
        return uses[0] if len(uses) == 1 and leaf not in self.passes.found.penalized else None

    def first_pair(self, leaf: int) -> tuple[Use, Array, Array] | None:
        """The one use of a leaf, with the A and B of its gradients, whose products are each entry's own."""
        use = self.one_use(leaf)
        if use is None or self.examples.first is None or use.sums:
            return None
        a, b = self.matrices(use, self.examples.first[0][use.index])
        return use, wide(a), wide(b)

    def of_examples(self, leaf: int) -> Array:
        """grad l_n."""
        assert self.examples.first is not None
        return self.gradients(leaf, self.examples.first) + self.penalties.get(leaf, 0)


def individual_gradients(batch: Batch) -> list[Array]:
    return [batch.of_examples(i) / batch.count for i in range(len(batch.weights))]


def squared_norms(batch: Batch) -> list[Array]:
    return batch.rounded([_squared_norm(batch, i) / batch.count**2 for i in range(len(batch.weights))])


def _squared_norm(batch: Batch, leaf: int) -> Array:
    pair = batch.first_pair(leaf)
    if pair is not None:
        _, a, b = pair
        positions, (inputs, outputs) = a.shape[2], (a.shape[3], b.shape[3])
        if positions == 1:
            return jnp.sum(jnp.sum(a * a, (2, 3)) * jnp.sum(b * b, (2, 3)), 1)
        if positions * (inputs + outputs) < inputs * outputs:
            return jnp.sum(jnp.einsum("ngti,ngsi->ngts", a, a) * jnp.einsum("ngto,ngso->ngts", b, b), (1, 2, 3))
    gradients = wide(batch.of_examples(leaf))
    return jnp.sum(gradients**2, tuple(range(1, gradients.ndim)))


def second_moment(batch: Batch) -> list[Array]:
    return batch.rounded([_second_moment(batch, i) for i in range(len(batch.weights))])


def _second_moment(batch: Batch, leaf: int) -> Array:
    pair = batch.first_pair(leaf)
    if pair is not None:
        use, a, b = pair
        if a.shape[2] == 1:
            return batch.spread(use, jnp.einsum("ngti,ngto->gio", a * a, b * b) / batch.count)
    return jnp.mean(wide(batch.of_examples(leaf)) ** 2, 0)


def variance(batch: Batch) -> list[Array]:
    """mean_n (grad l_n - g)^2."""
    return batch.rounded([_variance(batch, i) for i in range(len(batch.weights))])


def _variance(batch: Batch, leaf: int) -> Array:
    pair = batch.first_pair(leaf)
    if pair is not None:
        use, a, b = pair
        if a.shape[2] == 1:
            # Of g_n - g_0 = p_n b_n + a_0 q_n: in g_n alone, digits that all of them share would be lost.
            first_a, first_b = a[:1], b[:1]
            p, q = a - first_a, b - first_b
            squares = [(p * p, b * b), (2 * p * first_a, b * q), (jnp.broadcast_to(first_a * first_a, a.shape), q * q)]
            means = [(p, b), (jnp.broadcast_to(first_a, a.shape), q)]
            second, mean = (
                sum(jnp.einsum("ngti,ngto->gio", x, y) for x, y in terms) / batch.count for terms in (squares, means)
            )
            return batch.spread(use, jnp.maximum(second - mean**2, 0))
    return jnp.var(wide(batch.of_examples(leaf)), 0)


def ggn_diagonal(batch: Batch, sampled: bool = False) -> list[Array]:
    signals, scales = columns(batch, sampled)
    return batch.rounded([leaf_diagonal(batch, i, signals, scales) for i in range(len(batch.weights))])


def columns(batch: Batch, sampled: bool) -> tuple[Signals, Array]:
    """(signals with axes [columns, examples], what their squares count [columns, examples])."""
    found = batch.examples.sampled if sampled else batch.examples.exact
    assert found is not None
    signals: Signals = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), found)
    size = jax.tree.leaves(signals)[0].shape[0]
    ones = jnp.ones((size, batch.count))
    return signals, ones if sampled or batch.examples.scales is None else batch.examples.scales.T


def leaf_diagonal(batch: Batch, leaf: int, signals: Signals, scales: Array) -> Array:
    uses = batch.passes.found.of(leaf)
    if len(uses) == 1 and not uses[0].sums:
        a, b = jax.vmap(lambda b: batch.matrices(uses[0], b))(signals[0][uses[0].index])
        if a.shape[3] == 1:
            squares = jnp.einsum("cngto,cn->ngto", wide(b) ** 2, scales.astype(wide(b).dtype))
            return batch.spread(uses[0], jnp.einsum("ngti,ngto->gio", wide(a[0]) ** 2, squares) / batch.count)
    return squares_of_leaf(batch, leaf, signals, scales, lambda g: g)


def squares_of_leaf(batch: Batch, leaf: int, signals: Signals, scales: Array, turned: Callable[[Array], Array]) -> Array:
    """sum over columns, mean over examples of scale turned(gradient)^2, of a leaf; turned: a linear map."""
    of_leaf: Signals = (
        {use.index: signals[0][use.index] for use in batch.passes.found.of(leaf)},
        {leaf: signals[1][leaf]} if leaf in signals[1] else {},
    )

    def add(total: Array, column: Any) -> tuple[Array, None]:
        scale, signal = column
        squares = jax.vmap(turned)(wide(batch.gradients(leaf, signal))) ** 2
        return total + jnp.einsum("n,n...->...", scale.astype(total.dtype), squares), None

    zero = jnp.zeros_like(turned(wide(batch.weights[leaf])))
    return jax.lax.scan(add, zero, (scales, of_leaf))[0] / batch.count


def hessian_diagonal(batch: Batch) -> list[Array]:
    """Along unit vectors of the layer's outputs where they are fewer than the weights, else of the weights."""
    return [_hessian_diagonal(batch, i) for i in range(len(batch.weights))]


def _hessian_diagonal(batch: Batch, leaf: int) -> Array:
    weight, found = batch.weights[leaf], batch.passes.found
    if not weight.size:
        return weight
    use = batch.one_use(leaf)  # of several uses one has an input that depends on the others
    outputs = 0 if use is None else math.prod(found.flat.equations[use.index].outvars[0].aval.shape)
    if use is None or outputs >= weight.size:
        return _along_weights(batch, leaf)
    return _along_outputs(batch, leaf, use.index)


def _along_weights(batch: Batch, leaf: int) -> Array:
    def total(w: Array) -> Array:
        weights = [w if i == leaf else x for i, x in enumerate(batch.weights)]
        return jnp.mean(jax.vmap(lambda b: batch.loss(batch.given._replace(weights=weights, batch=b)))(batch.given.batch))

    weight = batch.weights[leaf]

    def entry(i: Array) -> Array:
        unit = jnp.zeros(weight.size, weight.dtype).at[i].set(1).reshape(weight.shape)
        return jax.jvp(jax.grad(total), (weight,), (unit,))[1].reshape(-1)[i]

    return jax.lax.map(entry, jnp.arange(weight.size)).reshape(weight.shape)


def _along_outputs(batch: Batch, leaf: int, place: int) -> Array:
    """sum over units e of the layer's output: (A' e) (A' H e), entry by entry, H the loss's Hessian in all outputs."""
    passes, zero = batch.passes, batch.passes.taps()

    def derivative(inputs: Inputs, unit: Array) -> dict[int, Array]:
        of_taps = jax.grad(lambda taps: passes.forward(inputs, taps, {})[0].loss)
        return jax.jvp(of_taps, (zero,), ({i: unit if i == place else x for i, x in zero.items()},))[1]

    def add(total: Array, i: Array) -> tuple[Array, None]:
        unit = jnp.zeros(zero[place].size, zero[place].dtype).at[i].set(1).reshape(zero[place].shape)
        products = jax.vmap(lambda b: derivative(batch.given._replace(batch=b), unit))(batch.given.batch)
        units = {i: jnp.broadcast_to(unit if i == place else x, (batch.count, *x.shape)) for i, x in zero.items()}
        own, other = wide(batch.gradients(leaf, (units, {}))), wide(batch.gradients(leaf, (products, {})))
        return total + jnp.mean(own * other, 0), None

    return jax.lax.scan(add, jnp.zeros_like(wide(batch.weights[leaf])), jnp.arange(zero[place].size))[0]
