"""Spilled words in host memory: a stack of one word on the device, whatever the number of steps.

Invariant: `stacks[block][link].words` are the words that the stack on the device would hold, in their order.

All slots are set to 0, so that the reverse pass reads each word from row 0. In the forward pass, a word of `Words` stays
there from the step that it leaves at until the next one leaves. The mirror of a head (hypergrad/exact/heads.py) is in row
0, or in row 1 at a step that spills: the word that leaves at step t is in row 1 if step t - 1 spilled too, else in row 0,
until step t writes. When that happens is known beforehand.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import Array

from hypergrad.exact import DEFERRED, HEADS, Schedule, Words
from hypergrad.run.drivers import Pause
from hypergrad.run.step import Slot, State


CAPACITY = 1  # words on the device

Plan = list[dict[str, Schedule]]  # of each block, by decaying link


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class HostStack:
    """The words of one buffer. A pytree without leaves: they travel beside JAX's arrays, not among them."""

    words: list[np.ndarray] = dataclasses.field(default_factory=list)


Stacks = list[dict[str, HostStack]]  # of each block, by decaying link


def empty_stacks(plan: Plan) -> Stacks:
    return [{name: HostStack() for name in own} for own in plan]


def offload(plan: Plan, stacks: Stacks) -> Pause:
    """In the forward pass: take each word to the host before it is written over."""
    spills = _spills(plan)

    def pause(t: int, state: State) -> State:
        for j, name in _at(spills, t):
            digits, past = state[j][name].digits, spills[j][name][:t]
            if isinstance(digits, Words) and not past.any():
                continue  # the first word is only now to leave
            row = 0 if isinstance(digits, Words) else int(past[-1:].any())
            stacks[j][name].words.append(np.asarray(_row(digits.stack, row)))
        return state

    return Pause(_steps(spills), pause)


def fetch(plan: Plan, stacks: Stacks) -> Pause:
    """In the reverse pass: put each word where the device reads it."""
    spills = _spills(plan)

    def pause(t: int, carry: Any) -> Any:
        state, *rest = carry
        state = list(state)
        for j, name in _at(spills, t):
            word = stacks[j][name].words[int(spills[j][name][:t].sum())]
            value, digits = state[j][name]
            state[j] = state[j] | {name: Slot(value, digits._replace(stack=_put(digits.stack, word)))}
        return (state, *rest)

    return Pause(_steps(spills), pause)


def detached(end: State, plan: Plan, stacks: Stacks) -> State:
    """The state with its words on the host, the last ones too, to be kept until the reverse pass."""
    for j, name, spills in _each(_spills(plan)):
        if isinstance(end[j][name].digits, Words) and spills.any():
            stacks[j][name].words.append(np.asarray(_row(end[j][name].digits.stack, 0)))
    on_host = lambda slot, stack: slot._replace(digits=slot.digits._replace(stack=stack))  # noqa: E731
    return [own | {name: on_host(own[name], stack) for name, stack in s.items()} for own, s in zip(end, stacks, strict=True)]


def attached(end: State) -> tuple[State, Stacks]:
    """The inverse of `detached`."""
    stacks = [{name: s.digits.stack for name, s in own.items() if s.digits is not None} for own in end]

    def empty(slot: Slot) -> Slot:
        kind = DEFERRED if isinstance(slot.digits, Words) else HEADS
        return slot._replace(digits=slot.digits._replace(stack=kind.empty(slot.value.high, CAPACITY).stack))

    return [{n: s if s.digits is None else empty(s) for n, s in own.items()} for own in end], stacks


Spills = list[dict[str, np.ndarray]]  # of each block and link: bool [steps]


def _spills(plan: Plan) -> Spills:
    return [{name: np.asarray(schedule.entries.spills) for name, schedule in own.items()} for own in plan]


def _each(spills: Spills) -> Iterator[tuple[int, str, np.ndarray]]:
    return ((j, name, s) for j, own in enumerate(spills) for name, s in own.items())


def _steps(spills: Spills) -> frozenset[int]:
    return frozenset(t for _, _, s in _each(spills) for t in np.flatnonzero(s).tolist())


def _at(spills: Spills, t: int) -> list[tuple[int, str]]:
    return [(j, name) for j, name, s in _each(spills) if s[t]]


@jax.jit
def _row(stack: Array, row: int) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, row, 0, keepdims=False)


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: Array, word: Array) -> Array:
    return stack.at[0].set(word)
