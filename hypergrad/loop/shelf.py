"""Spilled words in host memory: a stack of one word on the device, whatever the number of steps.

Invariant: `shelves[link][leaf].words` are the words that the stack on the device would hold, in their order.

All slots are set to 0, so that the way back reads each word from row 0. On the way out, a word of `Words` stays there from
the step that it leaves at until the next one leaves. The mirror of a head (hypergrad/exact/buffer.py) is in row 0, or in row
1 at a step that spills: the word that leaves at step t is in row 1 if step t - 1 spilled too, else in row 0, until step t
writes. When that happens is known beforehand.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import Array

from hypergrad.exact import DEFERRED, DEVICE, Schedule, Value, Words
from hypergrad.loop.drivers import Pause
from hypergrad.loop.step import Exact, Turns


CAPACITY = 1  # words on the device


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Shelf:
    """The words of one buffer. A pytree without leaves: they travel beside JAX's arrays, not among them."""

    words: list[np.ndarray] = dataclasses.field(default_factory=list)


def unslotted(turns: Turns) -> Turns:
    return {name: [turn.unslotted() for turn in leaves] for name, leaves in turns.items()}


def keep(plan: dict[str, list[Schedule]], shelves: dict[str, list[Shelf]]) -> Pause:
    """On the way out: take each word to its shelf before it is written over."""
    spills = _spills(plan)

    def pause(t: int, state: Exact) -> Exact:
        for name, leaf in _at(spills, t):
            buffer, past = state.buffers[name][leaf], spills[name][leaf][:t]
            if isinstance(buffer, Words) and not past.any():
                continue  # the first word is only now to leave
            row = 0 if isinstance(buffer, Words) else int(past[-1:].any())
            shelves[name][leaf].words.append(np.asarray(_row(buffer.stack, row)))
        return state

    return Pause(_steps(spills), pause)


def bring(plan: dict[str, list[Schedule]], shelves: dict[str, list[Shelf]]) -> Pause:
    """On the way back: put each word where the device reads it."""
    spills = _spills(plan)

    def pause(t: int, carry: Any) -> Any:
        state, *rest = carry
        buffers = {name: list(leaves) for name, leaves in state.buffers.items()}
        for name, leaf in _at(spills, t):
            word = shelves[name][leaf].words[int(spills[name][leaf][:t].sum())]
            buffer = buffers[name][leaf]
            buffers[name][leaf] = buffer._replace(stack=_put(buffer.stack, word))
        return (Exact(state.z, buffers), *rest)

    return Pause(_steps(spills), pause)


def shelved(end: Exact, plan: dict[str, list[Schedule]], shelves: dict[str, list[Shelf]]) -> Exact:
    """The state with its words on the shelf, the last ones too, to be kept until the way back."""
    for name, leaves in _spills(plan).items():
        for leaf, spills in enumerate(leaves):
            if isinstance(end.buffers[name][leaf], Words) and spills.any():
                shelves[name][leaf].words.append(np.asarray(_row(end.buffers[name][leaf].stack, 0)))
    return end._replace(
        buffers={
            name: [b._replace(stack=s) for b, s in zip(leaves, shelves[name], strict=True)]
            for name, leaves in end.buffers.items()
        }
    )


def unshelved(end: Exact) -> tuple[Exact, dict[str, list[Shelf]]]:
    """The inverse of `shelved`."""
    shelves = {name: [b.stack for b in leaves] for name, leaves in end.buffers.items()}

    def empty(buffer: Any, z: Value) -> Any:
        kind = DEFERRED if isinstance(buffer, Words) else DEVICE
        return buffer._replace(stack=kind.empty(z.shape, CAPACITY).stack)

    buffers = {name: list(map(empty, leaves, end.z[name])) for name, leaves in end.buffers.items()}
    return end._replace(buffers=buffers), shelves


Spills = dict[str, list[np.ndarray]]  # per link and leaf: bool [steps]


def _spills(plan: dict[str, list[Schedule]]) -> Spills:
    return {name: [np.asarray(s.turns.spills) for s in leaves] for name, leaves in plan.items()}


def _steps(spills: Spills) -> frozenset[int]:
    return frozenset(t for leaves in spills.values() for s in leaves for t in np.flatnonzero(s).tolist())


def _at(spills: Spills, t: int) -> list[tuple[str, int]]:
    return [(name, leaf) for name, leaves in spills.items() for leaf, s in enumerate(leaves) if s[t]]


@jax.jit
def _row(stack: Array, row: int) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, row, 0, keepdims=False)


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: Array, word: Array) -> Array:
    return stack.at[0].set(word)
