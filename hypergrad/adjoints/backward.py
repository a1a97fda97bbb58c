"""The derivative of training by running it backwards (thesis, Algorithm 6, corrected), in the memory of a few copies.

Invariant: at the start of reverse step t the carry holds the links after step t, bit for bit those of the forward pass,
and the derivative of everything after step t with respect to them.

For SGD the lines of `body` are, with u = -(1-m) dv the cotangent of the gradient:

    da  = dw . v'                       w = w' - a v'                  (the link `params`)
    g, H u, (d_theta g)^T u             from one jvp of the gradient at w along u
    v   = (v' + (1-m) g) / m            dm = dv . (v + g)              (the link `velocity`)
    dw += H u;  dtheta += (d_theta g)^T u;  dv = m dv
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.exact import decode
from hypergrad.loop.drivers import Pause
from hypergrad.loop.problem import Inputs, Problem, join_steps, split
from hypergrad.loop.step import (
    Exact,
    Hypers,
    Rule,
    Values,
    ambiguous,
    evidence,
    increment,
    increments_at,
    isolated,
    parameters,
    retreat,
    settled,
    transformed,
    unfollow,
)  # fmt: skip
from hypergrad.optimizers.chain import PARAMS, STATISTICS, Link


class Cotangents(NamedTuple):
    """Of the links' values, of the hyperparameters, and of theta (None: nobody differentiates it)."""

    z: Values  # without the statistics, if nobody differentiates what they come to
    h: Hypers
    theta: list[Array] | None


class Reversed(NamedTuple):
    """What the reverse pass comes to."""

    start: Exact
    ct: Cotangents
    losses: Array  # [steps], computed again: whoever drops them changes what XLA fuses with the gradient, and its bits
    norms: dict[str, Array] | None  # of a probed problem: |cotangent| of each link, float64 [steps + 1]


class Pullback(NamedTuple):
    """One link's increments, leaf by leaf, and the cotangents of what they read."""

    updates: list[Array]
    h: Hypers
    z: list[dict[str, Array]]
    g: list[Array]


def pull(rule: Rule, link: Link, read: list[dict[str, Array]], dz: Values, h: Hypers, g: list[Array] | None) -> Pullback:
    """The increments of a link at what they read, and the vjp of each along dz."""
    rows = []
    for j in rule.leaves:
        arguments = (h[j], read[j], None if g is None else g[j])
        update, vjp = jax.vjp(lambda *a: increment(link, *a), *arguments)
        rows.append((update, *vjp(_sum_to(dz[link.name][j], update.shape).astype(update.dtype))))
    return Pullback(*(list(column) for column in zip(*rows, strict=True)))


def undo_link(
    rule: Rule, link: Link, t: Array, state: Exact, ct: Cotangents, h: Hypers, turns: Any, g: list[Array] | None
) -> tuple[Exact, Cotangents, list[Array]]:
    """Take back z <- rho z + increment(h, others, g) exactly, and pull the cotangents through it; also that of g."""
    read = _stored(rule, link, t, state.z, h, g)
    back = pull(rule, link, read, ct.z, h, g)
    updates = back.updates if rule.linear else increments_at(rule, link, t, read, h, g)
    state = retreat(rule, link, state, h, turns, updates)
    dz, dh = _spread(ct.z, back.z), [_plus(a, b) for a, b in zip(ct.h, back.h, strict=True)]
    if link.decay:
        for j in rule.leaves:
            rho, dzj = h[j][link.decay], dz[link.name][j]
            old = decode(state.z[link.name][j], rule.bits(link)[j], rule.dtypes[j])
            # A choice that is always the same, or XLA:CPU's library for sums pulls the decoding in, at five times the cost.
            dh[j][link.decay] += _sum_to(jnp.where(t >= 0, dzj * old, 0), rho.shape)
            dz[link.name][j] = rho * dzj
    return state, Cotangents(dz, dh, ct.theta), back.g


def _stored(rule: Rule, link: Link, t: Array, z: Values, h: Hypers, g: list[Array] | None) -> list[dict[str, Array]]:
    """What increments read; behind a branch where `increments_at` asks for one.

    What a branch computes is stored. In the open, XLA would read the integers again for every kernel of the derivative.
    """
    read = rule.readable(z, link)
    if any(ambiguous(rule, link, h[j], read[j], None if g is None else g[j]) for j in rule.leaves):
        return isolated(t, lambda z: rule.readable(z, link), z)
    return read


