"""`Reversible`: the derivative of training from its reversal. The only custom VJP of the library."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from hypergrad import _programs as programs
from hypergrad._report import current_ledger, mask, probing, surface, trace
from hypergrad.adjoints.backward import Reversed, reverse
from hypergrad.adjoints.link import Cotangents
from hypergrad.adjoints.traced import batched_apart, once
from hypergrad.errors import OK, REVERSAL, Status
from hypergrad.exact import PUBLIC_WORD_BITS, WORD_BITS, all_of
from hypergrad.loop import shelf
from hypergrad.loop.forward import forward
from hypergrad.loop.problem import Inputs, Problem, begun, intact, schedules, turns_of
from hypergrad.loop.status import Outcome, assess
from hypergrad.loop.step import Exact
from hypergrad.optimizers.chain import STATISTICS
from hypergrad.optimizers.expand import concrete, first_true, link_numerators


@dataclasses.dataclass(frozen=True)
class Reversible:
    """Reverse the run bit for bit and recompute what the derivative needs (thesis, Algorithms 6 and 7).

    Memory: 8 bytes per link and parameter (16 for a mean of squares), log2(1/decay) bits per step (and 6 bytes where each
    weight has its own decay), and one step's activations. First derivatives only: for second ones take `Unrolled`.

    capacity: 32-bit words per parameter for the lost digits; None: exactly as many as needed where the decays are known
    when the program is built, else ceil(steps / 32), one bit a step. fraction_bits: of the parameters' grid; None: 52 for
    float64 (range +-1024), 48 for float32 (range +-16384). driver: "scan" (compiled whole) or "host" (a Python loop over
    one jitted step; not under jit or vmap); None: the host for `hg.host_batches`, and outside of jit and vmap for losses
    with convolutions on a CPU of several cores, else the scan. buffer: "device"; "host": a host loop that takes words to
    host memory once they are full, so that the device's does not grow with the steps; "gmpy2": one arbitrary-precision
    integer per parameter, the slow reference, on the host. isolate: compute each gradient once more on the way back,
    compiled apart from its derivative, so that its bits are the same in both passes; None: where needed, which is for rules
    that are not linear in the gradient and under `jax.vmap`. progress: with driver="host", called now and then with
    ("forward" or "reverse", steps done, steps), as `hg.callbacks.Steps()` is.
    """

    capacity: int | None = None
    fraction_bits: int | None = None
    driver: str | None = None
    buffer: str = "device"
    isolate: bool | None = None
    progress: Callable[[str, int, int], Any] | None = None

    def __post_init__(self) -> None:
        if self.buffer not in ("device", "host", "gmpy2"):
            raise ValueError(f'`buffer` must be "device", "host" or "gmpy2"; got {self.buffer!r}.')
        if self.driver not in (None, "scan", "host"):
            raise ValueError(f'`driver` must be "scan", "host" or None; got {self.driver!r}.')
        if self.buffer != "device" and self.driver == "scan":
            raise ValueError(f'buffer="{self.buffer}" needs Python between the steps, driver="host" (or None); got "scan".')
        if self.buffer != "device" and self.capacity is not None:
            raise ValueError(f'buffer="{self.buffer}" grows as it must; `capacity` is for buffer="device".')
        if self.progress is not None and (self.driver != "host" or not callable(self.progress)):
            raise ValueError('`progress` is a function of (direction, steps done, steps), and needs driver="host".')
        if self.capacity is not None and (not isinstance(self.capacity, int) or self.capacity < 0):
            raise ValueError(f"`capacity` must be None or a count of 32-bit words per parameter; got {self.capacity!r}.")
        if self.fraction_bits is not None and not 8 <= self.fraction_bits <= 60:
            raise ValueError(f"`fraction_bits` must be from 8 to 60; got {self.fraction_bits!r}.")

    @property
    def driver_name(self) -> str | None:
        return {"device": self.driver, "host": "host", "gmpy2": "host_eager"}[self.buffer]

    def run(self, problem: Problem, inputs: Inputs) -> Outcome:
        if probing():
            problem = dataclasses.replace(problem, probed=True, throw=False)
        return _run(problem, self.capacity, *inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(problem: Problem, capacity: int | None, values: Any, h: Any, theta: Any, frozen: Any) -> Outcome:
    outcome, _ = _forward(problem, None, Inputs(values, h, theta, frozen))
    return outcome


class Residuals(NamedTuple):
    inputs: Inputs
    end: Exact
    losses: Array
    status: Status
    with_theta: "_Flag"


class _Flag(eqx.Module):
    value: bool = eqx.field(static=True)


class Wanted(NamedTuple):
    """What somebody differentiates, known when the program is built."""

    theta: bool
    statistics: bool  # what they came to


def _run_fwd(problem: Problem, capacity: int | None, *inputs: Any) -> tuple[Outcome, Residuals]:
    perturbed = Inputs(*jax.tree.map(lambda x: x.perturbed, inputs))
    arrays = Inputs(*jax.tree.map(lambda x: x.value, inputs))
    for differentiated, path in zip(perturbed.frozen, problem.labels.frozen, strict=True):
        if differentiated:
            raise ValueError(
                f"`batches` is differentiated, in {path}; that derivative would be lost. Pass learned data through `theta`."
            )
    with jax.enable_x64(True):
        words = _capacities(problem, arrays.h, capacity)
    outcome, end = _forward(problem, words, arrays)
    if problem.throw and concrete(outcome.status) and not outcome.status.ok:
        raise outcome.status.error()  # here it is known; outside, an eager jax.grad makes a tracer of it
    return outcome, Residuals(arrays, end, outcome.losses, outcome.status, _Flag(any(jax.tree.leaves(perturbed.theta))))


def _run_bwd(problem: Problem, capacity: int | None, residuals: Residuals, ct: Outcome) -> tuple[Any, ...]:
    inputs = residuals.inputs
    dvalues = jax.tree.map(_dense, ct.values, is_leaf=_is_zero)
    dlosses = None if _is_zero(ct.losses) else ct.losses
    followed = not all(map(_is_zero, ct.values.get(STATISTICS, ())))
    wanted = Wanted(residuals.with_theta.value, followed)
    gradients, back, norms = _backward(problem, inputs, residuals.end, dvalues, dlosses, wanted)
    status = _certificate(residuals.status, back)
    if problem.probed:
        trace(status, residuals.losses, norms)
    ok = surface(status, problem.throw)
    dvalues, dh, dtheta = mask(ok, gradients)
    return dvalues, dh, dtheta, None


_run.defvjp(_run_fwd, _run_bwd, symbolic_zeros=True)


def settled_driver(problem: Problem, *arrays: Any) -> Problem:
    """The problem with its driver decided, by whether these are known and nobody is tracing."""
    known = _known(arrays)
    if problem.driver == "either":
        return dataclasses.replace(problem, driver="host" if known else "scan")
    if problem.driver != "scan" and not known:
        cure = "" if problem.source is not None else ', or take hg.Reversible(driver="scan")'
        raise ValueError(
            'driver="host", buffer="host" or "gmpy2", and hg.host_batches run training from Python, which cannot be traced '
            f"by jax.jit or jax.vmap. Call it outside of them (hg.optimize(..., jit=False)){cure}."
        )
    return problem


def _known(arrays: Any) -> bool:
    return concrete((arrays, jnp.zeros(())))  # inside of jax.jit, what it makes is traced, whatever it is made of


def _forward(problem: Problem, capacity: dict[str, int] | None, inputs: Inputs) -> tuple[Outcome, Exact]:
    problem = settled_driver(problem, inputs)
    with jax.enable_x64(True):
        key = None if capacity is None else tuple(sorted(capacity.items()))
        if not _known(inputs):
            return once(batched_apart(_jitted_forward, forward=True))(problem, key, inputs)
        if problem.driver == "scan":
            return programs.call(_jitted_forward, (problem, key), inputs)
        return _forward_pass(problem, key, inputs)


def _forward_pass(problem: Problem, capacity: tuple[Any, ...] | None, inputs: Inputs) -> tuple[Outcome, Exact]:
    plan, state = problem.beside(_begin, inputs.values, inputs.h, static=(capacity,))
    if problem.shelved and capacity is not None:
        shelves = {name: [shelf.Shelf() for _ in leaves] for name, leaves in plan.items()}
        pause, capacity = shelf.keep(plan, shelves), None
        end, losses = forward(problem, inputs, state, shelf.unslotted(turns_of(plan)), pause)
        end = shelf.shelved(end, plan, shelves)
    else:
        end, losses = forward(problem, inputs, state, turns_of(plan))
    outcome = problem.beside(_outcome, inputs.values, inputs.h, plan, end.z, losses, static=(capacity,))
    return outcome, end


def _begin(problem: Problem, capacity: tuple[Any, ...] | None, values: Any, h: Any) -> tuple[Any, Exact]:
    return schedules(problem, h), begun(problem, values, _words(problem, capacity))


def _outcome(problem: Problem, capacity: Any, values: Any, h: Any, plan: Any, z: Any, losses: Array) -> Outcome:
    status = assess(problem, values, h, plan, z, losses, _words(problem, capacity))
    return Outcome({link.name: rule.decoded(z, link) for rule, link, _ in problem.links(h)}, losses, status)


def _words(problem: Problem, capacity: tuple[Any, ...] | None) -> dict[str, int | None]:
    return {**{link.name: None for rule in problem.rules for link in rule.chain}, **dict(capacity or ())}


_jitted_forward = jax.jit(_forward_pass, static_argnums=(0, 1))


def _backward(problem: Problem, inputs: Inputs, end: Exact, dvalues: Any, dlosses: Any, wanted: Wanted) -> Any:
    arguments = inputs, end, dvalues, dlosses
    problem = settled_driver(problem, arguments)
    with jax.enable_x64(True):
        if not _known(arguments):
            return once(batched_apart(_jitted_backward, forward=False))(problem, wanted, *arguments)
        if problem.driver == "scan":
            return programs.call(_jitted_backward, (problem, wanted), *arguments)
        return _backward_pass(problem, wanted, *arguments)


def _backward_pass(
    problem: Problem, wanted: Wanted, inputs: Inputs, end: Exact, dvalues: Any, dlosses: Any
) -> tuple[tuple[Any, Any, Any], Array, dict[str, Array] | None]:
    plan, zero = problem.beside(_begin_back, inputs, dvalues, static=(wanted,))
    if problem.shelved:
        end, shelves = shelf.unshelved(end)
        back = reverse(problem, inputs, end, shelf.unslotted(turns_of(plan)), zero, dlosses, shelf.bring(plan, shelves))
    else:
        back = reverse(problem, inputs, end, turns_of(plan), zero, dlosses)
    gradients, found = problem.beside(_gradients, inputs, back)
    return gradients, found, back.norms


def _begin_back(problem: Problem, wanted: Wanted, inputs: Inputs, dvalues: Any) -> tuple[Any, Cotangents]:
    """When buffers spill, and the cotangents of what comes out."""
    dz = {}
    for rule in problem.rules if wanted.statistics else (problem.rule,):
        for link in rule.chain:
            dz[link.name] = [d.astype(t) for d, t in zip(dvalues[link.name], rule.dtypes, strict=True)]
    dtheta = jax.tree.map(jnp.zeros_like, inputs.theta) if wanted.theta else None
    dh = [{k: jnp.zeros_like(x) for k, x in hj.items()} for hj in inputs.h]
    return schedules(problem, inputs.h), Cotangents(dz, dh, dtheta)


def _gradients(problem: Problem, inputs: Inputs, back: Reversed) -> tuple[tuple[Any, Any, Any], Array]:
    """Of values, hyperparameters and theta; and per place, whether the start was found again."""
    found = intact(problem, inputs.values, back.start) & all_of(jnp.isfinite(back.losses))
    dvalues = {**jax.tree.map(jnp.zeros_like, inputs.values), **back.ct.z}
    dvalues = jax.tree.map(lambda d, x: d.astype(x.dtype), dvalues, inputs.values)
    dtheta = jax.tree.map(jnp.zeros_like, inputs.theta) if back.ct.theta is None else back.ct.theta
    return (dvalues, back.ct.h, dtheta), found


_jitted_backward = jax.jit(_backward_pass, static_argnums=(0, 1))


def _certificate(forward: Status, intact: Array) -> Status:
    """The forward pass's status, or else whether the way back was exact: what failed on the way out cannot return."""
    reversal = jnp.where(intact.all(), OK, REVERSAL).astype(jnp.int32)
    place = jnp.where(forward.ok, first_true(~intact.reshape(-1)), forward.place)
    return dataclasses.replace(forward, code=jnp.where(forward.ok, reversal, forward.code), place=place)


def _capacities(problem: Problem, h: Any, capacity: int | None) -> dict[str, int]:
    """Words of the buffer per parameter to allocate, for each link that decays."""
    own = PUBLIC_WORD_BITS // WORD_BITS
    at_least = own * ledger.capacity if (ledger := current_ledger()) else 0
    guess = lambda link: max(math.ceil(problem.steps * link.bits_a_step / WORD_BITS), at_least)  # noqa: E731  until told
    result = {}
    for (rule, link, part), known in zip(problem.links(h), problem.words, strict=True):
        if link.decay and problem.shelved:
            result[link.name] = shelf.CAPACITY
        elif link.decay and capacity is not None:
            result[link.name] = own * capacity
        elif link.decay and known is not None:
            result[link.name] = known
        elif link.decay:
            exact = (
                [_exact_words(problem, link, *row) for row in zip(rule.kept(link), part, strict=True)] if concrete(h) else []
            )
            result[link.name] = max(exact, default=guess(link))
    return result


def _exact_words(problem: Problem, link: Any, keep: Any, hj: Any) -> int:
    return keep.words_needed(np.asarray(link_numerators(link, hj, problem.steps)), link.denominator)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _dense(x: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x
