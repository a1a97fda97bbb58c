"""What was learned, as an optax transformation: the chain of an optimizer, in floats.

Invariant: one update is one step of training with floats in place of the grid, so a plain loop is our training to rounding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from hypergrad import _door as door
from hypergrad.hypers import describe, natural
from hypergrad.optimizers.chain import PARAMS, Link, Optimizer, View
from hypergrad.optimizers.expand import compute_dtype, prepared, weights_after
from hypergrad.optimizers.layout import separate
from hypergrad.optimizers.transform import transforms
from hypergrad.schedules import PerStep


Leaves = list[Array]  # one array for each parameter leaf, in its `compute_dtype`
Hypers = list[dict[str, Array]]  # what increments read as `h`, at one step, for each leaf


class OptaxState(NamedTuple):
    """Where a run by `to_optax` stands."""

    count: Array  # type: ignore[assignment]  # updates so far, int32 []; optax calls it so
    links: dict[str, Any]  # accumulators, each like the parameters, as in `Trained.state`
    log_kept: dict[str, Any]  # of `Optimizer.weights`: the logarithm of the product of the decays so far


def to_optax(optimizer: Optimizer, steps: int | None = None) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, with schedules, groups, clipping and decay, as an optax transformation for plain training in floats.

    optimizer: any of ours or of your own, in natural units or with domains in it, as `train_fn` makes it of what was
    learned. A loop of `update` and `optax.apply_updates` gives the losses of `hg.train` to rounding. `update` needs
    `params`, computes in float32 at least, with every decay rounded to the n/d of training, and rounds updates to the
    parameters' types. steps: the length of its schedules, which they tell unless there are none. After that many updates the
    last values hold, and the bias corrections of Adam go on. A rule of your own with a `prepare` sees all steps at once, as
    in training, so it needs them; afterwards what it made of the last holds.
    """
    optimizer = _checked(optimizer)
    steps = _length(optimizer, steps)

    def init(params: Any) -> OptaxState:
        params = door.check_params(params)
        leaves, tree = jax.tree.flatten(params)
        jax.eval_shape(lambda: _prepared(optimizer, params, steps))  # prefixes, schedules and decays that do not fit
        starts = {link.name: [link.start(x.astype(compute_dtype(x))) for x in leaves] for link in optimizer.chain[:-1]}
        links = {name: jax.tree.unflatten(tree, values) for name, values in starts.items()}
        return OptaxState(jnp.int32(0), links, jax.tree.map(jnp.zeros_like, _log_decays(_at(optimizer, 0))))

    def update(updates: Any, state: OptaxState, params: Any = None, **_: Any) -> tuple[Any, OptaxState]:
        if params is None:
            raise ValueError("what hg.to_optax made needs the parameters: update(gradients, state, params).")
        leaves, tree = jax.tree.flatten(params)
        w, g = _computed(leaves, leaves), _computed(jax.tree.leaves(updates), leaves)
        z = {name: jax.tree.leaves(values) for name, values in state.links.items()} | {PARAMS: w}
        h = _hypers_at(optimizer, steps, params, state, z)
        moves, links = _step(optimizer, h, z, g)
        moves = [move.astype(x.dtype) for move, x in zip(moves, leaves, strict=True)]
        links = {name: jax.tree.unflatten(tree, values) for name, values in links.items()}
        log_kept = jax.tree.map(jnp.add, state.log_kept, _log_decays(_at(optimizer, state.count)))
        return jax.tree.unflatten(tree, moves), OptaxState(optax.safe_increment(state.count), links, log_kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _computed(values: list[Any], leaves: list[Any]) -> Leaves:
    return [jnp.asarray(x).astype(compute_dtype(leaf)) for x, leaf in zip(values, leaves, strict=True)]


def _step(optimizer: Optimizer, h: Hypers, z: dict[str, Leaves], g: Leaves) -> tuple[Leaves, dict[str, Leaves]]:
    """z_k <- rho_k z_k + increment_k for k = 1..K: how the parameters move, and the other links afterwards."""
    for transform in transforms(optimizer):
        g = transform(h, z[PARAMS], g)
    *others, params = optimizer.chain
    for link in others:
        read = [_read(link, z, j) for j in range(len(g))]
        updates = [link.increment(View(hj, link.name), zj, gj) for hj, zj, gj in zip(h, read, g, strict=True)]
        kept = [hj[link.decay] * x if link.decay else x for hj, x in zip(h, z[link.name], strict=True)]
        z = {**z, link.name: [x + u for x, u in zip(kept, updates, strict=True)]}
    moves = [params.increment(View(hj, PARAMS), _read(params, z, j)) for j, hj in enumerate(h)]
    if params.decay:
        moves = [(hj[params.decay] - 1) * w + u for hj, w, u in zip(h, z[PARAMS], moves, strict=True)]
    return moves, {link.name: z[link.name] for link in others}


def _read(link: Link, z: dict[str, Leaves], j: int) -> View:
    """What a link's increment may read of the others, at leaf j."""
    return View({name: values[j] for name, values in z.items() if name != link.name}, link.name)


def _hypers_at(optimizer: Optimizer, steps: int, params: Any, state: OptaxState, z: dict[str, Leaves]) -> Hypers:
    """Those of the next step. Of our own rules as of a run of one step, which begins with the state so far: nothing is
    computed for the other steps, and there is no last one."""
    rule = optimizer.layers[-1]
    if _prepares_itself(optimizer):
        rows = _prepared(optimizer, params, steps)
        return [{name: _row(x, state.count) for name, x in h.items()} for h in rows]
    weights = jax.tree.map(lambda x: -jnp.expm1(x), state.log_kept)
    rows = _prepared(_at(optimizer, state.count), params, 1, weights)
    begun = [rule.begin(h, {name: x[j] for name, x in z.items()}) for j, h in enumerate(rows)]
    return [{name: x[0] for name, x in h.items()} for h in begun]


def _prepared(optimizer: Optimizer, params: Any, steps: int, weights: dict[str, Any] | None = None) -> Hypers:
    layout = separate([x.shape for x in jax.tree.leaves(params)])
    return prepared(optimizer, params, steps, layout, weights)[0]


def _prepares_itself(optimizer: Optimizer) -> bool:
    """Whether a `prepare` is not the library's, and may make values of many steps together."""
    return any(not type(layer).prepare.__module__.startswith("hypergrad.") for layer in optimizer.layers)


def _log_decays(optimizer: Optimizer) -> dict[str, Any]:
    """Logarithms of the decays that count in `Optimizer.weights`, of an optimizer of one step."""
    return jax.tree.map(lambda x: jnp.log1p(-x), weights_after(optimizer, {}, 1))


def _at(optimizer: Optimizer, t: Any) -> Optimizer:
    """The optimizer of step t, without schedules."""
    is_per_step = lambda x: isinstance(x, PerStep)  # noqa: E731
    row = lambda x: jax.tree.map(lambda v: _row(jnp.asarray(v), t), x.values) if is_per_step(x) else x  # noqa: E731
    return jax.tree.map(row, optimizer, is_leaf=is_per_step)


def _row(x: Array, t: Any) -> Array:
    return x[jnp.minimum(t, x.shape[0] - 1)]


def _checked(optimizer: Any) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        return natural(optimizer)
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        raise TypeError("hg.to_optax takes one of our optimizers, such as hg.AdamW(1e-3); this is optax's already.")
    raise TypeError(
        f"hg.to_optax takes an optimizer; got {describe(optimizer)}. Make it of what was learned, as your train_fn does: "
        'h = hg.natural(result.best.hypers), then hg.to_optax(hg.SGD(h["learning_rate"], h["momentum"])).'
    )


def _length(optimizer: Optimizer, steps: Any) -> int:
    """Of the schedules of an optimizer."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"`steps` of hg.to_optax must be an integer of at least 1; got {steps!r}.")
    schedules = [x for x in jax.tree.leaves(optimizer, is_leaf=lambda x: isinstance(x, PerStep)) if isinstance(x, PerStep)]
    lengths = {jnp.shape(x)[0] for x in jax.tree.leaves(schedules) if jnp.ndim(x)}
    if len(lengths | ({steps} - {None})) > 1:
        told = f", and steps={steps}" if steps is not None else ""
        raise ValueError(f"hg.to_optax: the schedules have lengths {sorted(lengths)}{told}. They are of one training run.")
    if not lengths and steps is None and _prepares_itself(optimizer):
        raise ValueError(
            f"hg.to_optax: `prepare` of {type(optimizer.layers[-1]).__name__} may make other values for each step, and no "
            "schedule says how many there are. Pass steps=..., as in training."
        )
    return lengths.pop() if lengths else steps or 1
