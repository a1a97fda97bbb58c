"""Transformations of the gradient around an optimizer: clipping, decay, freezing.

Invariant: the optimizer inside sees transform(h, w, g) wherever it would have seen g, in every pass.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._placement import at_hand
from hypergrad._prefixes import hint, outline
from hypergrad.hypers import natural
from hypergrad.optimizers.chain import PARAMS, Link, Optimizer, Signal, View, as_float


class Transformed(Optimizer):
    """An optimizer with a pure function of the gradient before it. Base of the transformations; fields are hyperparameters.

    transform(h, w, g): h.<field> per leaf, parameters and gradient as lists of leaves -> the gradient that `inner` sees.
    reads: links of `inner` whose new values it takes besides, transform(h, w, g, z); h then has the fields of `inner` too.
    Those links, and all before them in the chain, see the gradient as it is. The parameters are none of them: they are w.
    linear_transform: its derivative in g is made of hyperparameters and parameters alone. entrywise_transform: how the
    parameters are divided into leaves makes no difference.
    """

    inner: Optimizer
    linear_transform: ClassVar[bool] = False
    entrywise_transform: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    @abc.abstractmethod
    def transform(h: list[View], w: list[Array], g: list[Array]) -> list[Array]: ...

    def adapted(self, chain: tuple[Link, ...]) -> tuple[Link, ...]:
        """The chain of the leaves that the transformation covers."""
        return chain

    def covers(self, params: Any) -> list[bool]:
        """Of each leaf, whether the transformation sees it."""
        return [True] * len(jax.tree.leaves(params))

    @property
    def signals(self) -> Mapping[str, Signal]:  # type: ignore[override]
        return self.inner.signals

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.linear_transform and self.inner.linear

    @property
    def entrywise(self) -> bool:  # type: ignore[override]
        return self.entrywise_transform and self.inner.entrywise


class Transform(NamedTuple):
    """One transformation as a step needs it; hashable."""

    name: str
    function: Callable[..., list[Array]]
    keys: tuple[tuple[str, str], ...]  # (field, its key in h)
    blocks: tuple[int, ...]  # which it sees
    reads: tuple[str, ...] = ()  # links whose new values it takes

    def __call__(
        self, h: list[dict[str, Array]], w: list[Array], g: list[Array], z: Sequence[Mapping[str, Array]] = ()
    ) -> list[Array]:
        """The gradient of all blocks, those that it sees transformed. z: of each block, the links that are read of it."""
        rule = lambda j: h[j] if self.reads else {}  # noqa: E731
        views = [View({**rule(j), **{field: h[j][key] for field, key in self.keys}}, self.name) for j in self.blocks]
        links = ([View({k: z[j][k] for k in self.reads}, self.name) for j in self.blocks],) if self.reads else ()
        seen = list(self.function(views, [w[j] for j in self.blocks], [g[j] for j in self.blocks], *links))
        if len(seen) != len(self.blocks):
            raise ValueError(
                f"the transformation {self.name} must return a gradient for each of the {len(self.blocks)} arrays that it "
                f"sees; got {len(seen)}."
            )
        result = list(g)
        for j, x in zip(self.blocks, seen, strict=True):
            result[j] = self._like(g[j], x)
        return result

    def _like(self, g: Array, x: Any) -> Array:
        """What it returned in the place of a gradient, in its shape."""
        x = as_float(x, g.dtype, f"what the transformation {self.name} returns")
        if x.shape == g.shape:
            return x
        try:
            return jnp.broadcast_to(x, g.shape)
        except ValueError as error:
            raise ValueError(
                f"the transformation {self.name} must return arrays of the shapes that it sees: for {list(g.shape)} it "
                f"returned {list(x.shape)}."
            ) from error


def read_of(transforms: Sequence[Transform], j: int) -> set[str]:
    """The links of a block that transformations read."""
    return {name for f in transforms if j in f.blocks for name in f.reads}


class Clip(Transformed):
    """g <- min(max(g, -c), c), entry by entry. Made by `clip`."""

    max_delta: Any
    entrywise_transform = True

    @staticmethod
    def transform(h: list[View], w: list[Array], g: list[Array]) -> list[Array]:
        del w
        bounds = [nan_below_zero(hj.max_delta) for hj in h]
        return [jnp.clip(x, -c, c) for c, x in zip(bounds, g, strict=True)]


class ClipByGlobalNorm(Transformed):
    """g <- g min(1, c / |g|), |g| over all leaves. Made by `clip_by_global_norm`."""

    max_norm: Any
    entrywise_transform = True

    @staticmethod
    def transform(h: list[View], w: list[Array], g: list[Array]) -> list[Array]:
        del w
        # Scaled by the largest entry, so that no square overflows or vanishes, of a derivative neither; its own cancels.
        largest = jax.lax.stop_gradient(jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(g[0].dtype) for x in g]).max())
        some = largest > jnp.finfo(largest.dtype).tiny
        scale = jnp.where(some, largest, 1)
        parts = [x / scale.astype(x.dtype) for x in g]
        root = jnp.sqrt(jnp.where(some, sum(jnp.sum(x**2).astype(g[0].dtype) for x in parts), 1))
        bounds = [nan_below_zero(hj.max_norm) for hj in h]
        above = [some & ~(scale * root <= c) for c in bounds]
        clipped = [x / root.astype(x.dtype) * jnp.where(a, c, 1) for a, c, x in zip(above, bounds, parts, strict=True)]
        return [jnp.where(a, c, x) for a, c, x in zip(above, clipped, g, strict=True)]


class AddDecayedWeights(Transformed):
    """g <- g + c w: the gradient of an L2 penalty c/2 |w|^2. Made by `add_decayed_weights`."""

    weight_decay: Any
    linear_transform = True
    entrywise_transform = True

    @staticmethod
    def transform(h: list[View], w: list[Array], g: list[Array]) -> list[Array]:
        return [x + hj.weight_decay * wj for hj, wj, x in zip(h, w, g, strict=True)]


class Freeze(Transformed):
    """g <- 0, and neither step nor decay, where the mask is True. Made by `freeze`."""

    mask: tuple[Any, tuple[bool, ...]] = eqx.field(static=True)  # tree and leaves: hashable
    linear_transform = True
    entrywise_transform = True

    def adapted(self, chain: tuple[Link, ...]) -> tuple[Link, ...]:
        """Accumulators that a run begins with would move what is frozen: it has no increment."""
        rests = lambda link: link.position or link.name == PARAMS  # noqa: E731
        return tuple(link._replace(increment=None, decay=None) if rests(link) else link for link in chain)

    def covers(self, params: Any) -> list[bool]:
        tree, leaves = self.mask
        mask = jax.tree.unflatten(tree, leaves)
        try:
            return jax.tree.leaves(jax.tree.broadcast(mask, params))
        except ValueError as e:
            raise ValueError(
                f"hg.freeze: `mask` must be one bool or a pytree prefix of `params`; got the tree {outline(mask)} for "
                f"params {outline(params)}.{hint(mask, params)}"
            ) from e

    @staticmethod
    def transform(h: list[View], w: list[Array], g: list[Array]) -> list[Array]:
        del h, w
        return [jnp.zeros_like(x) for x in g]


def clip(optimizer: Optimizer, max_delta: Any) -> Clip:
    """`optimizer` on the gradient with every entry cut to [-max_delta, max_delta], as `optax.clip`.

    max_delta: a hyperparameter like any other (scalar, `PerStep`, per group, per weight). One that is negative or NaN is an
    error; traced, it makes the gradient NaN. The gradient passes the outermost transformation first.
    """
    return Clip(_checked("clip", optimizer), checked_bound("clip", "max_delta", max_delta))


def clip_by_global_norm(optimizer: Optimizer, max_norm: Any) -> ClipByGlobalNorm:
    """`optimizer` on g min(1, max_norm / |g|), the norm taken over all leaves, as `optax.clip_by_global_norm`.

    max_norm: a hyperparameter like any other; given per group, each group is scaled by its own. One that is negative or NaN
    is an error; traced, it makes the gradient NaN.
    """
    return ClipByGlobalNorm(
        _checked("clip_by_global_norm", optimizer), checked_bound("clip_by_global_norm", "max_norm", max_norm)
    )


def add_decayed_weights(optimizer: Optimizer, weight_decay: Any) -> AddDecayedWeights:
    """`optimizer` on g + weight_decay w, the gradient of an L2 penalty, as `optax.add_decayed_weights` before it.

    weight_decay: a hyperparameter like any other. For decay beside the gradient's statistics, take `AdamW`.
    """
    return AddDecayedWeights(_checked("add_decayed_weights", optimizer), weight_decay)


def freeze(optimizer: Optimizer, mask: Any) -> Freeze:
    """`optimizer` without the leaves where `mask` is True: they stay where they are on the grid, whatever `state`
    a run begins with.

    Their gradient is zero to the accumulators, as with `optax.freeze`, and transformations inside do not see them: no decay
    gives them a gradient, and no norm has them in it.
    mask: bool, or a pytree prefix of the parameters with bools. For single weights, take a learning rate of 0 there.
    """
    leaves, tree = jax.tree.flatten(mask)
    if not all(isinstance(x, (bool, np.bool_)) for x in leaves):
        kinds = sorted({type(x).__name__ for x in leaves})
        raise TypeError(
            f"hg.freeze: `mask` must have bools as leaves, True where frozen; got {', '.join(kinds)}. "
            "To freeze single weights, give them a learning rate of 0."
        )
    return Freeze(_checked("freeze", optimizer), (tree, tuple(map(bool, leaves))))


def _checked(name: str, optimizer: Any) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"hg.{name} wraps a reversible optimizer, which comes first: hg.{name}(hg.SGD(0.1), ...); "
            f"got {type(optimizer).__name__}."
        )
    return optimizer


def nan_below_zero(bound: Array) -> Array:
    return jnp.where(bound >= 0, bound, jnp.nan)


def checked_bound(name: str, field: str, value: Any) -> Any:
    for x in jax.tree.leaves(natural(value)):
        known = at_hand(x) and np.issubdtype(np.asarray(x).dtype, np.number)
        if known and not np.all(np.asarray(x) >= 0):
            raise ValueError(f"hg.{name}: `{field}` must be at least 0; got {x!r}.")
    return value
