"""What was learned, as an optax transformation: the chain of an optimizer, in floats.

Invariant: one update is one step of training with floats in place of the grid, so a plain loop is our training to rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from hypergrad import _door as door
from hypergrad._integers import as_int
from hypergrad.hypers import describe, natural
from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import PARAMS, Link, Optimizer, early
from hypergrad.optimizers.decoupled import LOST
from hypergrad.optimizers.expand import Hypers
from hypergrad.optimizers.gradient_link import WithGradientLink
from hypergrad.optimizers.initial import final_state
from hypergrad.optimizers.lay_out import LaidOut, lay_out
from hypergrad.optimizers.partition import Partition, layers_of
from hypergrad.optimizers.transform import Transformed, read_of
from hypergrad.optimizers.weights import weights_after
from hypergrad.run.per_step import squeezed
from hypergrad.schedules import PerStep


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
    last values hold, and the bias corrections of Adam go on. A rule whose `prepare` sees all steps at once (not
    `by_step`), as that of `hg.ScheduleFreeAdamW`, needs them; afterwards what it made of the last holds.
    """
    optimizer = _checked(optimizer)
    steps = _length(optimizer, steps)

    def init(params: Any) -> OptaxState:
        params = door.check_params(params)
        out = _laid_out(optimizer, params, steps, None)  # prefixes, schedules and decays that do not fit
        links = final_state(tuple(out.blocks), out.values, jax.tree.structure(params))
        del links[PARAMS]
        return OptaxState(jnp.int32(0), links, jax.tree.map(jnp.zeros_like, _log_decays(_at(optimizer, 0), params)))

    def update(updates: Any, state: OptaxState, params: Any = None, **_: Any) -> tuple[Any, OptaxState]:
        if params is None:
            raise ValueError("what hg.to_optax made needs the parameters: update(gradients, state, params).")
        params = jax.tree.map(jnp.asarray, params)
        leaves, tree = jax.tree.flatten(params)
        given = _gradients(updates, params)
        out = _at_present(optimizer, steps, params, state)
        g = [block.join(given).astype(block.dtype) for block in out.blocks]
        moved = _step(out, g)
        moves = jax.tree.leaves(final_state(tuple(out.blocks), moved, tree)[PARAMS])
        links = {name: x for name, x in final_state(tuple(out.blocks), moved, tree).items() if name != PARAMS}
        log_kept = jax.tree.map(jnp.add, state.log_kept, _log_decays(_at(optimizer, state.count), params))
        moves = [move.astype(x.dtype) for move, x in zip(moves, leaves, strict=True)]
        return jax.tree.unflatten(tree, moves), OptaxState(optax.safe_increment(state.count), links, log_kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _gradients(updates: Any, params: Any) -> list[Any]:
    """Leaf by leaf, like the parameters."""
    try:
        found = jax.tree.structure(params).flatten_up_to(updates)  # type: ignore[attr-defined]
    except (ValueError, TypeError) as e:
        raise ValueError(
            "update(gradients, state, params) of what hg.to_optax made: gradients must have the tree of `params`, "
            f"{jax.tree.structure(params)}; got {jax.tree.structure(updates)}."
        ) from e
    for (path, w), g in zip(jax.tree_util.tree_leaves_with_path(params), found, strict=True):
        real = eqx.is_array_like(g) and not jnp.issubdtype(jnp.result_type(g), jnp.complexfloating)
        if not real or jnp.shape(g) != jnp.shape(w):
            raise ValueError(
                f"update(gradients, state, params) of what hg.to_optax made: gradients{jax.tree_util.keystr(path)} must be "
                f"real, of the parameter's shape {jnp.shape(w)}; got {describe(g)}."
            )
    return [jnp.asarray(g) for g in found]


def _laid_out(optimizer: Optimizer, params: Any, steps: int, state: Any) -> LaidOut:
    """No rule begins with the state: it is that of a loop which began without one."""
    return lay_out(optimizer, params, steps, state, None, unbounded=False, on_grid=False)


def _at_present(optimizer: Optimizer, steps: int, params: Any, state: OptaxState) -> LaidOut:
    """The next step: its hyperparameters, without a step axis, and what all links have come to.

    Of rules that prepare each step by itself as of a run of one step, which begins with the state so far: nothing is
    computed for the other steps, and there is no last one. Of others as of the run from its first step.
    """
    if _prepared_together(optimizer):
        whole, t = _laid_out(optimizer, params, steps, None), state.count
        out = whole._replace(values=_laid_out(optimizer, params, steps, state.links).values)
    else:
        weights = jax.tree.map(lambda x: -jnp.expm1(x), state.log_kept)
        out, t = _laid_out(_at(optimizer, state.count), params, 1, {**state.links, **weights}), jnp.int32(0)
    h = [{name: squeezed(_row(x, t)) for name, x in own.items()} for own in out.h]
    values = [{name: x.astype(b.dtype) for name, x in own.items()} for b, own in zip(out.blocks, out.values, strict=True)]
    return out._replace(h=h, values=values)


def _step(out: LaidOut, g: list[Array]) -> list[Floats]:
    """z_k <- rho_k z_k + increment_k for k = 1..K: the other links afterwards, and how the parameters move. What
    transformations read moves first, by the gradient as it is."""
    first = [early(block.chain, read_of(out.transforms, j)) for j, block in enumerate(out.blocks)]
    z = [_moved(b, b.chain[:k], h, own, x) for b, k, h, own, x in zip(out.blocks, first, out.h, out.values, g, strict=True)]
    for transform in out.transforms:
        g = transform(out.h, [own[PARAMS] for own in z], g, z)
    z = [_moved(b, b.chain[k:-1], h, own, x) for b, k, h, own, x in zip(out.blocks, first, out.h, z, g, strict=True)]
    return [own | {PARAMS: _move(b, h, own)} for b, h, own in zip(out.blocks, out.h, z, strict=True)]


def _moved(block: Block, links: Sequence[Link], h: Hypers, z: Floats, g: Array) -> Floats:
    for link in links:
        kept = h[link.decay] * z[link.name] if link.decay else z[link.name]
        z = {**z, link.name: kept + block.increment(link, h, _read(z, link.name), g)}
    return z


def _move(block: Block, h: Hypers, z: Floats) -> Array:
    """Of the parameters."""
    params = block.chain[-1]
    move = jnp.zeros_like(z[PARAMS]) if params.increment is None else block.increment(params, h, _read(z, PARAMS), None)
    return move - h.get(LOST, 1 - h[params.decay]) * z[PARAMS] if params.decay else move


def _read(z: Floats, name: str) -> Floats:
    """What a link's increment may read of the others."""
    return {other: x for other, x in z.items() if other != name}


def _prepared_together(optimizer: Any) -> list[str]:
    """Rules whose `prepare` may make the values of one step of those of others."""
    found = [x for x in jax.tree.leaves(optimizer, is_leaf=_is_rule) if _is_rule(x)]
    rules = [x.rule if isinstance(x, WithGradientLink) else x for x in found]
    return [type(x).__name__ for x in rules if type(x).prepare is not Optimizer.prepare and not _by_step(x)]


def _by_step(rule: Optimizer) -> bool:
    """`by_step`, as the class says that has the last word on `prepare`."""
    owner = next(c for c in type(rule).__mro__ if "by_step" in vars(c) or "prepare" in vars(c))
    return "by_step" in vars(owner) and rule.by_step


def _is_rule(x: Any) -> bool:
    return isinstance(x, Optimizer) and not isinstance(x, (Partition, Transformed))


def _log_decays(optimizer: Optimizer, params: Any) -> dict[str, Any]:
    """Logarithms of the decays that count in `Optimizer.weights`, of an optimizer of one step."""
    return jax.tree.map(lambda x: jnp.log1p(-x), weights_after(layers_of(optimizer, params), None, 1))


def _at(optimizer: Optimizer, t: Any) -> Optimizer:
    """The optimizer of step t, without schedules."""
    is_per_step = lambda x: isinstance(x, PerStep)  # noqa: E731
    row = lambda x: jax.tree.map(lambda v: _row(jnp.asarray(v), t), x.values) if is_per_step(x) else x  # noqa: E731
    return jax.tree.map(row, optimizer, is_leaf=is_per_step)


def _row(x: Array, t: Any) -> Array:
    return x[jnp.minimum(t, x.shape[0] - 1)]


def _checked(optimizer: Any) -> Optimizer:
    if isinstance(optimizer, Optimizer) and optimizer.signals:
        raise TypeError(
            f"hg.to_optax: the optimizer sees more than the gradient ({', '.join(optimizer.signals)}), made of the loss and "
            "the batch, which optax does not hand on."
        )
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
    given, steps = steps, None if steps is None else as_int(steps)
    if given is not None and (steps is None or steps < 1):
        raise ValueError(f"`steps` of hg.to_optax must be an integer of at least 1; got {given!r}.")
    schedules = [x for x in jax.tree.leaves(optimizer, is_leaf=lambda x: isinstance(x, PerStep)) if isinstance(x, PerStep)]
    lengths = {jnp.shape(x)[0] for x in jax.tree.leaves(schedules) if jnp.ndim(x)}
    if len(lengths | ({steps} - {None})) > 1:
        told = f", and steps={steps}" if steps is not None else ""
        raise ValueError(f"hg.to_optax: the schedules have lengths {sorted(lengths)}{told}. They are of one training run.")
    own = _prepared_together(optimizer)
    if not lengths and steps is None and own:
        raise ValueError(
            f"hg.to_optax: `prepare` of {own[0]} may make other values for each step, and no schedule says how many there "
            "are. Pass steps=..., as in training."
        )
    return lengths.pop() if lengths else steps or 1
