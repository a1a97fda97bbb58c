"""The derivative of training by running it backwards (thesis, Algorithm 6, corrected), in the memory of a few copies.

Invariant: at the start of reverse step t the carry holds the links after step t, bit for bit those of the forward pass,
and the derivative of everything after step t with respect to them, up to the decays of step t + 1, which it holds beside.

For SGD the lines of `body` are, with u = -(1-m) dv the cotangent of the gradient:

    da  = dw . v'                       w = w' - a v'                  (the link `params`)
    g, J^T u, (d_theta g)^T u           from one jvp or vjp of the gradient at w (second_order.py)
    v   = (v' + (1-m) g) / m            dm = dv . (v + g)              (the link `velocity`)
    dw += J^T u;  dtheta += (d_theta g)^T u;  dv = m dv
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.adjoints.link import Cotangents, decayed, decays, plus, pull, reads, spread, undo_link
from hypergrad.adjoints.second_order import chosen, first_order, products, pulled_evidence
from hypergrad.exact import all_of
from hypergrad.loop.drivers import Pause
from hypergrad.loop.forward import Seen
from hypergrad.loop.prints import print_of, state_prints
from hypergrad.loop.problem import Inputs, Problem, join_steps, split
from hypergrad.loop.step import Exact, Hypers, Rule, Values, evidence, parameters, transformed, unfollow
from hypergrad.optimizers.chain import PARAMS, STATISTICS


class Reversed(NamedTuple):
    """What the reverse pass comes to."""

    start: Exact
    ct: Cotangents
    seen: Seen  # computed again: whoever drops the losses changes what XLA fuses with the gradient, and its bits
    watched: dict[str, Any]  # what `Problem.watch` asks for, each with a leading axis of steps
    doubted: Array | None = None  # `doubt`, and whether it arose


def gradient_cotangent(rule: Rule, z: Values, dz: Values, h: Hypers) -> list[Array]:
    """u, the cotangent of the gradient, of a linear rule: no value of z or g enters it, so any will do."""
    anything = u = [jnp.zeros(x.shape, dtype) for x, dtype in zip(z[PARAMS], rule.dtypes, strict=True)]
    for link in reversed(rule.chain[:-1]):
        back = pull(rule, link, rule.readable(z, link), dz, h, anything)
        u, dz = plus(u, back.g), spread(dz, back.z)
    return u


def at_rest(rule: Rule, g: list[Array], u: list[Array], unit: Array) -> list[Array]:
    """u, the cotangent of the gradient; where that is exactly zero, within 3/8 of the exponents of the accumulators' dtype
    above `unit`, the largest cotangent that comes in.

    A weight that has no gradient stays where it is, but has a derivative, which Adam multiplies by rate / eps times the
    curvature at each step. Were it to overflow, its products with what is zero there would be NaN in all that they enter.
    """
    result = []
    for gj, uj, dtype in zip(g, u, rule.dtypes, strict=True):
        most = float(jnp.finfo(dtype).max) ** (3 / 8) * unit.astype(dtype)
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
    wanted: tuple[bool, ...],
    pause: Pause | None = None,
    doubt: Array | None = None,
) -> Reversed:
    """From the last state to the first, and the cotangents of all inputs. Call it inside `jax.enable_x64(True)`.

    wanted: which leaves of theta are differentiated. doubt, bool []: whether to compute each gradient apart from its
    derivative all the same; False: from the first on that comes out otherwise there. None: as the rule says.
    """
    rule = problem.rule
    *others, params = rule.chain
    constant, stepped = problem.beside(split, inputs.h)
    gradients, gradient = first_order(problem, wanted), problem.maybe_jit(problem.gradient)
    ones = _ones(constant, stepped)
    # Cotangents decay one step later, so that they are stored as the cotangent of the gradient reads them: XLA:CPU would
    # compute them once more for it. But not where a link before reads the old value: what it passes back does not decay.
    old = {name for i, link in enumerate(others) for name in reads(rule, link, end.z, ones) & {k.name for k in others[i:]}}
    later = [link for link in others if link.name not in old]

    def body(consts: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        state, (dz, owed, ds, dconstant, dtheta), doubt = carry
        (constant, theta, unit, frozen), (t, stepped, turns, dloss) = consts, x
        h, rates = problem.parts(join_steps(constant, stepped))
        ct = Cotangents(decayed(dz, owed), jax.tree.map(jnp.zeros_like, h), dtheta)
        means = Cotangents(ds, jax.tree.map(jnp.zeros_like, rates), [])

        def undo_others(state: Exact, ct: Cotangents, g: list[Array]) -> tuple[Exact, Cotangents, list[Array]]:
            u = [jnp.zeros_like(x) for x in g]
            for link in reversed(others):
                state, ct, dg = undo_link(rule, link, t, state, ct, h, turns, g)
                u = plus(u, dg)
                if link not in later:
                    ct = ct._replace(z=decayed(ct.z, decays(rule, [link], h)))
            return state, ct, at_rest(rule, g, u, unit)

        state, ct, _ = undo_link(rule, params, t, state, ct, h, turns, None)
        ct = ct._replace(z=decayed(ct.z, decays(rule, [params], h)))
        w, wide_w = parameters(rule, t, state.z), rule.floats(state.z, params)
        batch = problem.batch(frozen, t, apart=rule.isolate or doubt is not None)
        arguments = w, chosen(wanted, theta), (theta, frozen, batch)
        push = evidence_cotangent(problem, state.z, ds, rates)
        second_order = functools.partial(products, problem, t, gradients, *arguments, dloss=dloss, push=push)
        apart = lambda: problem.gradient_apart(gradient, t, w, theta, frozen, batch)  # noqa: E731
        if rule.linear:
            u = gradient_cotangent(rule, state.z, ct.z, h)
            if rule.transforms:
                u = pull_transforms(rule, h, wide_w, rule.decoded(state.z, params), u)[2]
            found, second = second_order(u)
            value, g, seen = found.value, found.w, found.seen
        if rule.isolate:
            value, g, seen = apart()
        elif doubt is not None:
            (value, g, seen), doubt = _either(doubt, t == problem.steps - 1, apart, (value, g, seen))
        state, means = undo_statistics(problem, t, state, means, rates, turns, seen)
        state, ct, u = undo_others(state, ct, evidence(rule, t, h, wide_w, g))
        if rule.transforms:
            dh, dw, u = pull_transforms(rule, h, wide_w, g, u)
            ct = Cotangents({**ct.z, PARAMS: plus(ct.z[PARAMS], dw)}, plus(ct.h, dh), ct.theta)
        if not rule.linear:
            found, second = second_order(u)

        dw, dtheta = plus(ct.z[PARAMS], second.w), plus(dtheta, second.theta)
        if ds and problem.functions.symmetric:
            through = pulled_evidence(problem, t, wanted, push, w, theta, frozen, batch)
            dw, dtheta = plus(dw, through.w), plus(dtheta, through.theta)
        if dloss is not None and problem.functions.symmetric:
            dw = jax.tree.map(lambda a, b: a + dloss * b, dw, g)
            dtheta = jax.tree.map(lambda a, b: a + dloss * b.astype(a.dtype), dtheta, found.theta)
        dstepped = [{k: dh[k] for k in hj} for dh, hj in zip(ct.h + means.h, stepped, strict=True)]
        dconstant = [{k: dh[k] + old[k] for k in old} for dh, old in zip(ct.h + means.h, dconstant, strict=True)]
        dz, owed = {**ct.z, PARAMS: dw}, decays(rule, later, h)
        again = Seen(value, None if problem.functions.sure else print_of(batch))
        watched = _watched(problem, state, decayed(dz, owed), second.asymmetry)
        return (state, (dz, owed, means.z, dconstant, dtheta), doubt), (dstepped, again, watched)

    xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns, dlosses)
    dz = {name: leaves for name, leaves in ct.z.items() if name != STATISTICS}
    ds = {name: leaves for name, leaves in ct.z.items() if name == STATISTICS}
    last_norms = _norms(problem, dz)
    owed = decays(rule, later, ones)
    carry = (end, (dz, owed, ds, jax.tree.map(jnp.zeros_like, constant), ct.theta), doubt)
    consts = (constant, inputs.theta, _largest((ct.z, dlosses)), inputs.frozen)
    (start, rest, doubted), (dstepped, seen, watched) = problem.run(body, consts, carry, xs, True, pause)
    dz, owed, ds, dconstant, dtheta = rest
    dh = problem.beside(_joined, dconstant, dstepped, inputs.h)
    if problem.watch in ("norms", "growth"):
        watched["norms"] = jax.tree.map(lambda before, last: jnp.append(before, last), watched["norms"], last_norms)
    return Reversed(start, Cotangents({**decayed(dz, owed), **ds}, dh, dtheta), seen, watched, doubted)


def _watched(problem: Problem, state: Exact, dz: Values, asymmetry: Array | None) -> dict[str, Any]:
    """Of one step: |cotangent| of each link, float64 [], or prints of the state before it; and whether J is symmetric."""
    if not problem.watch:
        return {}
    what = (
        {"norms": _norms(problem, dz)} if problem.watch in ("norms", "growth") else {"states": state_prints(problem, state)}
    )
    return {**what, "asymmetry": asymmetry}


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
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in leaves), jnp.dtype(jnp.float32))
    return jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(dtype) for x in leaves]).max()


def _joined(problem: Problem, dconstant: Hypers, dstepped: Hypers, h: Hypers) -> Hypers:
    """The inverse of `split`: cotangents like h."""
    dh = join_steps(dconstant, dstepped)
    return [{k: d.reshape(hj[k].shape) for k, d in dj.items()} for dj, hj in zip(dh, h, strict=True)]


def _ones(constant: Hypers, stepped: Hypers) -> Hypers:
    """Like the hyperparameters of one step."""
    return join_steps(*jax.tree.map(jnp.ones_like, (constant, jax.tree.map(lambda x: x[0], stepped))))


def _norms(problem: Problem, dz: Values) -> dict[str, Array]:
    """Of every link; of the parameters alone for "growth", since XLA:CPU adds up numbers one after the other."""
    # In float64: the square of an exploding float32 would overflow long before the cotangent does.
    dz = {PARAMS: dz[PARAMS]} if problem.watch == "growth" else dz
    return {name: jnp.sqrt(sum(jnp.sum(x.astype(jnp.float64) ** 2) for x in leaves)) for name, leaves in dz.items()}
