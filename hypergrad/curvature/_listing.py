"""The layers of a loss, for people to look at."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hypergrad.curvature._flat import flatten
from hypergrad.curvature._uses import Found, Use, find


@dataclasses.dataclass(frozen=True)
class LayerUse:
    """One use of one weight. kind: "dense", "convolution", "embedding", "scale", "shift", "general", or a name of your own.

    Of "general" weights the derivatives are taken one example at a time; `reason` names the operation that made it so, or
    is "not used" or "no entries".
    """

    parameter: str
    shape: tuple[int, ...]
    kind: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.parameter} {self.shape}: {self.kind}{f' ({self.reason})' if self.reason else ''}"


def layers(loss: Callable[..., Any], params: Any, theta: Any, batch: Any) -> list[LayerUse]:
    """What the loss uses each leaf of `params` for: one entry a use, in the order of the leaves."""
    found = find(flatten(loss, params, theta, batch)[0])
    return [use for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(params)) for use in _of(found, i, path, x)]


def _of(found: Found, leaf: int, path: Any, x: Any) -> list[LayerUse]:
    name, shape = f"params{jax.tree_util.keystr(path)}", jnp.shape(x)
    if leaf in found.general:
        return [LayerUse(name, shape, "general", found.general[leaf])]
    uses = found.of(leaf)
    if not uses:
        return [LayerUse(name, shape, "general", "not used")]
    return [LayerUse(name, shape, _kind(found, use)) for use in uses]


def _kind(found: Found, use: Use) -> str:
    if use.layer is not None:
        return use.layer.name
    return "scale" if found.flat.equations[use.index].primitive.name == "mul" else "shift"
