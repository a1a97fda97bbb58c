"""What varies from step to step: `PerStep` marks a step axis, `knots` makes one out of few values.

Invariant: a schedule is linear in its knots, and knots that are all equal give a constant schedule.
"""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig  # what equinox prints with
from jax import Array

from hypergrad._integers import as_int
from hypergrad._numbers import check_numbers
from hypergrad._shown import shown


class PerStep(eqx.Module):
    """Marks a leading axis of length `steps`: one value per training step.

    values: array [steps] or [steps, *parameter shape], or a pytree of them. It goes inside a domain:
    `hg.positive(hg.PerStep(jnp.full(100, 0.1)))`. It prints as the number of steps, the extremes and the norm.
    """

    values: Any

    def __pdoc__(self, **_: Any) -> Any:
        return wadler_lindig.TextDoc(f"PerStep({shown(self.values, steps=True)})")


_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs", "matmul", "rmatmul",
    "getitem", "float", "lt", "le", "gt", "ge",
)  # fmt: skip


def refuse_arithmetic(kind: type, why: str, cure: str) -> None:
    """Operators of Python on a `kind` are errors that say so. Not `==`, by which trees are compared."""

    def refused(name: str) -> Any:
        def operator(self: Any, *_: Any) -> Any:
            raise TypeError(f"{self} {why} and has no arithmetic ({name}): {cure}.")

        return operator

    for name in _OPERATORS:
        setattr(kind, f"__{name}__", refused(name))


refuse_arithmetic(
    PerStep,
    "marks a step axis for the library",
    "compute with its `.values`, an array with that axis first; the value of step t is `.values[t]`",
)


class Knots(eqx.Module):
    """A schedule held as the values at its knots. Made by `hg.knots`; `natural` turns it into a `PerStep`."""

    values: Any
    steps: int = eqx.field(static=True)
    kind: str = eqx.field(static=True)
    positions: tuple[float, ...] | None = eqx.field(static=True, default=None)

    def __pdoc__(self, **_: Any) -> Any:
        return wadler_lindig.TextDoc(f"knots({shown(self.values)}; {self.kind}, over {self.steps} steps)")

    def per_step(self) -> PerStep:
        return PerStep(jax.tree.map(self._spread, self.values))

    def _spread(self, values: Array) -> Array:
        # In 32 bits at least: the cotangent of each step would be rounded, in 16 to nothing below 6e-8, before they add up.
        dtype = jnp.result_type(values, float if jnp.issubdtype(values.dtype, jnp.integer) else jnp.float32)
        weights = jnp.asarray(_weights(values.shape[0], self.steps, self.kind, self.positions), dtype)
        return jnp.tensordot(weights, values, 1, precision=jax.lax.Precision.HIGHEST)


refuse_arithmetic(
    Knots, "is spread over the steps later", "compute with `hg.natural(...)` of it, or with the `.values` at knots"
)


def knots(values: Any, steps: int, kind: str = "linear", positions: Any = None) -> Knots:
    """schedule_t = sum_k weight_tk values_k: `steps` values from a few, which share their hypergradients' noise.

    values: array [knots] or [knots, *parameter shape], or a pytree of them. kind: "linear"; "cubic", the natural spline;
    "constant", where each value holds until the next knot. positions: the step of each knot, increasing numbers between 0
    and `steps - 1` (whole or not), not learned; before the first knot and after the last the schedule is constant. None: the
    first knot is at step 0, the last at step `steps - 1`, the others evenly between (constant: windows of steps / knots). It
    goes inside a domain and is spread in that domain's coordinates: `hg.positive(hg.knots(jnp.full(8, 0.1), 100))`
    interpolates logarithms, so it stays positive between its knots too. The schedule is float32 where knots are of 16 bits.
    """
    if not isinstance(kind, str) or kind not in _WEIGHTS:
        raise ValueError(f"`kind` of hg.knots must be one of {', '.join(map(repr, _WEIGHTS))}; got {kind!r}.")
    length = as_int(steps)
    if length is None or length < 1:
        raise ValueError(f"`steps` of hg.knots must be an integer of at least 1; got {steps!r}.")
    steps = length
    at = None if positions is None else _checked_positions(positions, steps)
    check_numbers("hg.knots", values)
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        kind_of = jnp.result_type(leaf) if eqx.is_array_like(leaf) else None
        if kind_of is None or not any(jnp.issubdtype(kind_of, real) for real in (jnp.floating, jnp.integer)):
            got = kind_of or type(leaf).__name__
            raise TypeError(f"hg.knots{jax.tree_util.keystr(path)} must be real numbers; got {got}.")
        where = f"hg.knots{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}"
        if jnp.ndim(leaf) == 0 or not 1 <= jnp.shape(leaf)[0] <= steps:
            listed = " A list is a tree of its entries: make it an array." if path and jnp.ndim(leaf) == 0 else ""
            raise ValueError(f"{where}; its leading axis counts the knots, from 1 to steps={steps}.{listed}")
        if at is not None and jnp.shape(leaf)[0] != len(at):
            raise ValueError(f"{where}, for {len(at)} positions: give one position for each knot.")
    return Knots(jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), values), steps, kind, at)


