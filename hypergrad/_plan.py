"""`plan`: what each road would take, before anything runs.

Invariant: bytes are XLA's own for the program that would run, and seconds those of a run of fewer steps: no model of either.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from hypergrad import _door as door
from hypergrad._meshes import in_automatic_axes
from hypergrad._problem import Problem
from hypergrad._processes import several
from hypergrad._set_up import set_up
from hypergrad._settings import own_settings
from hypergrad.adjoints import Adjoint, Checkpointed, Reversible, Unrolled
from hypergrad.adjoints.auto import (
    Wanted,
    cut_to,
    derivative,
    in_segments,
    named,
    pulled,
    room,
    too_little,
)
from hypergrad.adjoints.budget import bytes_of, shown_bytes
from hypergrad.adjoints.capacity import as_of_now
from hypergrad.adjoints.reversible import Room, reversed_run
from hypergrad.batches import HostBatches, full_batch
from hypergrad.optimizers.expand import concrete
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Outcome


MEASURED_STEPS = 64
LEAST_RUNS, LEAST_SECONDS = 3, 0.5  # one run of a small network takes milliseconds, and a machine's speed wanders

OFFERED: tuple[Adjoint, ...] = (Reversible(), Reversible(buffer="host"), Checkpointed(), Unrolled())


@dataclasses.dataclass(frozen=True)
class Road:
    """One adjoint, and what a hypergradient by it takes."""

    adjoint: Adjoint
    device: int  # bytes beside arguments and results
    host: int  # bytes
    seconds: float | None  # training and the way back, without compilation; None: not measured

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f"{self.seconds:.3g} s"
        host = shown_bytes(self.host) if self.host else ""
        return f"{named(self.adjoint):<34}{shown_bytes(self.device):>12}{host:>12}{seconds:>12}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found; prints as a table."""

    steps: int
    roads: tuple[Road, ...]
    adjoint: Adjoint | None  # the one to take; None: nothing fits
    why: str

    def __str__(self) -> str:
        head = f"{f'{self.steps} steps':<34}{'device':>12}{'host':>12}{'seconds':>12}"
        return "\n".join([head, *map(str, self.roads), self.why])


@in_automatic_axes
def plan(
    loss: Callable[[Any, Any, Any], Any],
    params: Any,
    optimizer: Any,
    batches: Callable[[Any], Any],
    *,
    theta: Any = None,
    steps: int | None = None,
    state: dict[str, Any] | None = None,
    statistics: Any = None,
    microbatches: Any = None,
    adjoint: Adjoint | None = None,
    memory_budget: int | str | None = None,
    measure: bool = True,
) -> Plan:
    """What a hypergradient of `hg.train` of the same arguments takes by each adjoint, of one device, and which to take.

    Arrays in `optimizer` and `theta` count as learned, Python numbers as known; where there are no arrays, all is learned.
    Bytes on the device are what XLA sets aside, beside arguments and results, for the program of all steps that trains and
    gives the derivative; it is compiled, and not run. Words are those that the decays of now need: under jax.jit, learned
    decays set more aside until `hg.optimize` knows. Bytes on the host are the words of the schedule, which `hg.Disk` has on
    disk. Seconds are the median of runs of at most 64 steps as jax.jit runs them, after a first one, in proportion to the
    steps: three runs, or as many as take half a second.

    adjoint: this one alone; None: `Reversible`, the same with words on the host, `Checkpointed` and `Unrolled`, in their
    defaults, and for `hg.host_batches` the first two. memory_budget: bytes, or a string such as "512MiB"; None: no limit.
    measure: whether to run at all. Raises what `hg.train` raises, and ValueError for a budget that is none, or where values
    are not known: inside of `jax.jit`, `jax.vmap` or `jax.grad`.
    """
    if not concrete((params, optimizer, theta, state, statistics, jnp.zeros(()))):
        raise ValueError(
            "hg.plan compiles programs of its own and runs them: call it outside of jax.jit, jax.vmap and jax.grad, with "
            "values that are known."
        )
    cuts = adjoint is None and not isinstance(batches, HostBatches)  # a run in segments is one program
    budget = None if memory_budget is None else bytes_of(memory_budget)
    offered = tuple(x for x in OFFERED if x.buffer == "device" or not several()) if adjoint is None else (adjoint,)
    if isinstance(batches, HostBatches):
        batches, steps = full_batch(batches.first), door.check_steps(steps, batches)
        offered = tuple(x for x in offered if x.loads)
        if adjoint is not None and not offered:
            raise ValueError(f"hg.host_batches loads from Python, which {named(adjoint)} cannot: take hg.Reversible().")
    found = []
    learned, known = eqx.partition((optimizer, theta), eqx.is_inexact_array)
    for one in offered:

        def begun(learned: Any, one: Adjoint = one) -> tuple[Run, Inputs]:
            optimizer, theta = eqx.combine(learned, known)
            problem = Problem(loss, params, optimizer, batches, theta, steps, state, statistics, None, microbatches)
            return set_up(problem, one)[:2]

        run, inputs = begun(learned)
        run = as_of_now(run, inputs)
        wanted = _wanted(begun, learned)
        found.append(Road(one, *room(one, run, inputs, wanted), _seconds(one, run, inputs, wanted) if measure else None))
        if cuts and one == Reversible() and budget is not None and found[-1].device > budget:
            within, taken = in_segments(run, inputs, wanted, budget, found[-1].device)
            found.append(Road(within, taken, 0, _seconds(within, run, inputs, wanted) if measure else None))
    return Plan(run.steps, tuple(found), *_chosen(found, budget, run.steps, adjoint is None))


