"""The links of all blocks backwards, in the order of the inverse step, and the cotangents through them.

Invariant: where the parameters' links are undone first, and the others last to first, every link is undone at the values
that it had read.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from hypergrad._isolation import once_known
from hypergrad.adjoints.link import Cotangents, decayed, decays, plus, undo_link
from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import PARAMS, STATISTICS, Link
from hypergrad.optimizers.expand import Hypers
from hypergrad.run.spec import Run
from hypergrad.run.step import Entries, Signals, State, increment, replaced, retreat


def undo_parameters(
    run: Run, t: Array, state: State, ct: Cotangents, h: list[Hypers], entries: Entries
) -> tuple[State, Cotangents]:
    """The link `params` of each block: no signal enters it."""
    nothing: Signals = [{} for _ in run.blocks]
    for j in run.parameters:
        link = run.blocks[j].chain[-1]
        state, ct, _ = undo_link(run, j, link, t, state, ct, h, entries, nothing)
        ct = _decay_now(run, j, [link], ct, h)
    return state, ct


def once_read(run: Run, t: Array, state: State, ct: Cotangents) -> tuple[State, Cotangents]:
    """What is overwritten next, when the cotangents of hyperparameters have been made of it.

    XLA copied the velocity and the parameters' cotangent at every step, as nothing said which comes first. Rules
    that are not linear have stored what they read of links. What nobody asks for is not waited for: it is not computed.
    """
    for j in run.parameters:
        asked = ct.h[j] if run.asked is None else run.asked[j]
        of_h = [x for name, x in ct.h[j].items() if name in asked and x.size == 1]
        for link in run.blocks[j].chain[:-1] if run.linear else ():
            slot = state[j][link.name]
            value = slot.value._replace(high=once_known(t, slot.value.high, of_h))
            state = replaced(state, j, {link.name: slot._replace(value=value)})
        ct = ct._replace(z=replaced(ct.z, j, {PARAMS: once_known(t, ct.z[j][PARAMS], of_h)}))
    return state, ct


def undo_others(
    run: Run,
    delayed: list[list[Link]],
    t: Array,
    state: State,
    ct: Cotangents,
    h: list[Hypers],
    entries: Entries,
    signals: Signals,
    early: bool = False,
) -> tuple[State, Cotangents, Signals]:
    """The other links of each block, last to first; and the cotangents of the signals. delayed: of `delayed_links`. early:
    those that are `Run.early`; else the rest."""
    dsignals: Signals = []
    for j in run.parameters:
        block = run.blocks[j]
        own = {name: jnp.zeros_like(x) for name, x in signals[j].items()}
        for link in reversed(block.chain[: run.early[j]] if early else block.chain[run.early[j] : -1]):
            state, ct, dg = undo_link(run, j, link, t, state, ct, h, entries, signals)
            if dg is not None:
                own[link.signal] = plus(own[link.signal], dg)
            if link not in delayed[j]:
                ct = _decay_now(run, j, [link], ct, h)
        dsignals.append(own)
    return state, ct, dsignals


def undo_statistics(
    run: Run, t: Array, state: State, ct: Cotangents, h: list[Hypers], entries: Entries, signals: Signals
) -> tuple[State, Cotangents]:
    """Their one link each, and the cotangents through it where there are any."""
    for j in run.statistics:
        block = run.blocks[j]
        if ct.z[j]:
            state, ct, _ = undo_link(run, j, block.chain[0], t, state, ct, h, entries, signals)
            ct = _decay_now(run, j, block.chain, ct, h)
            continue
        update = increment(run, j, block.chain[0], t, state, h, signals)
        state = replaced(state, j, {STATISTICS: retreat(block, block.chain[0], state[j], h[j], entries[j], update)})
    return state, ct


def _decay_now(run: Run, j: int, links: Any, ct: Cotangents, h: list[Hypers]) -> Cotangents:
    return ct._replace(z=replaced(ct.z, j, decayed(ct.z[j], decays(run.blocks[j], links, h[j]))))


def add_parameters(run: Run, dz: list[Floats], dw: list[Array]) -> list[Floats]:
    for j, x in zip(run.parameters, dw, strict=True):
        dz = replaced(dz, j, {PARAMS: plus(dz[j][PARAMS], x)})
    return dz


def add_values(run: Run, dz: list[Floats], dvalues: list[Floats]) -> list[Floats]:
    """Of links of the parameters."""
    for j, own in zip(run.parameters, dvalues, strict=True):
        dz = replaced(dz, j, {name: dz[j][name] + x.astype(dz[j][name].dtype) for name, x in own.items()})
    return dz


def delayed_links(run: Run, block: Block) -> list[Link]:
    """Links whose cotangents decay one step later, so that they are stored as the cotangent of the gradient reads them:
    XLA:CPU would compute them once more for it. But not where a link before reads the old value: what it passes back does
    not decay. Nor where something is measured of a step: its cotangents join those of the values before it."""
    if not block.of_parameters or run.functions.metrics is not None:
        return []
    *others, _ = block.chain
    before = {k.name for i, _ in enumerate(others) for k in others[i:] if k.name in block.reads[i]}
    return [link for link in others if link.name not in before]
