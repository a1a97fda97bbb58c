"""One example's loss, forwards and backwards, with what stands at every layer: its input, and derivatives in its output.

A zero, the tap, is added to the output of every layer that was found; the derivative in it is the layer's, with no product
with a weight's shape made. All of this is of one example: `jax.vmap` makes it a batch's.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._cpu_kernels import eigh
from hypergrad._lifted import interpreted
from hypergrad.curvature._likelihoods import End
from hypergrad.curvature._uses import Found, Use


Taps = dict[int, Array]  # by the place of the layer's equation: like its output


class Inputs(NamedTuple):
    """What the program of one example is given."""

    constants: list[Any]
    weights: list[Any]
    theta: list[Any]
    batch: list[Any]  # of one example

    def leaves(self, weights: list[Any]) -> list[Any]:
        return [*self.constants, *weights, *self.theta, *self.batch]


class Forward(NamedTuple):
    loss: Array
    outputs: Array | None


@dataclasses.dataclass(frozen=True)
class Passes:
    """found: the layers. end: where the model ends, if that is asked for. general: leaves differentiated themselves."""

    found: Found
    end: End | None
    general: tuple[int, ...]

    @property
    def places(self) -> list[int]:
        return sorted({use.index for use in self.found.uses})

    def taps(self) -> Taps:
        equations = self.found.flat.equations
        return {i: jnp.zeros(equations[i].outvars[0].aval.shape, equations[i].outvars[0].aval.dtype) for i in self.places}

    def forward(self, inputs: Inputs, taps: Taps, free: dict[int, Array]) -> tuple[Forward, dict[int, list[Any]]]:
        """(loss and outputs, what each layer was given beside its weight), at taps and at the general leaves' values."""
        flat, operands = self.found.flat, {}
        uses: dict[int, list[Use]] = {}
        for use in (*self.found.uses, *self.found.parts):  # none of which sees what is free
            uses.setdefault(use.index, []).append(use)
        at = {id(flat.equations[i]): i for i in uses}

        def special(e: Any, arrays: list[Any]) -> list[Any] | None:
            if id(e) not in at:
                return None
            i = at[id(e)]
            for use in uses[i]:
                arrays[use.place] = use.view(inputs.weights[use.leaf])
            if i not in taps:
                return apply(flat, e, arrays)
            hidden = {use.place for use in self.found.uses if use.index == i}
            operands[i] = [None if k in hidden else x for k, x in enumerate(arrays)]
            return [apply(flat, e, arrays)[0] + taps[i]]

        weights = [free.get(i, x) for i, x in enumerate(inputs.weights)]
        outvars = [*flat.jaxpr.outvars, *([] if self.end is None else flat.equations[self.end.outputs].outvars)]
        loss, *outputs = interpreted(flat.jaxpr.replace(outvars=outvars), [], inputs.leaves(weights), special)
        return Forward(loss, outputs[0] if outputs else None), operands

    def loss_from(self, inputs: Inputs, place: int, value: Array) -> Array:
        """The example's loss, if the equation at this place had given this value."""
        flat = self.found.flat
        chosen = flat.equations[place]
        special = lambda e, arrays: [value] if e is chosen else None  # noqa: E731
        return interpreted(flat.jaxpr, [], inputs.leaves(inputs.weights), special)[0]

    def at(self, inputs: Inputs, taps: Taps, place: int) -> Array:
        """What the equation at this place gives, at taps."""
        end = End(None, place, None)
        outputs = dataclasses.replace(self, end=end).forward(inputs, taps, {})[0].outputs
        assert outputs is not None
        return outputs

    def free(self, inputs: Inputs) -> dict[int, Array]:
        return {i: inputs.weights[i] for i in self.general}


def apply(flat: Any, e: Any, arrays: list[Any]) -> list[Any]:
    """The results of one equation."""
    known = {x: a for x, a in zip(e.invars, arrays, strict=True) if not isinstance(x, jax.extend.core.Literal)}
    jaxpr = flat.jaxpr.replace(constvars=[], invars=list(known), eqns=[e], outvars=e.outvars)
    return jax.core.eval_jaxpr(jaxpr, [], *known.values())


class Example(NamedTuple):
    """What the passes over one example give. Derivatives in taps and general leaves; columns with a leading axis."""

    operands: dict[int, list[Any]]
    loss: Array
    first: tuple[Taps, dict[int, Array]] | None  # of the loss
    exact: tuple[Taps, dict[int, Array]] | None  # of the outputs along the columns of the factor of the loss's Hessian
    scales: Array | None  # of the columns: what the square of each counts
    sampled: tuple[Taps, dict[int, Array]] | None  # of the outputs, along gradients at labels of the model


def example(passes: Passes, inputs: Inputs, key: Array | None, *, first: bool, exact: bool, samples: int) -> Example:
    """One forward pass, and one backward pass for each that is asked for, all columns at once."""
    function = lambda taps, free: passes.forward(inputs, taps, free)  # noqa: E731
    (loss, outputs), pull, operands = jax.vjp(function, passes.taps(), passes.free(inputs), has_aux=True)
    backward = lambda of_loss, of_outputs: pull(Forward(of_loss, of_outputs))  # noqa: E731
    zero = None if outputs is None else jnp.zeros_like(outputs)
    along = jax.vmap(lambda s: backward(jnp.zeros_like(loss), s))
    found, scales, sampled = None, None, None
    if exact:
        columns, scales = factor(passes, inputs, outputs)
        found = along(columns)
    if samples:
        sampled = along(draws(passes, inputs, outputs, key, samples))
    return Example(operands, loss, backward(jnp.ones_like(loss), zero) if first else None, found, scales, sampled)