def _wanted(begun: Callable[[Any], tuple[Run, Inputs]], learned: Any) -> Wanted:
    """What of a run's floats depends on what is learned; all where nothing is."""
    if not (leaves := jax.tree.leaves(learned)):
        return (True,) * len(jax.tree.leaves(begun(learned)[1][:3]))
    tree = jax.tree.structure(learned)
    floats = lambda *leaves: begun(jax.tree.unflatten(tree, leaves))[1][:3]  # noqa: E731
    _, tangents = jax.jvp(floats, leaves, [jnp.ones_like(x) for x in leaves])
    return tuple(bool(jnp.any(d != 0)) for d in jax.tree.leaves(tangents))


def _chosen(found: list[Road], budget: int | None, steps: int, free: bool) -> tuple[Adjoint | None, str]:
    """(which to take, why): as `Auto` would, and digits on the host where only they fit."""
    order = [road.adjoint for road in found]
    if free:  # host memory only where nothing else fits: on a CPU it is the same memory
        order = [a for a in order if a.buffer == "device"] + [a for a in order if a.buffer != "device"]
    by_adjoint = {road.adjoint: road for road in found}
    device = {a: road.device for a, road in by_adjoint.items()}
    candidates = [by_adjoint[a] for a in dict.fromkeys(order) if a in by_adjoint]
    fitting = [road for road in candidates if budget is None or road.device <= budget]
    if not fitting:
        return None, too_little(budget or 0, steps, device)
    first, taken = candidates[0], fitting[0]
    if taken is first:
        within = "" if budget is None else f", and fits into {shown_bytes(budget)}"
        return taken.adjoint, f"{named(taken.adjoint)}: {_merit(taken.adjoint)}{within}."
    return taken.adjoint, f"{named(taken.adjoint)}: {named(first.adjoint)} does not fit into {shown_bytes(budget or 0)}."


def _merit(adjoint: Adjoint) -> str:
    return "each reversal is checked bit for bit" if isinstance(adjoint, Reversible) else "as asked for"


@dataclasses.dataclass(frozen=True)
class _Cut(Reversible):
    """A run that is cut as it says, and not to a budget."""

    first: int = 0
    segments: tuple[int, ...] = ()

    def run(self, run: Run, inputs: Inputs) -> Outcome:
        return reversed_run(dataclasses.replace(run, first=self.first, segments=self.segments), Room(None), inputs)


def _likewise(adjoint: Adjoint, run: Run, inputs: Inputs, steps: int) -> Adjoint:
    """For a run of fewer steps: one that is cut to a budget replays as large a part of them, as often."""
    if not isinstance(adjoint, Reversible) or adjoint.memory_budget is None or steps == run.steps:
        return adjoint
    whole = cut_to(run, inputs, bytes_of(adjoint.memory_budget))
    segments = (2,) * len(whole.segments)
    length = round(steps * whole.first / whole.steps) // math.prod(segments)
    return _Cut(first=length * math.prod(segments), segments=segments) if length and segments else Reversible()


def _seconds(adjoint: Adjoint, run: Run, inputs: Inputs, wanted: Wanted) -> float:
    short, few = _shortened(run, inputs)
    adjoint = _likewise(adjoint, run, inputs, short.steps)
    if adjoint.store is not None:
        call = lambda: pulled(adjoint, short, wanted, (), few)  # noqa: E731
    else:
        program = derivative(adjoint, short, few, wanted)
        call = lambda: program(few)  # noqa: E731
    seconds: list[float] = []
    with own_settings():
        jax.block_until_ready(call())  # allocates, and wakes threads
        until = time.perf_counter() + LEAST_SECONDS
        while (begin := time.perf_counter()) < until or len(seconds) < LEAST_RUNS:
            jax.block_until_ready(call())
            seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds)) * run.steps / short.steps


def _shortened(run: Run, inputs: Inputs) -> tuple[Run, Inputs]:
    """The run of the first steps."""
    steps = min(MEASURED_STEPS, run.steps)
    cut = lambda x: x[:steps] if x.shape[0] == run.steps else x  # noqa: E731
    theta = [x[:steps] if s else x for x, s in zip(inputs.theta, run.functions.theta.stepped, strict=True)]
    few = inputs._replace(h=jax.tree.map(cut, inputs.h), theta=theta)
    blocks = tuple(dataclasses.replace(b, known=(None,) * len(b.chain)) for b in run.blocks)
    short = as_of_now(dataclasses.replace(run, blocks=blocks, steps=steps), few) if steps < run.steps else run
    return short, few
