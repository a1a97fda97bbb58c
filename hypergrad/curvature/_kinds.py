"""Layers: what an operation with a weight is, written as a product of matrices.

Invariant: the derivative of an example's loss in the weight of a layer is A' B, with A [groups, positions, in] of the
layer's input and B [groups, positions, out] of the derivative in its output.
"""

import abc
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.curvature._flat import LAYER


class Layer(abc.ABC):
    """A kind of operation that is linear in its weight."""

    name: str
    adds = False  # whether the weight is only added to the output, as a bias is

    @abc.abstractmethod
    def match(self, equation: Any, place: int) -> bool:
        """Whether the equation is of this kind, with the weight as its operand number `place`."""

    @abc.abstractmethod
    def matrices(self, equation: Any, place: int, operands: list[Any], cotangent: Array) -> tuple[Array, Array]:
        """(A [groups, positions, in], B [groups, positions, out]) of one example; operands[place] is not to be read."""

    @abc.abstractmethod
    def arrange(self, equation: Any, place: int, weight: Array) -> Array:
        """The weight as [groups, in, out]: its entries in another order."""

    def fits(self, equation: Any, place: int) -> bool:
        """Of a layer that is declared: whether the operands are what it is declared of. `jax.vmap` may have changed them."""
        return True


class Dense(Layer):
    """`x @ w`, also over several axes, and with the weight on either side."""

    name = "dense"

    def match(self, equation: Any, place: int) -> bool:
        return equation.primitive.name == "dot_general" and not any(equation.params["dimension_numbers"][1])

    def matrices(self, equation: Any, place: int, operands: list[Any], cotangent: Array) -> tuple[Array, Array]:
        x, summed = operands[1 - place], equation.params["dimension_numbers"][0]
        a = _front(x, summed[1 - place], last=True)
        wide = math.prod(x.shape[i] for i in summed[1 - place])
        a = a.reshape(1, -1, wide)
        positions = a.shape[1]
        b = cotangent.reshape(positions, -1) if place == 1 else cotangent.reshape(-1, positions).T
        return a, b[None]

    def arrange(self, equation: Any, place: int, weight: Array) -> Array:
        summed = equation.params["dimension_numbers"][0][place]
        wide = math.prod(weight.shape[i] for i in summed)
        return _front(weight, summed).reshape(1, wide, -1)


