"""The derivative of training by running it backwards (thesis, Algorithm 6, corrected), in the memory of a few copies.

Invariant: at the start of reverse step t the carry holds the links after step t, bit for bit those of the forward pass,
and the derivative of everything after step t with respect to them, up to the decays of step t + 1, which it holds beside.

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

from hypergrad.adjoints.link import Cotangents, decayed, decays, plus, pull, reads, spread, undo_link
from hypergrad.loop.drivers import Pause
from hypergrad.loop.problem import Inputs, Problem, join_steps, split
from hypergrad.loop.step import Exact, Hypers, Rule, Values, evidence, isolated, parameters, settled, transformed, unfollow
from hypergrad.optimizers.chain import PARAMS, STATISTICS


class Reversed(NamedTuple):
    """What the reverse pass comes to."""

    start: Exact
    ct: Cotangents
    losses: Array  # [steps], computed again: whoever drops them changes what XLA fuses with the gradient, and its bits
    norms: dict[str, Array] | None  # of a probed problem: |cotangent| of each link, float64 [steps + 1]


def gradient_cotangent(rule: Rule, z: Values, dz: Values, h: Hypers) -> list[Array]:
    """u, the cotangent of the gradient, of a linear rule: no value of z or g enters it, so any will do."""
    dtypes = rule.dtypes if rule.transforms else rule.param_dtypes
    anything = u = [jnp.zeros(x.shape, dtype) for x, dtype in zip(z[PARAMS], dtypes, strict=True)]
    for link in reversed(rule.chain[:-1]):
        back = pull(rule, link, rule.readable(z, link), dz, h, anything)
        u, dz = plus(u, back.g), spread(dz, back.z)
    return u


def at_rest(rule: Rule, g: list[Array], u: list[Array]) -> list[Array]:
    """u, the cotangent of the gradient; where that is exactly zero, within 3/8 of the exponents of the accumulators' dtype.

    A weight that has no gradient stays where it is, but has a derivative, which Adam multiplies by rate / eps times the
    curvature at each step. Were it to overflow, its products with what is zero there would be NaN in all that they enter.
    """
    result = []
    for gj, uj, dtype in zip(g, u, rule.dtypes, strict=True):
        most = min(float(jnp.finfo(dtype).max) ** (3 / 8), float(jnp.finfo(uj.dtype).max))
        result.append(jnp.where(gj == 0, jnp.clip(uj, -most, most), uj))
    return result


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
        ct = ct._replace(z=decayed(ct.z, decays(rule, rule.chain, rates)))
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
    ones = _ones(constant, stepped)
    # Cotangents decay one step later, so that they are stored as the cotangent of the gradient reads them: XLA:CPU would
    # compute them once more for it. But not where a link before reads the old value: what it passes back does not decay.
    old = {name for i, link in enumerate(others) for name in reads(rule, link, end.z, ones) & {k.name for k in others[i:]}}
    later = [link for link in others if link.name not in old]

    def body(consts: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        state, (dz, owed, ds, dconstant, dtheta) = carry
        (constant, theta, frozen), (t, stepped, turns, dloss) = consts, x
        h, rates = problem.parts(join_steps(constant, stepped))
        ct = Cotangents(decayed(dz, owed), jax.tree.map(jnp.zeros_like, h), dtheta)
        means = Cotangents(ds, jax.tree.map(jnp.zeros_like, rates), None)

        def undo_others(state: Exact, ct: Cotangents, g: list[Array]) -> tuple[Exact, Cotangents, list[Array]]:
            u = [jnp.zeros_like(x) for x in g]
            for link in reversed(others):
                state, ct, dg = undo_link(rule, link, t, state, ct, h, turns, g)
                u = plus(u, dg)
                if link not in later:
                    ct = ct._replace(z=decayed(ct.z, decays(rule, [link], h)))
            return state, ct, at_rest(rule, g, u)

        state, ct, _ = undo_link(rule, params, t, state, ct, h, turns, None)
        ct = ct._replace(z=decayed(ct.z, decays(rule, [params], h)))
        w, wide_w = parameters(rule, t, state.z), rule.floats(state.z, params)
        batch = problem.batch(frozen, t)
        at_w = lambda w: first_order(w, theta, frozen, batch)  # noqa: E731
        if rule.linear:
            u = gradient_cotangent(rule, state.z, ct.z, h)
            if rule.transforms:
                u = pull_transforms(rule, h, wide_w, rule.decoded(state.z, params), u)[2]
            (g, g_theta), (hu, cross), (value, seen) = _along(problem, t, at_w, w, u)
        if rule.isolate:
            value, g, seen = problem.apart(t, gradient, w, theta, frozen, batch)
            g = problem.joined(t, g)
        state, means = undo_statistics(problem, t, state, means, rates, turns, seen)
        state, ct, u = undo_others(state, ct, evidence(rule, t, h, wide_w, g))
        if rule.transforms:
            dh, dw, u = pull_transforms(rule, h, wide_w, g, u)
            ct = Cotangents({**ct.z, PARAMS: plus(ct.z[PARAMS], dw)}, plus(ct.h, dh), ct.theta)
        if not rule.linear:
            (g, g_theta), (hu, cross), _ = _along(problem, t, at_w, w, u)

        dw, dtheta = plus(ct.z[PARAMS], hu), plus(dtheta, cross)
        if ds:
            push = evidence_cotangent(problem, state.z, ds, rates)
            seen_w, seen_theta = _pull_evidence(problem, t, push, w, theta, frozen, batch)
            dw, dtheta = plus(dw, seen_w), dtheta if dtheta is None else plus(dtheta, seen_theta)
        if dloss is not None:
            dw = jax.tree.map(lambda a, b: a + dloss * b, dw, g)
            dtheta = jax.tree.map(lambda a, b: a + dloss * b, dtheta, g_theta)
        dstepped = [{k: dh[k] for k in hj} for dh, hj in zip(ct.h + means.h, stepped, strict=True)]
        dconstant = [{k: dh[k] + old[k] for k in old} for dh, old in zip(ct.h + means.h, dconstant, strict=True)]
        dz, owed = {**ct.z, PARAMS: dw}, decays(rule, later, h)
        norms = _norms(decayed(dz, owed)) if problem.probed else None
        return (state, (dz, owed, means.z, dconstant, dtheta)), (dstepped, value, norms)

    xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns, dlosses)
    dz = {name: leaves for name, leaves in ct.z.items() if name != STATISTICS}
    ds = {name: leaves for name, leaves in ct.z.items() if name == STATISTICS}
    last_norms = _norms(dz)
    owed = decays(rule, later, ones)
    carry = (end, (dz, owed, ds, jax.tree.map(jnp.zeros_like, constant), ct.theta))
    consts = (constant, inputs.theta, inputs.frozen)
    (start, (dz, owed, ds, dconstant, dtheta)), (dstepped, losses, norms) = problem.run(body, consts, carry, xs, True, pause)
    dh = problem.beside(_joined, dconstant, dstepped, inputs.h)
    if problem.probed:
        norms = jax.tree.map(lambda before, last: jnp.append(before, last), norms, last_norms)
    return Reversed(start, Cotangents({**decayed(dz, owed), **ds}, dh, dtheta), losses, norms)


def _joined(problem: Problem, dconstant: Hypers, dstepped: Hypers, h: Hypers) -> Hypers:
    """The inverse of `split`: cotangents like h."""
    dh = join_steps(dconstant, dstepped)
    return [{k: d.reshape(hj[k].shape) for k, d in dj.items()} for dj, hj in zip(dh, h, strict=True)]


def _ones(constant: Hypers, stepped: Hypers) -> Hypers:
    """Like the hyperparameters of one step."""
    return join_steps(*jax.tree.map(jnp.ones_like, (constant, jax.tree.map(lambda x: x[0], stepped))))


def _first_order(problem: Problem, with_theta: bool) -> Callable[..., tuple[Any, Any]]:
    """(w, theta, frozen, batch) -> ((gradient of the loss in w, in theta or None), (loss, evidence))."""

    def gradients(w: list[Array], theta: list[Array], *rest: Any) -> tuple[Any, Any]:
        differentiated = jax.value_and_grad(problem.value, argnums=(0, 1) if with_theta else 0, has_aux=True)
        found, g = differentiated(w, theta, *rest)
        return (g if with_theta else (g, None)), found

    return problem.maybe_jit(gradients)


def _along(problem: Problem, t: Array, first_order: Callable[..., Any], w: list[Array], u: list[Array]) -> Any:
    """Forward over reverse: ((g, g_theta), (H u, (d_theta g)^T u), (loss, evidence)) from one jvp, without residuals of
    residuals."""
    with jax.enable_x64(problem.x64):
        direction = settled(problem.rule.layout.split(u))
        (g, g_theta), (hu, cross), found = settled(jax.jvp(first_order, (w,), (direction,), has_aux=True))
    return (problem.joined(t, g), g_theta), (problem.joined(t, hu), cross), found


def _pull_evidence(problem: Problem, t: Array, push: list[Array], *inputs: Any) -> tuple[list[Array], list[Array]]:
    """The cotangents of w and theta from that of the evidence. Behind a branch: in the open, XLA would round the gradient
    beside it otherwise than on the way out."""

    def pulled(push: list[Array], w: list[Array], theta: list[Array], *rest: Any) -> tuple[list[Array], list[Array]]:
        _, vjp = jax.vjp(lambda w, theta: problem.value(w, theta, *rest)[1], w, theta)
        with jax.enable_x64(problem.x64):
            return vjp(push)

    dw, dtheta = isolated(t, pulled, push, *inputs)
    return problem.joined(t, dw), dtheta


def _norms(dz: Values) -> dict[str, Array]:
    # In float64: the square of an exploding float32 would overflow long before the cotangent does.
    return {name: jnp.sqrt(sum(jnp.sum(x.astype(jnp.float64) ** 2) for x in leaves)) for name, leaves in dz.items()}