def _checked_positions(positions: Any, steps: int) -> tuple[float, ...]:
    must = f"`positions` of hg.knots must be increasing numbers between 0 and steps - 1 = {steps - 1}, one for each knot"
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(positions)):
        raise TypeError(f"{must}; they are traced. They are not learned: make them Python numbers or a NumPy array.")
    at = np.asarray(positions)
    if at.ndim != 1 or not np.issubdtype(at.dtype, np.number) or np.iscomplexobj(at):
        raise TypeError(f"{must}; got {positions!r}.")
    if not (at.size and (np.diff(at) > 0).all() and 0 <= at[0] and at[-1] <= steps - 1):
        raise ValueError(f"{must}; got {positions!r}.")
    if at.size > 2 and at[-1] <= 1:
        raise ValueError(f"{must}; got {positions!r}, all within one step. They are steps, not parts of the run.")
    return tuple(float(x) for x in at)


def spread(tree: Any) -> Any:
    """The tree with all `Knots` in it turned into `PerStep`."""
    return jax.tree.map(lambda x: x.per_step() if is_knots(x) else x, tree, is_leaf=is_knots)


def has_knots(tree: Any) -> bool:
    return any(map(is_knots, jax.tree.leaves(tree, is_leaf=is_knots)))


def leaves_with_knots(tree: Any) -> Iterator[tuple[Any, Any, str]]:
    """(path, leaf, what is made of it where it is the values of `Knots`)"""
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_knots):
        made = ""
        if is_knots(node):
            at = "" if node.positions is None else f" at {', '.join(repr(x) for x in node.positions)}"
            made = f", {node.kind} knots over {node.steps} steps{at}"
        for inner, x in jax.tree_util.tree_leaves_with_path(node):
            yield (*path, *inner), x, made


def is_knots(x: Any) -> bool:
    return isinstance(x, Knots)


def _weights(count: int, steps: int, kind: str, positions: tuple[float, ...] | None = None) -> np.ndarray:
    """What each knot contributes to each step: float64 [steps, knots], rows that sum to 1."""
    if count == 1:
        return np.ones((steps, 1))
    if positions is None:
        at = np.arange(count) * steps / count if kind == "constant" else np.linspace(0, steps - 1, count)
    else:
        at = np.asarray(positions)
    return _WEIGHTS[kind](at, np.clip(np.arange(steps), at[0], at[-1]), np.eye(count))


# Of knots `at` these places, the weights of each at the steps t, which lie between the first and the last.


def _linear(at: np.ndarray, t: np.ndarray, units: np.ndarray) -> np.ndarray:
    return np.stack([np.interp(t, at, unit) for unit in units], axis=1)


def _cubic(at: np.ndarray, t: np.ndarray, units: np.ndarray) -> np.ndarray:
    from scipy.interpolate import CubicSpline  # noqa: PLC0415 (a fifth of a second that few need)

    return CubicSpline(at, units, bc_type="natural")(t)


def _constant(at: np.ndarray, t: np.ndarray, units: np.ndarray) -> np.ndarray:
    return units[np.searchsorted(at, t, side="right") - 1]


_WEIGHTS = {"linear": _linear, "cubic": _cubic, "constant": _constant}
