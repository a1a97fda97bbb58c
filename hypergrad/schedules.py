"""What varies from step to step: `PerStep` marks a step axis, `knots` makes one out of few values.

Invariant: a schedule is linear in its knots, and knots that are all equal give a constant schedule.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig  # what equinox prints with
from jax import Array

from hypergrad._shown import shown


class PerStep(eqx.Module):
    """Marks a leading axis of length `steps`: one value per training step.

    values: array [steps] or [steps, *parameter shape], or a pytree of them. It goes inside a domain:
    `hg.positive(hg.PerStep(jnp.full(100, 0.1)))`. It prints as the number of steps, the extremes and the norm.
    """

    values: Any

    def __pdoc__(self, **_: Any) -> Any:
        return wadler_lindig.TextDoc(f"PerStep({shown(self.values, steps=True)})")


class Knots(eqx.Module):
    """A schedule held as the values at its knots. Made by `hg.knots`; `natural` turns it into a `PerStep`."""

    values: Any
    steps: int = eqx.field(static=True)
    kind: str = eqx.field(static=True)

    def __pdoc__(self, **_: Any) -> Any:
        return wadler_lindig.TextDoc(f"knots({shown(self.values)}; {self.kind}, over {self.steps} steps)")

    def per_step(self) -> PerStep:
        return PerStep(jax.tree.map(self._spread, self.values))

    def _spread(self, values: Array) -> Array:
        weights = jnp.asarray(_weights(values.shape[0], self.steps, self.kind), values.dtype)
        return jnp.tensordot(weights, values, 1, precision=jax.lax.Precision.HIGHEST)


def knots(values: Any, steps: int, kind: str = "linear") -> Knots:
    """schedule_t = sum_k weight_tk values_k: `steps` values from a few, which share their hypergradients' noise.

    values: array [knots] or [knots, *parameter shape], or a pytree of them; the first knot is at step 0, the last at step
    `steps - 1`, the others evenly between. kind: "linear"; "cubic", the natural spline; "constant", where each value holds
    for a window of steps / knots. It goes inside a domain and is spread in that domain's coordinates:
    `hg.positive(hg.knots(jnp.full(8, 0.1), 100))` interpolates logarithms, so it stays positive between its knots too.
    """
    if kind not in _WEIGHTS:
        raise ValueError(f"`kind` of hg.knots must be one of {', '.join(map(repr, _WEIGHTS))}; got {kind!r}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps` of hg.knots must be an integer of at least 1; got {steps!r}.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        if jnp.ndim(leaf) == 0 or not 1 <= jnp.shape(leaf)[0] <= steps:
            raise ValueError(
                f"hg.knots{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; its leading axis counts the knots, "
                f"from 1 to steps={steps}."
            )
    return Knots(values, steps, kind)


def spread(tree: Any) -> Any:
    """The tree with all `Knots` in it turned into `PerStep`."""
    return jax.tree.map(lambda x: x.per_step() if _is_knots(x) else x, tree, is_leaf=_is_knots)


def _is_knots(x: Any) -> bool:
    return isinstance(x, Knots)


def _weights(count: int, steps: int, kind: str) -> np.ndarray:
    """What each knot contributes to each step: float64 [steps, knots], rows that sum to 1."""
    return np.ones((steps, 1)) if count == 1 else _WEIGHTS[kind](count, steps)


def _linear(count: int, steps: int) -> np.ndarray:
    at = np.linspace(0, steps - 1, count)
    return np.stack([np.interp(np.arange(steps), at, unit) for unit in np.eye(count)], axis=1)


def _cubic(count: int, steps: int) -> np.ndarray:
    from scipy.interpolate import CubicSpline  # noqa: PLC0415 (a fifth of a second that few need)

    return CubicSpline(np.linspace(0, steps - 1, count), np.eye(count), bc_type="natural")(np.arange(steps))


def _constant(count: int, steps: int) -> np.ndarray:
    return np.eye(count)[np.arange(steps) * count // steps]


_WEIGHTS = {"linear": _linear, "cubic": _cubic, "constant": _constant}
