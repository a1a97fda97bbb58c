"""`Auto`: the road that fits a budget of memory, asked of XLA before anything runs.

Invariant: what is chosen is an adjoint of this folder, run as it would be by its own name: the same bits, the same checks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hypergrad import _programs as programs
from hypergrad._placement import at_hand, entries_here, sharding_of
from hypergrad._report import current_ledger, mask, probing, surface, watched
from hypergrad._settings import own_settings
from hypergrad.adjoints.base import Adjoint, Cost
from hypergrad.adjoints.budget import TooLittleError, bytes_of, cut, shown_bytes
from hypergrad.adjoints.capacity import capacities, in_full_words
from hypergrad.adjoints.reversible import Reversible
from hypergrad.adjoints.unrolled import Checkpointed
from hypergrad.exact import WORD_BITS
from hypergrad.optimizers.chain import PARAMS
from hypergrad.optimizers.expand import concrete
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Outcome
from hypergrad.run.stores import Host


ROADS: tuple[Adjoint, ...] = (Reversible(), Checkpointed())  # in the order in which `Auto` would take them

ATTEMPTS = 3  # segments take some more room than what their budget is for


@dataclasses.dataclass(frozen=True)
class Auto(Adjoint):
    """`Reversible` where it fits into `memory_budget`, else cut into segments, else `Checkpointed`, else an error that says
    what each takes.

    memory_budget: what a hypergradient may set aside beside its arguments: an int, of bytes, or a string such as "512MiB" or
    "2 GB". It is compared with what XLA sets aside for the derivative of one run in all that is float, which is compiled
    to be asked, once per program, and not run: a bound, as `hg.plan` knows better what is learned. Under `jax.vmap` it is
    one run's, not the batch's. With `hg.host_batches` it is `Reversible`, not cut, or an error. Outside of `jax.jit`
    training that nobody differentiates is not asked about; inside, nobody knows that, and the budget must hold the
    derivative.
    """

    memory_budget: int | str

    isolate = None
    guesses = cuts = True
    driver_name = None

    def __post_init__(self) -> None:
        bytes_of(self.memory_budget)

    def run(self, run: Run, inputs: Inputs) -> Outcome:
        floats = jax.tree.leaves(inputs[:3])
        if concrete(floats):  # nobody differentiates
            return ROADS[0].run(run, inputs)
        budget, found, wanted = bytes_of(self.memory_budget), {}, (True,) * len(floats)  # a bound: who knows what is wanted
        for adjoint in ROADS if run.source is None else (Reversible(),):  # no other loads from Python
            found[adjoint] = room(adjoint, run, inputs, wanted).device
            if found[adjoint] <= budget:
                return adjoint.run(_as_named(adjoint, run), inputs)
            cuts = adjoint == Reversible() and run.source is None
            if cuts:
                within, taken = in_segments(run, inputs, wanted, budget, found[adjoint])
                if taken <= budget:
                    return within.run(_as_named(within, run), inputs)
                found[within] = taken
        raise ValueError(too_little(budget, run.steps, found))

    def cost(self, steps: int) -> Cost:
        return ROADS[0].cost(steps)


def _as_named(adjoint: Adjoint, run: Run) -> Run:
    """The run that `adjoint` has by its own name."""
    driver = adjoint.driver_for(run.source)
    return run if driver is None else dataclasses.replace(run, driver=driver)


def in_segments(run: Run, inputs: Inputs, wanted: "Wanted", budget: int, whole: int) -> tuple[Reversible, int]:
    """`Reversible` with what the budget leaves beside all that does not grow with the steps, and what it takes: more than
    the budget where the smallest cut does. whole: what the run takes that is not cut."""
    without = whole - words_of(run, inputs)
    left, attempts = budget - without, ATTEMPTS
    while True:
        try:
            cut_to(run, inputs, left)
        except TooLittleError as error:
            left, attempts = error.smallest, 1
        adjoint = Reversible(memory_budget=max(left, 1))
        taken = room(adjoint, run, inputs, wanted).device
        attempts -= 1
        if taken <= budget or attempts == 0 or taken <= without:  # nothing of it grows with the steps
            return adjoint, taken
        left = left * (budget - without) * 31 // ((taken - without) * 32)  # a little less, since the rest may grow as well


def cut_to(run: Run, inputs: Inputs, budget: int) -> Run:
    """`cut`, whoever asks."""
    with own_settings():
        return cut(run, inputs, budget, None)


def too_little(budget: int, steps: int, found: dict[Adjoint, int]) -> str:
    """The sentence for a budget in which nothing fits."""
    each = ", ".join(f"{shown_bytes(size)} by {named(adjoint)}" for adjoint, size in found.items())
    return (
        f"no road fits into memory_budget={shown_bytes(budget)}: a hypergradient of {steps} steps sets aside {each}. The "
        f"smallest that works is {min(found.values())} bytes. Outside of jax.jit, "
        'hg.Reversible(buffer="host") keeps lost digits in host memory; else take fewer steps, smaller batches, or '
        "jax.checkpoint in the loss. Training that nobody differentiates needs none of it: hg.Reversible()."
    )


def named(adjoint: Adjoint) -> str:
    """As the user writes it: the fields that differ from their defaults."""
    fields = [(f.name, getattr(adjoint, f.name), f.default) for f in dataclasses.fields(adjoint)]  # type: ignore[arg-type]
    return f"hg.{type(adjoint).__name__}({', '.join(f'{name}={x!r}' for name, x, default in fields if x != default)})"


class Room(NamedTuple):
    """What a hypergradient sets aside beside its arguments and results, in bytes."""

    device: int
    host: int = 0


Wanted = tuple[bool, ...]  # which leaves of (values, h, theta) are differentiated


def room(adjoint: Adjoint, run: Run, inputs: Inputs, wanted: Wanted) -> Room:
    """Of the derivative of one run: as XLA allots it for the program compiled for all steps.

    With buffer="host" or `hg.Disk` the host holds the words of the schedule, and the device those of one segment.
    """
    if adjoint.buffer == "gmpy2":
        raise ValueError('hg.plan knows nothing of buffer="gmpy2", whose integers are Python\'s: take "device" or "host".')
    if isinstance(adjoint, Reversible) and adjoint.store is not None:
        adjoint = dataclasses.replace(adjoint, buffer="host")
        run = dataclasses.replace(run, store=Host(), traced=True)
        size = derivative(adjoint, run, inputs, wanted).memory_analysis()
        together = 0 if size.host_temp_size_in_bytes else stacked(run, inputs)  # on a CPU, host and device are one
        return Room(size.temp_size_in_bytes - together, words_of(run, inputs, np.size))
    return Room(derivative(adjoint, run, inputs, wanted).memory_analysis().temp_size_in_bytes)


def stacked(run: Run, inputs: Inputs) -> int:
    """Bytes that a program sends to host memory: of each segment room for words, and losses."""
    with own_settings():
        run = in_full_words(run, inputs)
        found = capacities(run, inputs.h, None)
    rows = zip(run.blocks, inputs.values, found, strict=True)
    words = sum((n or 0) * entries_here(own[k.name]) for b, own, row in rows for k, n in zip(b.chain, row, strict=True))
    loss = jax.tree.leaves(run.functions.loss.out)[0].dtype.itemsize
    return len(run.emptied) * words * WORD_BITS // 8 + loss * run.steps


def words_of(run: Run, inputs: Inputs, entries: Callable[[Any], int] = entries_here) -> int:
    """Bytes of the buffers of all links, of so many entries of each."""
    with own_settings():
        found = capacities(dataclasses.replace(run, store=None), inputs.h, None)
    rows = zip(run.blocks, inputs.values, found, strict=True)
    words = ((n or 0) * entries(own[k.name]) for b, own, row in rows for k, n in zip(b.chain, row, strict=True))
    return sum(words) * WORD_BITS // 8


def derivative(adjoint: Adjoint, run: Run, inputs: Inputs, wanted: Wanted) -> Any:
    """The compiled program of `inputs` that trains and gives the cotangents that are wanted; found again for equal runs."""
    store = run.store if run.traced else None
    run = dataclasses.replace(run, throw=False, driver="scan", store=store, source=None, progress=None)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=sharding_of(x)), inputs)
    # What is known to begin with zeros is a constant, as in a user's program: XLA sets no room aside for its integers.
    zeros = tuple(concrete(x) and _is_zero(x) for x in jax.tree.leaves(inputs.values))

    def make() -> Any:
        with own_settings():
            traced = jax.jit(functools.partial(pulled, adjoint, run, wanted, zeros)).trace(like)
            _reject_axes(traced.jaxpr.effects)
            return traced.lower().compile()

    shapes = tuple((x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(like))
    ledger = current_ledger()  # who listens is told by the program, and says how much room there is
    setting = None if ledger is None else (ledger.capacity, ledger.room), watched(), probing()
    key = derivative, adjoint, run.bare(), wanted, zeros, setting, jax.tree.structure(like), shapes
    return programs.kept(key, make)


def _reject_axes(effects: Any) -> None:
    """A program that reads an axis of a `jax.vmap` around it is none by itself."""
    names = sorted(str(e.name) for e in effects if type(e).__name__ == "NamedAxisEffect")
    if names:
        raise TypeError(
            f"hg.Auto asks XLA what one run takes, and cannot where training reads the axis {names[0]!r} of a jax.vmap "
            "around it. Take hg.Reversible(), or hg.Reversible(memory_budget=...)."
        )


def _is_zero(x: Any) -> bool:
    """As far as this process can see."""
    return at_hand(x) and not np.any(np.asarray(x))


def pulled(adjoint: Adjoint, run: Run, wanted: Wanted, zeros: Wanted, inputs: Inputs) -> Any:
    """The cotangents that are wanted, of a function of the trained parameters: theirs are 1."""
    leaves, tree = jax.tree.flatten(inputs[:3])
    leaves[: len(zeros)] = [jnp.zeros_like(x) if z else x for z, x in zip(zeros, leaves, strict=False)]

    def trained(own: list[Any]) -> list[Any]:
        others = iter(own)
        whole = [next(others) if w else x for w, x in zip(wanted, leaves, strict=True)]
        values, h, theta = jax.tree.unflatten(tree, whole)
        outcome = adjoint.run(run, Inputs(values, h, theta, inputs.frozen))
        # As `hg.train` hands them on: without this branch between the passes, Adam's took 24 bytes a parameter more.
        own = mask(surface(outcome.status, run.throw), outcome.values)
        return [own[j][PARAMS] for j in run.parameters]

    params, pull = jax.vjp(trained, [x for w, x in zip(wanted, leaves, strict=True) if w])
    return pull([jnp.ones_like(x) for x in params])
