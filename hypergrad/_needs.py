"""What lost digits will take, asked of a function before it is compiled.

Invariant: `fitted` room is enough for the needs that it was fitted to.

Where decays are traced, a program sets room aside by a guess, one bit a step for most links. Where that comes to much, the
function is traced once without its training, and what its decays lose at given hyperparameters is computed of that.
"""

import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Literal

from hypergrad._settings import own_settings
from hypergrad.adjoints.base import Adjoint
from hypergrad.adjoints.capacity import traced_decays
from hypergrad.errors import OK, Status
from hypergrad.exact import WORD_BITS
from hypergrad.optimizers.chain import PARAMS
from hypergrad.optimizers.expand import link_numerators
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Outcome


MUCH = 2**26  # bytes: below, room is as it is guessed, and nothing is compiled again where hyperparameters move
MARGIN = 1 / 16  # beyond what is needed now
FAR = 2  # times what is needed: more room than that is given back, if it is much
DRIFT = 1 / 4  # beyond what is needed where it has outgrown its room: it will go on to grow

UNKNOWN = -1  # words

Room = tuple[tuple[str, tuple[int, float]], ...]  # as `Ledger.room`


class Guessed(Exception):
    """Of a program that was traced and would set much aside by guess: it is to be asked what it needs."""


class Need(NamedTuple):
    """Of one link in one run."""

    name: str
    values: int  # that lose digits
    words: Any  # that it needs: int32 []; UNKNOWN, if nobody can tell
    bits: Any  # and how many bits at one step, where its run is cut into segments: float64 []; 0 elsewhere


# In the key of every jit cache: what was traced without training is no part of another program.
_ASKING = jax.make_user_context(False)
_ASKED: contextvars.ContextVar[list[Need]] = contextvars.ContextVar("asked")


def asking() -> bool:
    """Whether a run is to tell what it needs, and not to train. One that is made of known values beforehand trains."""
    return bool(_ASKING.value) and isinstance(jnp.zeros(()), jax.core.Tracer)


def untrained(adjoint: Adjoint, run: Run, inputs: Inputs) -> Outcome:
    """What a run comes to, without values: NaN. It has told what it needs."""
    if adjoint.guesses:
        with own_settings():
            _ASKED.get().extend(_needs(run, inputs, adjoint))
    values = [
        {name: jnp.full_like(x, jnp.nan, block.leaf_dtype if name == PARAMS else block.dtype) for name, x in own.items()}
        for block, own in zip(run.blocks, inputs.values, strict=True)
    ]
    scalars = [] if run.functions.metrics is None else jax.tree.leaves(run.functions.metrics.program.out)
    loss = jax.tree.leaves(run.functions.loss.out)[0]
    nothing = [jnp.full(run.steps, jnp.nan, x.dtype) for x in (loss, *scalars)]
    zero, none = jnp.float32(0), jnp.int32(-1)
    status = Status(
        jnp.int32(OK), none, none, zero, jnp.int32(0), zero, zero, run.labels.places, run.labels.limits,
        jnp.bool_(False), none, zero, zero, run.labels.approximate,
    )  # fmt: skip
    return Outcome(values, nothing[0], status, nothing[1:])


def _needs(run: Run, inputs: Inputs, adjoint: Adjoint) -> Iterator[Need]:
    for j, link in traced_decays(run, inputs.h):
        n = link_numerators(link, inputs.h[j], run.steps)
        words = run.blocks[j].buffer(link).schedule(n, link.denominator).end.words
        bits = jnp.log2(link.denominator / n.min()) if adjoint.cuts else jnp.float64(0)
        known = jnp.isfinite(inputs.h[j][str(link.decay)]).all()
        yield Need(link.name, inputs.values[j][link.name].size, jnp.where(known, words, UNKNOWN), bits)


class Ask:
    """What runs inside of a function need whose decays are traced.

    Nothing where one is inside of a `jax.jit` or a loop of the function's own: what it needs is not to be had outside. Nor
    is it known of a decay that is made of what another run came to.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._needs: list[Need] = []
        arrays, static = eqx.partition(arguments, eqx.is_array)

        def told(arrays: Any) -> list[tuple[Array, Array]]:
            needs: list[Need] = []
            token = _ASKED.set(needs)
            try:
                with _ASKING(True):
                    function(*eqx.combine(arrays, static))
            finally:
                _ASKED.reset(token)
            self._needs = [need._replace(words=None, bits=None) for need in needs]
            return [(need.words, need.bits) for need in needs]

        try:
            self._run = _without_effects(told, arrays)
            self._run(arrays)
        except Exception:  # the function was traced well before: what fails is to ask, and room can be guessed
            self._needs = []

    def __call__(self, *arguments: Any) -> list[Need]:
        if not self._needs:
            return []
        found = self._run(eqx.filter(arguments, eqx.is_array))
        needs = [need._replace(words=int(w), bits=float(b)) for need, (w, b) in zip(self._needs, found, strict=True)]
        return [need for need in needs if need.words != UNKNOWN]


def _without_effects(function: Callable[[Any], Any], example: Any) -> Callable[[Any], Any]:
    """Compiled, without what its results are not made of: prints and callbacks of the user's, above all."""
    closed, out = jax.make_jaxpr(function, return_shape=True)(example)
    wanted, equations = {x for x in closed.jaxpr.outvars if not isinstance(x, Literal)}, []
    for e in reversed(closed.jaxpr.eqns):
        if wanted.intersection(e.outvars):
            equations.append(e)
            wanted |= {x for x in e.invars if not isinstance(x, Literal)}
    pruned = closed.jaxpr.replace(eqns=equations[::-1], effects=frozenset())
    flat = jax.jit(lambda leaves: jax.core.eval_jaxpr(pruned, closed.consts, *leaves))
    return lambda arrays: jax.tree.unflatten(jax.tree.structure(out), flat(jax.tree.leaves(arrays)))


def fitted(room: Room, needs: list[Need]) -> Room:
    """The room, changed for links that need more than they have, or far less."""
    result = dict(room)
    for name in dict.fromkeys(need.name for need in needs):
        own = [need for need in needs if need.name == name]
        words, bits, values = max(x.words for x in own), max(x.bits for x in own), sum(x.values for x in own)
        has = result.get(name)
        enough = math.ceil(words * (1 + MARGIN)), bits * (1 + MARGIN)
        if has is None or (has[0] > FAR * enough[0] and (has[0] - enough[0]) * values * WORD_BITS // 8 >= MUCH):
            result[name] = enough
        elif words > has[0] or bits > has[1]:
            result[name] = max(has[0], math.ceil(words * (1 + DRIFT))), max(has[1], bits * (1 + DRIFT))
    return tuple(sorted(result.items()))
