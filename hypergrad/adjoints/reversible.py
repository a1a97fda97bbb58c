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

from hypergrad._report import current_ledger, mask, probing, surface, trace
from hypergrad.adjoints.backward import Cotangents, reverse
from hypergrad.errors import OK, REVERSAL, Status
from hypergrad.exact import WORD_BITS, words_needed
from hypergrad.loop.forward import forward
from hypergrad.loop.problem import Inputs, Problem, begun, intact, schedules, turns_of
from hypergrad.loop.status import Outcome, assess
from hypergrad.loop.step import Exact
from hypergrad.optimizers.chain import STATISTICS
from hypergrad.optimizers.expand import concrete, first_true, link_numerators


@dataclasses.dataclass(frozen=True)
class Reversible:
    """Reverse the run bit for bit and recompute what the derivative needs (thesis, Algorithms 6 and 7).

    Memory: 8 bytes per link and parameter, 8 more per decaying link, log2(1/decay) bits per step, and one step's
    activations. First derivatives only: for second ones take `Unrolled`.

    capacity: 32-bit words per parameter for the lost digits; None: exactly as many as needed where the decays are known
    when the program is built, else ceil(steps / 32), one bit a step. fraction_bits: of the parameters' grid; None: 52 for
    float64 (range +-1024), 48 for float32 (range +-16384). driver: "scan" (compiled whole) or "host" (a Python loop over
    a jitted step; not under jit or vmap); None: "scan". buffer: "device", or "gmpy2": one arbitrary-precision integer per
    parameter, the slow reference, on the host. isolate: compute each gradient once more on the way back, compiled apart
    from its derivative, so that its bits are the same in both passes; None: where needed, which is for rules that are not
    linear in the gradient and under `jax.vmap`.
    """

    capacity: int | None = None
    fraction_bits: int | None = None
    driver: str | None = None
    buffer: str = "device"
    isolate: bool | None = None

    def __post_init__(self) -> None:
        if self.buffer not in ("device", "gmpy2"):
            raise ValueError(f'`buffer` must be "device" or "gmpy2"; got {self.buffer!r}.')
        if self.driver not in (None, "scan", "host"):
            raise ValueError(f'`driver` must be "scan", "host" or None; got {self.driver!r}.')
        if self.buffer == "gmpy2" and self.driver == "scan":
            raise ValueError('buffer="gmpy2" lives in Python and needs driver="host" (or None); got driver="scan".')
        if self.capacity is not None and (not isinstance(self.capacity, int) or self.capacity < 0):
            raise ValueError(f"`capacity` must be None or a count of 32-bit words per parameter; got {self.capacity!r}.")
        if self.fraction_bits is not None and not 8 <= self.fraction_bits <= 60:
            raise ValueError(f"`fraction_bits` must be from 8 to 60; got {self.fraction_bits!r}.")

    @property
    def driver_name(self) -> str:
        if self.buffer == "gmpy2":
            return "host_eager"
        return self.driver or "scan"

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


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Integers have no tangents: a derivative through the passes themselves would silently be zero. Raise instead."""

    @functools.wraps(function)
    def wrapped(problem: Problem, static: Any, *args: Any) -> Any:
        run = jax.custom_jvp(lambda *a: function(problem, static, *a))

        @run.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            raise TypeError(
                "hg.Reversible has first derivatives only; this differentiates it a second time (or forwards, by jvp). "
                "Pass adjoint=hg.Unrolled() to hg.train for the runs that are differentiated twice."
            )

        return run(*args)

    return wrapped


def _batched_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pass that isolates its gradients when it is batched, by whatever nest of jit and vmap.

    Batched matrix products are fused with their surroundings more freely: from 8 seeds on, the gradient inside the jvp had
    other bits than in the forward pass, on a network that reverses exactly one seed at a time.
    """

    @functools.wraps(function)
    def wrapped(problem: Problem, static: Any, *args: Any) -> Any:
        run = jax.custom_batching.custom_vmap(lambda *a: function(problem, static, *a))

        @run.def_vmap
        def batched(size: int, axes: Any, *a: Any) -> Any:
            a, axes = _all_values(size, axes, a) if function is _jitted_forward else (a, axes)
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, axes)
            with jax.enable_x64(True):  # the rule may be called long after the context of the call is gone
                apart = lambda *a: function(problem.isolated(), static, *a)  # noqa: E731
                out = jax.vmap(apart, in_axes=axes, axis_size=size)(*a)
            return out, jax.tree.map(lambda _: True, out)

        return run(*args)

    return wrapped


