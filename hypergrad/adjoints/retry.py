"""Whether the reverse pass may take the gradient from beside its derivative, or must compute it apart, as training did.

Invariant: what a reverse pass returns as found was found with the gradients of the forward pass, bit for bit.

A gradient apart costs one more of each step. Beside its derivative it is for nothing, but XLA may fuse the two, and round
it otherwise than in training. Whether it does is known when the certificate fails. Then the same reverse pass runs again
from the state that is still there, with gradients apart: at once where values are known, and the program is remembered for
it; inside of one compiled program, by a loop of at most two rounds, where a user's `jax.jit` has it; and where somebody
listens, such as `hg.optimize`, by whoever does.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import jaxpr_as_fun

from hypergrad import _programs as programs
from hypergrad._report import current_ledger
from hypergrad.run.functions import Functions
from hypergrad.run.spec import Run


REMEMBERED = 1024  # losses

_KNOWN: collections.OrderedDict[Functions, None] = collections.OrderedDict()


def open_to_doubt(run: Run) -> bool:
    """Whether gradients come from beside their derivatives, and may come apart should that fail."""
    return run.retries and not run.isolate


def remembered(run: Run) -> Run:
    """With gradients apart where that is known to be needed."""
    return run.isolated() if open_to_doubt(run) and run.functions in _KNOWN else run


def may_repeat(run: Run) -> bool:
    """Whether a reverse pass that fails is made once more here, and so leaves what it is given as it is."""
    return current_ledger() is None and open_to_doubt(remembered(run))


def remember(run: Run) -> None:
    _KNOWN[run.functions.bare()] = None
    while len(_KNOWN) > REMEMBERED:
        _KNOWN.popitem(last=False)


def known(run: Run, attempt: Callable[[Run], Any]) -> Any:
    """`attempt`, which gives a `Back` of known values; if that is not found, once more with gradients apart."""
    run = remembered(run)
    back, forget = programs.forgettable(lambda: attempt(run))
    if back.found.all() or not open_to_doubt(run):
        return back
    second = attempt(run.isolated())
    if not second.found.all():
        return back
    remember(run)
    forget()
    return second._replace(doubted=jnp.bool_(True))


def traced(run: Run, attempt: Callable[[Run, Array | None], Any]) -> Any:
    """The same inside of a program that is being built. attempt: also takes whether there is doubt, None for none."""
    run, ledger = remembered(run), current_ledger()
    if ledger is not None and open_to_doubt(run):
        run = run.isolated() if ledger.isolate else dataclasses.replace(run, retries=False)
    if not open_to_doubt(run):
        return attempt(run, None)
    program, out = jax.make_jaxpr(lambda doubt: attempt(run, doubt), return_shape=True)(jnp.bool_(False))
    tree = jax.tree.structure(out)

    def body(carry: tuple[Array, Array, list[Any]]) -> tuple[Array, Array, list[Any]]:
        doubt, _, _ = carry
        leaves = jaxpr_as_fun(program)(doubt)
        return jnp.bool_(True), doubt | jax.tree.unflatten(tree, leaves).found.all(), leaves

    begin = [jnp.zeros(x.shape, x.dtype) for x in program.out_avals]
    _, _, leaves = jax.lax.while_loop(lambda carry: ~carry[1], body, (jnp.bool_(False), jnp.bool_(False), begin))
    return jax.tree.unflatten(tree, leaves)
