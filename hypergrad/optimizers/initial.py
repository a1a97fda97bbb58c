"""Initial values of every link, from the parameters and a `state`.

Invariant: the `state` that a run ends with is a `state` that a run may begin with.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad._isolation import isolated_once
from hypergrad._programs import owned
from hypergrad.hypers import describe
from hypergrad.optimizers.block import Block, split_vectors
from hypergrad.optimizers.chain import PARAMS, Link, first_value
from hypergrad.optimizers.expand import compute_dtype
from hypergrad.optimizers.partition import Layer, Stack
from hypergrad.optimizers.weights import names_of


def initial_values(
    stacks: list[Stack], layers: tuple[Layer, ...], blocks: list[tuple[int, ...]], params: Any, state: Any, joined: Any
) -> list[dict[str, Array]]:
    """Of each block, link by link. blocks: their leaves; joined(block, leaves): these as one array."""
    names = list(dict.fromkeys(link.name for stack in stacks for link in stack.chain[:-1]))
    weights = names_of(layers)
    if state is not None and (not isinstance(state, dict) or not set(names) <= set(state) <= {*names, *weights}):
        got = sorted(state) if isinstance(state, dict) else describe(state)
        also = f", and if they are known {weights}" if weights else ""
        raise ValueError(f"`state` must be None or a dict with the keys {names}{also}, as in Trained.state; got {got}.")
    leaves = jax.tree.leaves(params)
    given = {name: _state_leaves(name, state[name], params) for name in names} if state is not None else {}
    result = []
    for b, own in enumerate(blocks):
        chain = stacks[own[0]].chain
        values = {PARAMS: joined(b, [leaves[i] for i in own])}
        for link in chain[:-1]:
            parts = [_first(link, leaves[i], given[link.name][i] if given else None) for i in own]
            values[link.name] = joined(b, parts)
        result.append(values)
    return result


def _first(link: Link, leaf: Array, given: tuple[str, Any] | None) -> Array:
    start = first_value(link, leaf.astype(compute_dtype(leaf)))
    if given is None:
        return start
    where, x = given
    if not eqx.is_array_like(x) or jnp.shape(x) != start.shape or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(f"{where} must be a float array of shape {start.shape}; got {describe(x)}.")
    return owned(x).astype(start.dtype)


def _state_leaves(name: str, given: Any, params: Any) -> list[tuple[str, Any]]:
    """(path, value) for each leaf of the parameters; None where it has no such link."""
    leaves, tree = jax.tree_util.tree_leaves_with_path(params), jax.tree.structure(params)
    try:
        values = tree.flatten_up_to(given)  # type: ignore[attr-defined]
    except ValueError as e:
        message = f"state[{name!r}] must have the tree of `params`, {tree}; got {jax.tree.structure(given)}."
        raise ValueError(message) from e
    return [(f"state[{name!r}]{jax.tree_util.keystr(path)}", x) for (path, _), x in zip(leaves, values, strict=True)]


def final_state(blocks: tuple[Block, ...], values: list[dict[str, Array]], tree: Any) -> dict[str, Any]:
    """{link: pytree like the parameters}, None for leaves whose chain does not have it."""
    held = [(block, link.name) for block in blocks for link in block.chain]
    arrays = [own[link.name] for block, own in zip(blocks, values, strict=False) for link in block.chain]
    split = functools.partial(split_vectors, shapes=tuple(block.shapes if block.flat else None for block, _ in held))
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    parts = isolated_once(split, arrays) if traced and any(block.split_apart for block in blocks) else split(arrays)
    found: dict[str, list[Any]] = {}
    count = sum(len(block.leaves) for block in blocks)
    for (block, name), own in zip(held, parts, strict=True):
        row = found.setdefault(name, [None] * count)
        for i, x in zip(block.leaves, own, strict=True):
            row[i] = x
    return {name: jax.tree.unflatten(tree, row) for name, row in found.items()}
