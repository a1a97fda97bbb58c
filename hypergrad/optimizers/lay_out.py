"""From an optimizer and parameters to blocks: which leaves lie side by side, what moves them, what they begin with.

Invariant: the leaves of all blocks are all leaves, once each, in the order of their first.
"""

import collections
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.block import Block, Floats, block, lying
from hypergrad.optimizers.chain import PARAMS, STATISTICS, Optimizer, check_invertible
from hypergrad.optimizers.expand import (
    Field,
    Hypers,
    broadcast_prefix,
    compute_dtype,
    expand,
    fields_of,
    prepared_statistics,
    ratio,
    shared_value,
)
from hypergrad.optimizers.initial import initial_values
from hypergrad.optimizers.partition import Layer, Stack, layers_of, stacks_of
from hypergrad.optimizers.past import Before, Past
from hypergrad.optimizers.prepared import Prepared, begun, check_fits, prepared
from hypergrad.optimizers.side_by_side import keeps_shape, side_by_side
from hypergrad.optimizers.statistics import MEANS, Statistics
from hypergrad.optimizers.transform import Transform
from hypergrad.optimizers.weights import weights_of
from hypergrad.schedules import PerStep


class LaidOut(NamedTuple):
    """An optimizer, laid out over the parameters."""

    blocks: list[Block]
    values: list[Floats]  # initial, of each block: link -> floats
    h: list[Hypers]  # of each block
    alike: list[tuple[Hashable, ...]]  # of each block and link: equal where decays are
    per_step: list[dict[str, Array]]  # of each block, those of h that are one scalar a step: [steps], one for all blocks
    transforms: tuple[Transform, ...]  # in the order in which the gradient passes them
    layers: tuple[Layer, ...]
    names: list[dict[str, str]]  # of each leaf, what users call the fields of its rule