def _all_values(size: int, axes: Any, arguments: Any) -> Any:
    """The forward pass's arguments and their flags, with all initial values batched, as all values are on the way back.

    What is batched may leave the parameters alone (the decay of a statistic does): their gradients would be computed once on
    the way there and in a batch on the way back.
    """
    (inputs,), (batched,) = arguments, axes
    each = lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (size, *x.shape))  # noqa: E731
    values, flags = jax.tree.map(each, inputs.values, batched.values), jax.tree.map(lambda _: True, batched.values)
    return (inputs._replace(values=values),), (batched._replace(values=flags),)


def _forward(problem: Problem, capacity: dict[str, int] | None, inputs: Inputs) -> tuple[Outcome, Exact]:
    if problem.driver != "scan" and not concrete(inputs):
        raise ValueError(
            'driver="host" and buffer="gmpy2" run training from Python and cannot be traced by jax.jit or jax.vmap. Call it '
            'outside of them (hg.optimize(..., jit=False)), or take hg.Reversible(driver="scan").'
        )
    with jax.enable_x64(True):
        key = None if capacity is None else tuple(sorted(capacity.items()))
        return _once(_batched_apart(_jitted_forward) if problem.driver == "scan" else _forward_pass)(problem, key, inputs)


def _forward_pass(problem: Problem, capacity: tuple[Any, ...] | None, inputs: Inputs) -> tuple[Outcome, Exact]:
    names = {link.name: None for _, link, _ in problem.links(inputs.h)}
    words: dict[str, int | None] = {**names, **dict(capacity or ())}
    plan = schedules(problem, inputs.h)
    state = begun(problem, inputs.values, words)
    end, losses, magnitudes = forward(problem, inputs, state, turns_of(plan))
    values = {link.name: rule.decoded(end.z, link) for rule, link, _ in problem.links(inputs.h)}
    status = assess(problem, inputs.values, inputs.h, plan, magnitudes, losses, words)
    return Outcome(values, losses, status), end


_jitted_forward = jax.jit(_forward_pass, static_argnums=(0, 1))


def _backward(problem: Problem, inputs: Inputs, end: Exact, dvalues: Any, dlosses: Any, wanted: Wanted) -> Any:
    with jax.enable_x64(True):
        function = _once(_batched_apart(_jitted_backward) if problem.driver == "scan" else _backward_pass)
        return function(problem, wanted, inputs, end, dvalues, dlosses)


def _backward_pass(
    problem: Problem, wanted: Wanted, inputs: Inputs, end: Exact, dvalues: Any, dlosses: Any
) -> tuple[tuple[Any, Any, Any], Array, dict[str, Array] | None]:
    dz = {}
    for rule, link, _ in problem.links(inputs.h):
        dz[link.name] = [d.astype(t) for d, t in zip(dvalues[link.name], rule.dtypes, strict=True)]
    dtheta = jax.tree.map(jnp.zeros_like, inputs.theta) if wanted.theta else None
    dh = [{k: jnp.zeros_like(x) for k, x in hj.items()} for hj in inputs.h]
    turns = turns_of(schedules(problem, inputs.h))
    first, ct, losses, norms = reverse(problem, inputs, end, turns, Cotangents(dz, dh, dtheta), dlosses, wanted.statistics)
    back = intact(problem, inputs.values, first) & jnp.isfinite(losses).all()
    gradients = jax.tree.map(lambda d, x: d.astype(x.dtype), ct.z, inputs.values)
    zeros = jax.tree.map(jnp.zeros_like, inputs.theta)
    return (gradients, ct.h, zeros if ct.theta is None else ct.theta), back, norms


_jitted_backward = jax.jit(_backward_pass, static_argnums=(0, 1))


def _certificate(forward: Status, intact: Array) -> Status:
    """The forward pass's status, or else whether the way back was exact: what failed on the way out cannot return."""
    reversal = jnp.where(intact.all(), OK, REVERSAL).astype(jnp.int32)
    place = jnp.where(forward.ok, first_true(~intact.reshape(-1)), forward.place)
    return dataclasses.replace(forward, code=jnp.where(forward.ok, reversal, forward.code), place=place)


def _capacities(problem: Problem, h: Any, capacity: int | None) -> dict[str, int]:
    """Words per parameter to allocate, for each link that decays."""
    at_least = ledger.capacity if (ledger := current_ledger()) else 0
    guess = lambda link: max(math.ceil(problem.steps * link.bits_a_step / WORD_BITS), at_least)  # noqa: E731  until told
    result = {}
    for (_, link, part), known in zip(problem.links(h), problem.words, strict=True):
        if link.decay and capacity is not None:
            result[link.name] = capacity
        elif link.decay and concrete(h):
            result[link.name] = max(_exact_words(problem, link, hj) for hj in part)
        elif link.decay:
            result[link.name] = guess(link) if known is None else known
    return result


def _exact_words(problem: Problem, link: Any, hj: Any) -> int:
    return words_needed(np.asarray(link_numerators(link, hj, problem.steps)), link.denominator)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _dense(x: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x
