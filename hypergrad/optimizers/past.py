"""Hyperparameters that hold from a step on, in a run that goes on from another.

Invariant: at the steps before, `prepare` reads what it read in the run before, so that sums over steps, such as the weights
of an average, go on from there; and the decays that it makes are those of the run before, to the last bit.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.chain import Optimizer
from hypergrad.optimizers.expand import Hypers, compute_dtype, concrete, expand, fields_of
from hypergrad.optimizers.partition import layers_of, stacks_of
from hypergrad.optimizers.prepared import Prepared, prepared
from hypergrad.optimizers.weights import weights_of


class Past(NamedTuple):
    """What held at the steps before `step`."""

    optimizer: Optimizer
    steps: int  # of the run before, all of them
    step: int


class Before:
    """The fields of a `Past`, leaf by leaf."""

    def __init__(self, past: Past, params: Any, state: Any, leaves: int) -> None:
        layers = layers_of(past.optimizer, params)
        self.past, self.stacks = past, stacks_of(layers, leaves)
        fields = {layer.path: fields_of(layer, params, weights_of(layer, state)) for layer in layers}
        self.of_leaf = [[fields[layer.path] for layer in stack.layers] for stack in self.stacks]
        self.made: dict[Hashable, Array] = {}
        self.whole: dict[Hashable, tuple[Array, Array, Array]] = {}

    def joined(self, expanded: Hypers, leaf: int, path: str, like: Array, steps: int, axes: int) -> Hypers:
        """`expanded`, with what held before at the steps before; but for decays, which must be the same there. One array for
        all blocks that have the same two."""
        before, decays = self._expanded(leaf, path, like, axes), {link.decay for link in self.stacks[leaf].chain}
        kept = {key for key in expanded if key in decays or key not in before}
        return {key: x if key in kept else self._one(before[key], x, steps) for key, x in expanded.items()}

    def with_decays(self, found: Prepared, leaf: int, path: str, like: Array, steps: int, axes: int) -> Prepared:
        """With the decays that the rule makes as they were at the steps before: of other sums they would be rounded
        otherwise, and states are in their units."""
        stack, fields = self.stacks[leaf], self._expanded(leaf, path, like, axes)
        h = prepared(stack, fields, self.past.steps, compute_dtype(like)).h
        made = [str(link.decay) for link in stack.chain if link.decay and link.decay not in found.given]
        return found._replace(h=found.h | {key: self._one(h[key], found.h[key], steps) for key in made if key in found.h})

    def _expanded(self, leaf: int, path: str, like: Array, axes: int) -> Hypers:
        return expand(self.stacks[leaf], self.of_leaf[leaf], leaf, path, like, self.past.steps, axes, self.made)

    def _one(self, before: Array, after: Array, steps: int) -> Array:
        name = id(before), id(after)
        if name not in self.whole:
            x = after
            known = concrete((before, after))  # traced ones are refused later, by name
            if not known or before.shape != after.shape or not (before == after).all():
                early = jnp.broadcast_to(before, (self.past.steps, *before.shape[1:]))[: self.past.step]
                late = jnp.broadcast_to(after, (steps, *after.shape[1:]))[self.past.step :]
                shape = jnp.broadcast_shapes(early.shape[1:], late.shape[1:])
                parts = [jnp.broadcast_to(part, (part.shape[0], *shape)) for part in (early, late)]
                x = jnp.concatenate(parts).astype(after.dtype)
            self.whole[name] = before, after, x  # with those that it was made of, whose ids are others' once they are gone
        return self.whole[name][2]
