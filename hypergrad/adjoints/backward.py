"""The derivative of training by running it backwards (thesis, Algorithm 6, corrected), in the memory of a few copies.

Invariant: at the start of reverse step t the carry holds the links after step t, bit for bit those of the forward pass,
and the derivative of everything after step t with respect to them, up to the decays of step t + 1, which it holds beside.

For SGD the lines of `step_vjp` are, with u = -(1-m) dv the cotangent of the gradient:

    da  = dw . v'                       w = w' - a v'                  (`undo_parameters`)
    g, J^T u, (d_theta g)^T u           from one jvp or vjp of the gradient at w (second_order.py)
    v   = (v' + (1-m) g) / m            dm = dv . (v + g)              (`undo_others`)
    dw += J^T u;  dtheta += (d_theta g)^T u;  dv = m dv
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.adjoints.cotangents import (
    at_rest,
    common_factor,
    first_cotangents,
    gradient_cotangent,
    pull_transforms,
    statistics_cotangent,
)
from hypergrad.adjoints.link import Cotangents, decayed, decays, plus
from hypergrad.adjoints.second_order import (
    Gradients,
    Products,
    accumulator,
    chosen,
    first_order,
    products,
    pulled_metrics,
    pulled_signals,
    pulled_statistics,
)
from hypergrad.adjoints.undo import (
    add_parameters,
    add_values,
    delayed_links,
    once_read,
    undo_others,
    undo_parameters,
    undo_statistics,
)
from hypergrad.adjoints.watch import watch, with_end
from hypergrad.exact import all_of
from hypergrad.optimizers.chain import GRADIENT, PARAMS, Link
from hypergrad.optimizers.expand import Hypers
from hypergrad.run.fingerprints import print_of
from hypergrad.run.forward import Seen, theta_of_step
from hypergrad.run.per_step import join_steps, joined, split_first
from hypergrad.run.plan import by_link
from hypergrad.run.reads import StepTheta
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.step import (
    Entries,
    Signals,
    State,
    early_values,
    final_values,
    parameters,
    transformed,
    wide_parameters,
)


class Reversed(NamedTuple):
    """What the reverse pass comes to."""

    start: State
    ct: Cotangents
    watched: dict[str, Any]  # what `Run.watch` asks for, each with a leading axis of steps
    doubted: Array | None = None  # `doubt`, and whether it arose


class Pushed(NamedTuple):
    """Cotangents of what a step gives, or of all steps with a leading axis."""

    loss: Array | None = None  # None: nobody differentiates it
    metrics: Any = ()  # (): likewise


class Given(NamedTuple):
    """What one step of the reverse pass is given beside the state and its cotangents."""

    h: list[Hypers]
    entries: Entries
    theta: tuple[list[Array], list[Array]]  # what is the same at all steps, and the step's own
    frozen: Any
    pushed: Pushed
    unit: Array  # the largest cotangent that comes in


class Pass(NamedTuple):
    """What all its steps share."""

    wanted: tuple[bool, ...]  # which leaves of theta are differentiated
    seen: tuple[bool, ...]  # the same of what the loss takes of it at a step
    gradients: Any  # `first_order`
    gradient: Callable[..., Any]
    delayed: list[list[Link]]  # of each block, the links whose cotangents decay one step later
    last: int  # the step that is undone first


class Point(NamedTuple):
    """What the functions of the loss are given at a step."""

    w: list[Array]
    theta: list[Array]
    frozen: Any
    batch: list[Any]


class Undone(NamedTuple):
    """What one step of the reverse pass comes to."""

    state: State
    ct: Cotangents  # of the values before the step, up to the decays that are `pending`; of h of this step alone
    dtheta: list[Array]  # of the step's own of theta
    pending: list[dict[str, Array]]
    seen: Seen  # computed again: whoever drops the loss changes what XLA fuses with the gradient, and its bits
    asymmetry: Array | None
    doubt: Array | None
    entered: list[Array]  # cotangents of the parameters that the step's own loss and metrics have brought


def step_vjp(run: Run, pass_: Pass, t: Array, state: State, ct: Cotangents, given: Given, doubt: Array | None) -> Undone:
    """One step back, and the cotangents through it: the step alone, without a loop."""
    h, entries, whole, frozen, (dloss, dmetrics), _ = given
    state, ct = undo_parameters(run, t, state, ct, h, entries)
    w, wide_w = parameters(run, t, state), wide_parameters(run, state)
    batch = run.batch(frozen, t, apart=run.isolate or doubt is not None)
    theta, indices = theta_of_step(run, t, *whole, frozen, batch)
    point = Point(w, theta, frozen, batch)
    second_order = functools.partial(products, run, t, pass_.gradients, w, chosen(pass_.seen, theta), point[1:], dloss=dloss)
    found = second = None
    if run.linear:
        u, c = _linear_cotangent(run, state, ct, h, wide_w)
        found, second = second_order(u, push=statistics_cotangent(run, state, ct.z, h))
        second = second if c is None else second.times(c)
    state, ct = once_read(run, t, state, ct)
    (value, g, seen), doubt = _gradient(run, pass_, t, point, found, doubt)
    more = run.more_signals(t, *point)
    raw = run.signals(g, seen, more)
    state, ct, u, push, dsignals = _undo_what_sees(run, pass_, t, state, ct, given, wide_w, raw)
    if found is None or second is None:
        found, second = second_order(u, push=push)
    parts = [second]
    if push and run.functions.symmetric:
        parts.append(pulled_statistics(run, t, pass_.seen, push, *point))
    if more:
        parts.append(pulled_signals(run, t, pass_.seen, dsignals, *point))
    if dloss is not None and run.functions.symmetric:
        parts.append(Products([dloss * x for x in g], [dloss * x.astype(accumulator(x)) for x in found.theta]))
    dseen = [jnp.zeros(x.shape, accumulator(x)) for x in chosen(pass_.seen, theta)]
    for part in parts:
        ct, dseen = ct._replace(z=add_parameters(run, ct.z, part.w)), plus(dseen, part.theta)
    entered = [] if dloss is None else [dloss * x for x in g]
    if dmetrics:
        values = final_values(run, state)[: len(run.parameters)]
        dvalues, dtheta = pulled_metrics(run, t, pass_.seen, dmetrics, values, *point[1:])
        ct, dseen = ct._replace(z=add_values(run, ct.z, dvalues)), plus(dseen, dtheta)
        entered += [own[PARAMS] for own in dvalues]
    totals, dtheta = run.functions.theta.added(pass_.wanted, ct.theta, dseen, indices)
    pending = [decays(block, pass_.delayed[j], h[j]) for j, block in enumerate(run.blocks)]
    again = Seen(value, None if run.functions.sure else print_of(batch))
    return Undone(state, ct._replace(theta=totals), dtheta, pending, again, second.asymmetry, doubt, entered)


def _linear_cotangent(
    run: Run, state: State, ct: Cotangents, h: list[Hypers], wide_w: list[Array]
) -> tuple[list[Array], Array | None]:
    """That of the gradient, before it is known: in a linear rule none of its values enters. And the number that it is still
    to be multiplied by, if there is one."""
    own = run.functions.symmetric and run.foreign is None  # what is not the library's may round, or bend, what passes back
    c = common_factor(run, h) if own else None
    u = gradient_cotangent(run, state, ct.z, h) if c is None else first_cotangents(run, ct.z)
    if not run.transforms:
        return u, c
    g = [jnp.zeros(x.shape, x.dtype) for x in u]
    return pull_transforms(run, [h[j] for j in run.parameters], wide_w, g, early_values(run, state), u)[2], c


def _gradient(
    run: Run, pass_: Pass, t: Array, point: Point, found: Gradients | None, doubt: Array | None
) -> tuple[tuple[Array, list[Array], list[Array]], Array | None]:
    """(loss, gradient, batch statistics) with the bits of training, and the doubt that there is from now on. found: as they
    came beside their derivatives; None: they did not."""
    apart = lambda: run.isolated_gradient(pass_.gradient, t, *point)  # noqa: E731
    if run.isolate or found is None:
        return apart(), doubt
    beside = found.value, found.w, found.seen
    return (beside, None) if doubt is None else _either(doubt, t == pass_.last, apart, beside)


def _undo_what_sees(
    run: Run, pass_: Pass, t: Array, state: State, ct: Cotangents, given: Given,
    wide_w: list[Array], raw: Signals,
) -> tuple[State, Cotangents, list[Array], list[Array], Signals]:  # fmt: skip
    """All links but the parameters, which see signals: (.., .., the cotangents of the gradient, of the batch statistics, and
    of all signals). raw: the gradient among them as the loss has it."""
    h, entries, signals = given.h, given.entries, transformed(run, t, state, given.h, raw)
    state, ct, dsignals = undo_others(run, pass_.delayed, t, state, ct, h, entries, signals)
    u = at_rest([signals[j][GRADIENT] for j in run.parameters], [d[GRADIENT] for d in dsignals], given.unit)
    if run.transforms:
        of_parameters, g = [h[j] for j in run.parameters], [raw[j][GRADIENT] for j in run.parameters]
        dh, dw, u, dz = pull_transforms(run, of_parameters, wide_w, g, early_values(run, state), u)
        dz = add_values(run, add_parameters(run, ct.z, dw), dz)
        ct = ct._replace(z=dz, h=plus(ct.h[: len(dh)], dh) + ct.h[len(dh) :])
    if any(run.early):
        state, ct, other = undo_others(run, pass_.delayed, t, state, ct, h, entries, raw, early=True)
        u, dsignals = plus(u, [d[GRADIENT] for d in other]), plus(dsignals, other)
    push = statistics_cotangent(run, state, ct.z, h)
    state, ct = undo_statistics(run, t, state, ct, h, entries, signals)
    return state, ct, u, push, dsignals


def undo(run: Run, wanted: tuple[bool, ...], consts: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
    """`step_vjp` at the steps of xs, the last first; also what is found of each step.

    xs: as `steps_of` gives them, with what is `Pushed` as others. What is carried, and the rest: as `begin` says.
    Call it inside `jax.enable_x64(True)`.
    """
    seen = run.functions.theta.flags(wanted)
    delayed = [delayed_links(run, block) for block in run.blocks]
    pass_ = Pass(wanted, seen, first_order(run, seen), run.maybe_jit(run.gradient), delayed, run.steps - 1)

    def body(consts: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        state, (dz, pending, dconstant, dtheta), doubt = carry
        (constant, theta, unit, frozen), (t, ((stepped, theta_stepped), pushed), entries) = consts, x
        h = join_steps(constant, stepped)
        ct = Cotangents(list(map(decayed, dz, pending)), jax.tree.map(jnp.zeros_like, h), dtheta)
        given = Given(h, by_link(run, entries), (theta, theta_stepped), frozen, pushed, unit)
        done = step_vjp(run, pass_, t, state, ct, given, doubt)
        dstepped = [{k: dh[k] for k in hj} for dh, hj in zip(done.ct.h, stepped, strict=True)]
        dconstant = [{k: dh[k] + old[k] for k in old} for dh, old in zip(done.ct.h, dconstant, strict=True)]
        carry = (done.state, (done.ct.z, done.pending, dconstant, done.ct.theta), done.doubt)
        dz = list(map(decayed, done.ct.z, done.pending))
        watched = watch(run, done.state, dz, done.entered, done.asymmetry)
        return carry, ((dstepped, done.dtheta), done.seen, watched)

    return run.loop(body, consts, carry, xs, True, fixed=wanted)


def begin(run: Run, inputs: Inputs, end: State, ct: Cotangents, pushed: Pushed, doubt: Array | None) -> tuple[Any, Any]:
    """(what stays the same on the whole way back, what is carried), from the state after the last step.

    ct: of what comes out. doubt, bool []: whether to compute each gradient apart from its derivative all the same; False:
    from the first on that comes out otherwise there. None: as the run says.
    """
    constant, first = run.outside_loop(split_first, inputs.h)
    theta, _ = run.functions.theta.parted(inputs.theta)
    ones = jax.tree.map(jnp.ones_like, (constant, first))
    pending = [decays(b, delayed_links(run, b), hj) for b, hj in zip(run.blocks, join_steps(*ones), strict=True)]
    carry = (end, (ct.z, pending, jax.tree.map(jnp.zeros_like, constant), ct.theta), doubt)
    return (constant, theta, _largest((ct.z, pushed)), inputs.frozen), carry


def finish(run: Run, wanted: tuple[bool, ...], inputs: Inputs, ct: Cotangents, carry: Any, found: Any) -> Reversed:
    """What the way back comes to; ct: with which it began; found: (cotangents, what was watched) of the steps undone."""
    (start, (dz, pending, dconstant, dtheta), doubted), (of_steps, watched) = carry, found
    if run.undone:
        of_steps = jax.tree.map(lambda x: jnp.pad(x, [(run.undone, 0)] + [(0, 0)] * (x.ndim - 1)), of_steps)
    dstepped, dtheta_stepped = of_steps
    of_wanted = StepTheta(tuple(chosen(wanted, run.functions.theta.stepped)))
    dtheta = of_wanted.together(dtheta, dtheta_stepped)
    dh = joined(run, dconstant, dstepped, inputs.h)
    watched = with_end(run, watched, ct.z)
    return Reversed(start, Cotangents(list(map(decayed, dz, pending)), dh, dtheta), watched, doubted)


def _either(doubt: Array, first: Array, apart: Callable[[], Any], beside: Any) -> tuple[Any, Array]:
    """(the gradient that came beside its derivative, or the one `apart` if there is doubt; whether there is from now on).

    At the first step there is, so that most of what XLA rounds otherwise is found out at once.
    """

    def checked(beside: Any) -> tuple[Any, Array]:
        alone = apart()
        same = [all_of(x == y) for x, y in zip(jax.tree.leaves(alone[1:]), jax.tree.leaves(beside[1:]), strict=True)]
        return alone, ~functools.reduce(jnp.logical_and, same)

    # A branch, though it copies the gradient where there is nothing to do. In a loop of one step or none, which does not,
    # XLA divided the gradient of sharded data otherwise than in training.
    chosen, differs = jax.lax.cond(doubt | first, checked, lambda beside: (beside, jnp.bool_(False)), beside)
    return chosen, doubt | differs


def _largest(cotangents: Any) -> Array:
    """float32 or float64 []."""
    leaves = jax.tree.leaves(cotangents)
    dtype = jnp.float64 if any(jnp.finfo(x.dtype).bits == 64 for x in leaves) else jnp.float32
    return jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(dtype) for x in leaves]).max()