def lay_out(
    optimizer: Optimizer,
    params: Any,
    steps: int,
    state: Any,
    fraction_bits: int | None,
    unbounded: bool,
    on_grid: bool = True,
    begin: int = 0,
    past: Past | None = None,
    elsewhere: bool = False,
) -> LaidOut:
    """state: as `hg.train` takes it. fraction_bits: of the grid of the parameters; None: by their dtypes. unbounded: whether
    lost digits go to arbitrary-precision integers. on_grid: whether a run begins with the state, so that rules `begin`; else
    a loop in floats goes on, which needs none of `Optimizer.bounds` against the rounding of a grid. begin: the step
    that the derivative begins with. past: what held before the step from which the optimizer does.
    elsewhere: whether the run is to have the same bits on any number of devices."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(params), strict=True)
    names = list(map(jax.tree_util.keystr, paths))
    layers = layers_of(optimizer, params)
    for layer in layers:
        if layer.is_rule:
            check_invertible(layer.optimizer)
    stacks = stacks_of(layers, len(leaves))
    fields = {layer.path: fields_of(layer, params, weights_of(layer, state)) for layer in layers}
    of_leaf = [[fields[layer.path] for layer in stack.layers] for stack in stacks]
    before = None if past is None else Before(past, params, state, len(leaves))
    asked = of_leaf if before is None else [[*now, *old] for now, old in zip(of_leaf, before.of_leaf, strict=True)]
    all_parts = side_by_side(stacks, asked, list(leaves), elsewhere, by_parts=before is None)
    of_blocks = [tuple(i for part in parts for i in part) for parts in all_parts]
    in_vectors = [stacks[own[0]].entrywise and not keeps_shape(own, leaves, elsewhere) for own in of_blocks]
    joined = lambda b, own: lying(own, in_vectors[b], len(all_parts[b]))  # noqa: E731
    values = initial_values(stacks, layers, of_blocks, params, state, joined)
    blocks, h, alike, per_step = [], [], [], []
    made: dict[Hashable, Any] = {}
    of_rules: dict[Hashable, Prepared] = {}
    of_begin: dict[Hashable, Any] = {}
    rows: dict[Hashable, Array] = {}
    for own, parts, start, flat in zip(of_blocks, all_parts, values, in_vectors, strict=True):
        first, stack = own[0], stacks[own[0]]
        path, axes = names[first], start[PARAMS].ndim
        of_parts = [expand(stack, of_leaf[i], i, names[i], leaves[i], steps, axes, made) for i, *_ in parts]
        expanded = own_fields = _side_by_side(of_parts, made)
        if before is not None:
            expanded = before.joined(own_fields, first, path, leaves[first], steps, axes)
        dtype = compute_dtype(leaves[first])
        name = tuple(layer.path for layer in stack.layers), dtype, *((key, id(x)) for key, x in expanded.items())
        if name not in of_rules:
            of_rules[name] = prepared(stack, expanded, steps, dtype, on_grid, begin)
            if before is not None:
                of_rules[name] = before.with_decays(of_rules[name], first, path, leaves[first], steps, axes)
        found = of_rules[name]
        if state is not None and on_grid:
            found = begun(stack, found, expanded, start, steps, dtype, of_begin)
        hj = found.h
        check_fits(stack, path, hj, start.values())
        decays = [of_leaf[first][-1][x.decay].values[first] if x.decay in found.given else None for x in stack.chain]
        grid: Any = {"fraction_bits": fraction_bits, "unbounded": unbounded}
        made_of = parts, list(leaves), stack.chain, hj, decays, steps
        blocks.append(block(*made_of, flat=flat, entrywise=stack.entrywise, **grid))
        h.append(hj)
        with_past = {key: id(x) for key, x in expanded.items() if x is not own_fields[key]}
        alike.append(_decays_alike(stack, of_leaf[first], first, found, blocks[-1], with_past))
        kept = {key for key, x in hj.items() if x is own_fields.get(key) and x.size == x.shape[0]}
        per_step.append(
            {key: x for key, x in _per_step(stack, of_leaf[first], first, blocks[-1], rows).items() if key in kept}
        )
    of_rule = [{key: field.name for key, field in own[-1].items()} for own in of_leaf]
    return LaidOut(blocks, values, h, alike, per_step, _transforms(layers, blocks), layers, of_rule)


def _decays_alike(
    stack: Stack, fields: list[dict[str, Field]], leaf: int, found: Prepared, block: Block, with_past: dict[str, int]
) -> tuple[Hashable, ...]:
    """Of each link, what tells its decay from another's: of one that `prepare` makes, all that this is made of; of one that
    `begin` makes, which sees values of links, itself. with_past: arrays of fields that had other values before, by id."""
    rule = {key: with_past.get(key, shared_value(field.values[leaf])) for key, field in fields[-1].items()}
    all_of = (stack.rule.path, *rule.values())

    def source(decay: Any) -> Hashable:
        if decay in found.begun:
            return "begin", id(found.h[decay])
        return rule[decay] if decay in found.given else (decay, all_of)

    return tuple((link.denominator, link.may_be_one, block.dtype, source(link.decay)) for link in block.chain)


def _per_step(
    stack: Stack, fields: list[dict[str, Field]], leaf: int, block: Block, made: dict[Hashable, Array]
) -> dict[str, Array]:
    """`LaidOut.per_step` of fields. made: for all blocks, so that those that have the same array share it."""
    decays, found = {link.decay: link for link in stack.chain if link.decay}, {}
    for layer, own in zip(stack.layers, fields, strict=True):
        for key, field in own.items():
            value, link = field.values[leaf], decays.get(key) if layer.is_rule else None
            if isinstance(value, PerStep) and _is_row(value.values, block.dtype):
                name = id(value.values), link and (link.denominator, link.may_be_one)
                if name not in made:
                    made[name] = value.values if link is None else ratio(link, value.values)
                found[key] = made[name]
    return found


def common(h: list[Hypers]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """`Run.common`: arrays that several blocks have, by number."""
    counts = collections.Counter(id(x) for own in h for x in own.values())
    numbers = {one: k for k, one in enumerate(one for one, count in counts.items() if count > 1)}
    return tuple(tuple((key, numbers[id(x)]) for key, x in own.items() if id(x) in numbers) for own in h)


def _side_by_side(of_parts: list[Hypers], made: dict[Hashable, Any]) -> Hypers:
    """The hyperparameters of a block, [steps | 1, parts, 1], of those of its parts, [steps | 1, 1, 1]; as they are where
    these are the same. made: as of `expand`, so that blocks whose parts have the same share it."""

    def one(values: list[Array]) -> Array:
        if all(x is values[0] for x in values):
            return values[0]
        name = tuple(map(id, values))
        if name not in made:
            made[name] = jnp.concatenate(values, axis=1)
        return made[name]

    return {key: one([own[key] for own in of_parts]) for key in of_parts[0]}


def _transforms(layers: tuple[Layer, ...], blocks: list[Block]) -> tuple[Transform, ...]:
    result = []
    for layer in layers:
        seen = tuple(j for j, own in enumerate(blocks) if own.leaves[0] in layer.leaves)
        if not layer.is_rule and seen:
            keys = tuple((field, layer.key(field)) for field in layer.optimizer.hyperparameters())
            around: Any = layer.optimizer
            if PARAMS in around.reads:
                raise TypeError(
                    f"{type(around).__name__} reads `{PARAMS}`, whose new values come after the gradient that it makes. The "
                    "old ones are w in transform(h, w, g, z)."
                )
            if missing := sorted({name for j in seen for name in set(around.reads) - {k.name for k in blocks[j].chain}}):
                raise TypeError(
                    f"{type(around).__name__} reads links that the optimizer inside does not have: {', '.join(missing)}. Is "
                    f"each spelt as in its chain, [{', '.join(k.name for k in blocks[seen[0]].chain)}]?"
                )
            result.append(Transform(type(around).__name__, around.transform, keys, seen, around.reads))
    return tuple(result)


def with_statistics(out: LaidOut, statistics: Statistics, steps: int, fraction_bits: int | None, unbounded: bool) -> LaidOut:
    """With one block for each of the running statistics, after those of the parameters."""
    leaves, rates = jax.tree.leaves(statistics.values), prepared_statistics(statistics, steps)
    decays = broadcast_prefix("statistics.decay", statistics.decay, statistics.values, "the statistics")
    for i, (leaf, h, decay) in enumerate(zip(leaves, rates, decays, strict=True)):
        grid: Any = {"fraction_bits": fraction_bits, "unbounded": unbounded}
        own = block(((i,),), leaves, (MEANS,), h, [decay], steps, flat=False, entrywise=False, **grid)
        out.blocks.append(own)
        out.values.append({STATISTICS: leaf.astype(compute_dtype(leaf))})
        out.h.append(h)
        out.per_step.append({})
        out.alike.append(((MEANS.denominator, own.dtype, shared_value(decay)),))
    return out


def shared(blocks: Sequence[Block], alike: list[tuple[Hashable, ...]]) -> tuple[tuple[int | None, ...], ...]:
    """`Run.shared`: one number for all links whose decays are alike."""
    numbers: dict[Hashable, int] = {}
    return tuple(
        tuple(
            numbers.setdefault((key, buffer), len(numbers)) if link.decay else None
            for link, key, buffer in zip(block.chain, keys, block.buffers, strict=True)
        )
        for block, keys in zip(blocks, alike, strict=True)
    )


def _is_row(x: Any, dtype: Any) -> bool:
    return isinstance(x, jax.Array) and x.ndim == 1 and x.dtype == dtype