def gradient_cotangent(rule: Rule, z: Values, dz: Values, h: Hypers) -> list[Array]:
    """u, the cotangent of the gradient, of a linear rule: no value of z or g enters it, so any will do."""
    dtypes = rule.dtypes if rule.transforms else rule.param_dtypes
    anything = u = [jnp.zeros(x.shape, dtype) for x, dtype in zip(z[PARAMS], dtypes, strict=True)]
    for link in reversed(rule.chain[:-1]):
        back = pull(rule, link, rule.readable(z, link), dz, h, anything)
        u, dz = _plus(u, back.g), _spread(dz, back.z)
    return u


def pull_transforms(
    rule: Rule, h: Hypers, w: list[Array], g: list[Array], u: list[Array]
) -> tuple[Hypers, list[Array], list[Array]]:
    """From the cotangent of what the chain saw to those of the hyperparameters, the parameters and the gradient."""
    return jax.vjp(lambda *a: transformed(rule, *a), h, w, g)[1](u)


def evidence_cotangent(problem: Problem, z: Values, ds: Values, rates: Hypers) -> list[Array]:
    """That of what the statistics follow: linear in it, so that no value enters. None where nobody differentiates them."""
    parts = []
    for rule in problem.statistics if ds else ():
        (link,) = rule.chain
        parts += pull(rule, link, rule.readable(z, link), ds, rates, [jnp.zeros_like(x) for x in ds[link.name]]).g
    return parts


def undo_statistics(
    problem: Problem, t: Array, state: Exact, ct: Cotangents, rates: Hypers, turns: Any, seen: list[Array]
) -> tuple[Exact, Cotangents]:
    """`unfollow`, and the cotangents through it where there are any."""
    if not ct.z:
        return unfollow(problem.statistics, t, state, rates, turns, seen), ct
    for rule in problem.statistics:
        state, ct, _ = undo_link(rule, rule.chain[0], t, state, ct, rates, turns, seen)
    return state, ct


def reverse(
    problem: Problem,
    inputs: Inputs,
    end: Exact,
    turns: Any,
    ct: Cotangents,
    dlosses: Array | None,
    pause: Pause | None = None,
) -> Reversed:
    """From the last state to the first, and the cotangents of all inputs. Call it inside `jax.enable_x64(True)`."""
    rule = problem.rule
    *others, params = rule.chain
    constant, stepped = problem.beside(split, inputs.h)
    first_order = _first_order(problem, with_theta=ct.theta is not None)
    gradient = problem.maybe_jit(problem.gradient)

    def body(consts: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        state, (dz, ds, dconstant, dtheta) = carry
        (constant, theta, frozen), (t, stepped, turns, dloss) = consts, x
        h, rates = problem.parts(join_steps(constant, stepped))
        ct = Cotangents(dz, jax.tree.map(jnp.zeros_like, h), dtheta)
        means = Cotangents(ds, jax.tree.map(jnp.zeros_like, rates), None)

        def undo_others(state: Exact, ct: Cotangents, g: list[Array]) -> tuple[Exact, Cotangents, list[Array]]:
            u = [jnp.zeros_like(x) for x in g]
            for link in reversed(others):
                state, ct, dg = undo_link(rule, link, t, state, ct, h, turns, g)
                u = _plus(u, dg)
            return state, ct, u

        state, ct, _ = undo_link(rule, params, t, state, ct, h, turns, None)
        w, wide_w = parameters(rule, t, state.z), rule.floats(state.z, params)
        batch = problem.batch(frozen, t)
        at_w = lambda w, push: first_order(w, push, theta, frozen, batch)  # noqa: E731
        push = evidence_cotangent(problem, state.z, ds, rates)
        if rule.linear:
            u = gradient_cotangent(rule, state.z, ct.z, h)
            if rule.transforms:
                u = pull_transforms(rule, h, wide_w, rule.decoded(state.z, params), u)[2]
            (g, g_theta), (hu, cross), (value, seen) = _along(problem, t, at_w, w, u, push)
        if rule.isolate:
            value, g, seen = problem.apart(t, gradient, w, theta, frozen, batch)
            g = problem.joined(t, g)
        state, means = undo_statistics(problem, t, state, means, rates, turns, seen)
        state, ct, u = undo_others(state, ct, evidence(rule, t, h, wide_w, g))
        if rule.transforms:
            dh, dw, u = pull_transforms(rule, h, wide_w, g, u)
            ct = Cotangents({**ct.z, PARAMS: _plus(ct.z[PARAMS], dw)}, _plus(ct.h, dh), ct.theta)
        if not rule.linear:
            (g, g_theta), (hu, cross), _ = _along(problem, t, at_w, w, u, push)

        dw, dtheta = _plus(ct.z[PARAMS], hu), _plus(dtheta, cross)
        if dloss is not None:
            dw = jax.tree.map(lambda a, b: a + dloss * b, dw, g)
            dtheta = jax.tree.map(lambda a, b: a + dloss * b, dtheta, g_theta)
        dstepped = [{k: dh[k] for k in hj} for dh, hj in zip(ct.h + means.h, stepped, strict=True)]
        dconstant = [{k: dh[k] + old[k] for k in old} for dh, old in zip(ct.h + means.h, dconstant, strict=True)]
        dz = {**ct.z, PARAMS: dw}
        return (state, (dz, means.z, dconstant, dtheta)), (dstepped, value, _norms(dz) if problem.probed else None)

    xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns, dlosses)
    dz = {name: leaves for name, leaves in ct.z.items() if name != STATISTICS}
    ds = {name: leaves for name, leaves in ct.z.items() if name == STATISTICS}
    last_norms = _norms(dz)
    carry = (end, (dz, ds, jax.tree.map(jnp.zeros_like, constant), ct.theta))
    consts = (constant, inputs.theta, inputs.frozen)
    (start, (dz, ds, dconstant, dtheta)), (dstepped, losses, norms) = problem.run(body, consts, carry, xs, True, pause)
    dh = problem.beside(_joined, dconstant, dstepped, inputs.h)
    if problem.probed:
        norms = jax.tree.map(lambda before, last: jnp.append(before, last), norms, last_norms)
    return Reversed(start, Cotangents({**dz, **ds}, dh, dtheta), losses, norms)