def factor(passes: Passes, inputs: Inputs, outputs: Any) -> tuple[Array, Array]:
    """(columns like the outputs, a scale for each): the sum of scale * column column' is the loss's Hessian in the outputs.
    A scale is not made part of its column, by a root that would have no derivative where it is zero."""
    end = passes.end
    assert end is not None
    size, like = outputs.size, outputs.shape
    if end.kind is None:
        tail = lambda f: passes.loss_from(inputs, end.outputs, f.reshape(like))  # noqa: E731
        vectors, values = diagonalized(wide(jax.hessian(tail)(outputs.reshape(-1))))
        return vectors.T.reshape(size, *like).astype(outputs.dtype), values
    root, weight = end.kind.root(outputs), _weights(passes, inputs, outputs).reshape(-1)
    if not end.kind.rows:
        return jnp.diag(root.reshape(-1)).reshape(size, *like), weight
    rows, classes = size // like[-1], like[-1]
    blocks = root.reshape(rows, classes, classes)
    whole = jnp.einsum("rck,rs->rksc", blocks, jnp.eye(rows, dtype=outputs.dtype))
    return whole.reshape(size, *like), jnp.repeat(weight, classes)


@jax.custom_jvp
def diagonalized(h: Array) -> tuple[Array, Array]:
    """(V, values) of a symmetric matrix H = V diag(values) V', for what depends on that product alone.

    An eigenvector has no derivative where eigenvalues are equal, and one of mere rounding where they nearly are, as those of
    a cross entropy between equal classes. The product has one: with M = V^-1 dH V^-T, it is kept by dvalues the diagonal of
    M and dV = V S, S_ij = M_ij values_j / (values_i^2 + values_j^2) elsewhere. Between two that are exactly zero M_ij is
    taken as zero, which it is of a loss that is convex in its outputs.
    """
    values, vectors = eigh(h)
    return vectors, values


@diagonalized.defjvp
def _(given: tuple[Array], along: tuple[Array]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    vectors, values = diagonalized(*given)
    back, one = vectors.T, jnp.eye(len(values), dtype=values.dtype)
    for _ in range(2):  # of Newton, without which derivatives of this rule would take V^-1 for V' where V turns
        back = back @ (2 * one - vectors @ back)
    m = back @ along[0] @ back.T
    m = (m + m.T) / 2
    largest = jnp.maximum(jnp.abs(values[:, None]), jnp.abs(values))
    none = largest == 0
    row, column = (x / jnp.where(none, 1, largest) for x in (values[:, None], values))
    turn = column / jnp.where(none, 1, (row**2 + column**2) * largest)
    turn = jnp.where(none | (one > 0), 0, turn)
    return (vectors, values), (vectors @ (m * turn), jnp.diagonal(m))


def draws(passes: Passes, inputs: Inputs, outputs: Any, key: Array | None, samples: int) -> Array:
    """Gradients in the outputs at labels that the model draws: [samples, like outputs]; the mean square is the Hessian."""
    kind = passes.end.kind if passes.end is not None else None
    assert kind is not None and key is not None
    weight = jnp.sqrt(_weights(passes, inputs, outputs))
    weight = weight.reshape(outputs.shape[:-1])[..., None] if kind.rows else weight.reshape(outputs.shape)
    draw = jax.vmap(lambda k: kind.sample(outputs, k) * weight)
    return draw(jax.random.split(key, samples)) / samples**0.5


def _weights(passes: Passes, inputs: Inputs, outputs: Array) -> Array:
    """What the example's loss weighs the loss of each prediction by."""
    assert passes.end is not None and passes.end.values is not None
    place = passes.end.values
    values = passes.found.flat.equations[place].outvars[0].aval
    slopes = jax.grad(lambda x: passes.loss_from(inputs, place, x))(jnp.zeros(values.shape, values.dtype))
    return -slopes.sum(-1) if passes.end.kind is not None and passes.end.kind.logarithms else slopes


def layer_matrices(found: Found, use: Use, weights: list[Any], operands: list[Any], b: Array) -> tuple[Array, Array]:
    """(A [groups, positions, in], B [groups, positions, out]) of one use and example."""
    e = found.flat.equations[use.index]
    if use.layer is not None:
        return use.layer.matrices(e, use.place, operands, b)
    name, leaf = e.primitive.name, weights[use.leaf]
    if name == "mul":
        b = b * operands[1 - use.place]
    elif name == "sub" and use.place == 1:
        b = -b
    read = e.invars[use.place].aval.shape  # an axis of size 1 is read at each place of the other operand's
    b = b.sum([i for i, size in enumerate(read) if size != b.shape[i]], keepdims=True) if read else b.sum()
    (gradient,) = jax.linear_transpose(use.view.__call__, leaf)(b)
    return jnp.ones((1, 1, 1), leaf.dtype), gradient.reshape(1, 1, -1)


def wide(x: Array) -> Array:
    """In float32 at least."""
    return x.astype(np.promote_types(x.dtype, np.float32))


def spread(found: Found, use: Use, leaf: Array, matrix: Array) -> Array:
    """[groups, in, out], entry by entry at the places of the leaf; in the longer of both dtypes."""
    matrix = matrix.astype(jnp.promote_types(matrix.dtype, leaf.dtype))
    if use.layer is None:
        return matrix.reshape(leaf.shape)
    e, like = found.flat.equations[use.index], jax.ShapeDtypeStruct(leaf.shape, matrix.dtype)
    arranged = lambda w: use.layer.arrange(e, use.place, use.view.places(w))  # noqa: E731
    (placed,) = jax.linear_transpose(arranged, like)(matrix)
    return placed