class Convolution(Layer):
    """`jax.lax.conv_general_dilated`, of any layout, with strides, dilation and groups of features."""

    name = "convolution"

    def match(self, equation: Any, place: int) -> bool:
        return equation.primitive.name == "conv_general_dilated" and place == 1 and equation.params["batch_group_count"] == 1

    def matrices(self, equation: Any, place: int, operands: list[Any], cotangent: Array) -> tuple[Array, Array]:
        numbers, groups = equation.params["dimension_numbers"], equation.params["feature_group_count"]
        window = [equation.invars[1].aval.shape[i] for i in numbers.rhs_spec[2:]]
        b = jnp.transpose(cotangent, numbers.out_spec)
        a = _patches(jnp.transpose(operands[0], numbers.lhs_spec), window, b.shape[2:], equation.params)
        return _by_group(a, groups), _by_group(b, groups)

    def arrange(self, equation: Any, place: int, weight: Array) -> Array:
        groups, spec = equation.params["feature_group_count"], equation.params["dimension_numbers"].rhs_spec
        kernel = jnp.transpose(weight, spec)  # [out, in, ...]
        return jnp.moveaxis(kernel.reshape(groups, kernel.shape[0] // groups, -1), 1, 2)


class Embedding(Layer):
    """Rows of a table, by index."""

    name = "embedding"

    def match(self, equation: Any, place: int) -> bool:
        if equation.primitive.name != "gather" or place != 0:
            return False
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        shape = equation.invars[0].aval.shape
        cut = [i for i, (size, whole) in enumerate(zip(sizes, shape, strict=True)) if size != whole]
        plain = not numbers.operand_batching_dims and len(shape) == 2
        return plain and cut == [0] and sizes[0] == 1 and 0 in numbers.start_index_map

    def matrices(self, equation: Any, place: int, operands: list[Any], cotangent: Array) -> tuple[Array, Array]:
        numbers, rows = equation.params["dimension_numbers"], equation.invars[0].aval.shape[0]
        index = operands[1][..., numbers.start_index_map.index(0)].reshape(-1)
        if equation.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, rows - 1)
        a = jax.nn.one_hot(index, rows, dtype=cotangent.dtype)  # of an index outside: nothing, as its derivative is
        return a[None], _front(cotangent, numbers.offset_dims, last=True).reshape(1, index.size, -1)

    def arrange(self, equation: Any, place: int, weight: Array) -> Array:
        return weight[None]


class RegisteredDense(Layer):
    """`register(y, x, w)`: y = x @ w, w [in, out], however it was computed."""

    name = "dense"

    def match(self, equation: Any, place: int) -> bool:
        return False

    def fits(self, equation: Any, place: int) -> bool:
        y, x, w = (v.aval.shape for v in equation.invars[:3])
        return w == (*x[-1:], *y[-1:]) and x[:-1] == y[:-1]

    def matrices(self, equation: Any, place: int, operands: list[Any], cotangent: Array) -> tuple[Array, Array]:
        return _rows(operands[1]), _rows(cotangent)

    def arrange(self, equation: Any, place: int, weight: Array) -> Array:
        return weight[None]


class RegisteredBias(RegisteredDense):
    name, adds = "shift", True

    def fits(self, equation: Any, place: int) -> bool:
        return equation.invars[place].aval.shape == equation.invars[0].aval.shape[-1:]

    def matrices(self, equation: Any, place: int, operands: list[Any], cotangent: Array) -> tuple[Array, Array]:
        return jnp.ones((1, 1, 1), cotangent.dtype), _rows(cotangent).sum(1, keepdims=True)

    def arrange(self, equation: Any, place: int, weight: Array) -> Array:
        return weight[None, None]


PATTERNS: list[Layer] = [Dense(), Convolution(), Embedding()]
REGISTERED: dict[str, tuple[Layer, ...]] = {"dense": (RegisteredDense(), RegisteredBias())}


def add_pattern(layer: Layer) -> None:
    """A kind of layer of your own, looked for in every loss from now on: before the library's."""
    PATTERNS.insert(0, layer)


def register(y: Array, x: Array, params: Any, kind: str | Layer = "dense") -> Array:
    """y, declared as what a layer makes of x by `params`: for one that is not found.

    kind "dense": y [..., out] = x [..., in] @ w + b, params = w [in, out] or (w, b). A `Layer` of your own has one weight,
    and sees the operands [y, x, weight]. Goes in the loss, in place of y; other uses of these weights, but for penalties,
    are taken as parts of this one.
    """
    leaves = jax.tree.leaves(params)
    name = _name_of(kind) if isinstance(kind, Layer) else kind
    if name not in REGISTERED:
        raise ValueError(f"`kind` must be one of {', '.join(REGISTERED)}, or a hg.curvature.Layer; got {kind!r}.")
    if not 1 <= len(leaves) <= len(REGISTERED[name]):
        raise ValueError(
            f"a layer of kind {name!r} has 1 to {len(REGISTERED[name])} parameters; `params` has {len(leaves)} leaves."
        )
    if name == "dense" and jnp.shape(leaves[0]) != (x.shape[-1], y.shape[-1]):
        raise ValueError(
            f"a dense layer from {x.shape} to {y.shape} has a weight of shape {(x.shape[-1], y.shape[-1])}, [in, out]; got "
            f"{jnp.shape(leaves[0])}. Give it transposed, or take a hg.curvature.Layer of your own."
        )

    def call(y: Array, *others: Any) -> Array:
        return y

    call.__name__ = call.__qualname__ = f"{LAYER}{name}"
    return jax.jit(call)(y, x, *leaves)


def _name_of(kind: Layer) -> str:
    """In `REGISTERED`: another for each that differs. One that a loss makes anew at each call is the one of before."""
    for name, kinds in REGISTERED.items():
        if _alike(kinds[0], kind):
            return name
    name = next(name for i in itertools.count(1) if (name := kind.name if i == 1 else f"{kind.name}_{i}") not in REGISTERED)
    REGISTERED[name] = (kind,)
    return name


def _alike(one: Layer, other: Layer) -> bool:
    """The same object, or of one class with the same numbers and texts."""
    if one is other or type(one) is not type(other) or vars(one).keys() != vars(other).keys():
        return one is other
    pairs = ((x, vars(other)[name]) for name, x in vars(one).items())
    return all(x is y or (type(x) is type(y) and isinstance(x, (int, float, str)) and x == y) for x, y in pairs)


def _rows(x: Array) -> Array:
    return x.reshape(1, -1, x.shape[-1])


def _front(x: Array, axes: Any, last: bool = False) -> Array:
    """x with these axes first, in this order, or last."""
    rest = [i for i in range(x.ndim) if i not in axes]
    return jnp.transpose(x, [*rest, *axes] if last else [*axes, *rest])


def _patches(x: Array, window: list[int], places: tuple[int, ...], of: Any) -> Array:
    """[rows, features, ...] -> what the window sees at each place: [rows, features window, ...]. An axis at a time, by
    slices: XLA has a convolution for it, with a kernel of zeros and ones, which is several times slower on a CPU."""
    dilations = [(low, high, d - 1) for (low, high), d in zip(of["padding"], of["lhs_dilation"], strict=True)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *dilations])
    strides = zip(window, places, of["window_strides"], of["rhs_dilation"], strict=True)
    for i, (size, count, stride, apart) in enumerate(strides):
        axis = 2 + 2 * i  # those before it are entries and places of the axes that are done
        ends = [k * apart + (count - 1) * stride + 1 for k in range(size)]
        seen = [jax.lax.slice_in_dim(x, k * apart, end, stride, axis) for k, end in enumerate(ends)]
        x = jnp.stack(seen, axis)
    n, entries = len(window), [2 + 2 * i for i in range(len(window))]
    x = jnp.transpose(x, [0, 1, *entries, *(i + 1 for i in entries)])
    return x.reshape(x.shape[0], -1, *x.shape[2 + n :])


def _by_group(x: Array, groups: int) -> Array:
    """[rows, features, ...] -> [groups, rows and places, features of one group]: an example may be several rows."""
    x = jnp.moveaxis(x, 0, 1)
    return jnp.moveaxis(x.reshape(groups, x.shape[0] // groups, -1), 1, 2)