def _joined(problem: Problem, dconstant: Hypers, dstepped: Hypers, h: Hypers) -> Hypers:
    """The inverse of `split`: cotangents like h."""
    dh = join_steps(dconstant, dstepped)
    return [{k: d.reshape(hj[k].shape) for k, d in dj.items()} for dj, hj in zip(dh, h, strict=True)]


def _first_order(problem: Problem, with_theta: bool) -> Callable[..., tuple[Any, Any]]:
    """(w, push, theta, frozen, batch) -> ((gradient of loss + push . evidence in w, in theta or None), (loss, evidence))."""

    def pushed(w: list[Array], theta: list[Array], push: list[Array], *rest: Any) -> tuple[Array, Any]:
        value, seen = problem.value(w, theta, *rest)
        return sum((jnp.vdot(a, x) for a, x in zip(push, seen, strict=False)), value), (value, seen)

    def gradients(w: list[Array], push: list[Array], theta: list[Array], *rest: Any) -> tuple[Any, Any]:
        differentiated = jax.value_and_grad(pushed, argnums=(0, 1) if with_theta else 0, has_aux=True)
        (_, found), g = differentiated(w, theta, push, *rest)
        return (g if with_theta else (g, None)), found

    return problem.maybe_jit(gradients)


def _along(
    problem: Problem, t: Array, first_order: Callable[..., Any], w: list[Array], u: list[Array], push: list[Array]
) -> Any:
    """Forward over reverse: ((g, g_theta), (H u, (d_theta g)^T u), (loss, evidence)) from one jvp, without residuals of
    residuals. A push from 0 along the cotangent of the evidence adds what the statistics pass back to the second of them."""
    with jax.enable_x64(problem.x64):
        none = [jnp.zeros_like(x) for x in push]
        directions = settled(problem.rule.layout.split(u)), settled(push)
        (g, g_theta), (hu, cross), found = settled(jax.jvp(first_order, (w, none), directions, has_aux=True))
    return (problem.joined(t, g), g_theta), (problem.joined(t, hu), cross), found


def _norms(dz: Values) -> dict[str, Array]:
    # In float64: the square of an exploding float32 would overflow long before the cotangent does.
    return {name: jnp.sqrt(sum(jnp.sum(x.astype(jnp.float64) ** 2) for x in leaves)) for name, leaves in dz.items()}


def _plus(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), a, b)


def _spread(dz: Values, read: list[dict[str, Array]]) -> Values:
    """Add what each leaf's increment passes back to the links that it read."""
    columns = {name: [_plus_one(x, row, name) for x, row in zip(dz[name], read, strict=True)] for name in dz}
    return columns


def _plus_one(x: Array, row: dict[str, Array], name: str) -> Array:
    return x + row[name] if name in row else x


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum a cotangent over the axes along which its primal was broadcast."""
    if x.shape == shape:
        return x
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b)
    return x.sum(axis=axes, keepdims=True)
