"""One link backwards: its increment taken back exactly, and the cotangents through it.

Invariant: cotangents of a link are those of its values after a step until `undo_link` and `decayed` have made them those of
its values before.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.exact import decode
from hypergrad.loop.step import Exact, Hypers, Rule, Values, composite, increment, increments_at, isolated, retreat
from hypergrad.optimizers.chain import PARAMS, Link


class Cotangents(NamedTuple):
    """Of the links' values, of the hyperparameters, and of theta."""

    z: Values  # without the statistics, if nobody differentiates what they come to
    h: Hypers
    theta: list[Array]  # of the leaves that somebody differentiates


class Pullback(NamedTuple):
    """The cotangents of what the increments of one link read, leaf by leaf."""

    h: Hypers  # in every entry of the leaf where rules are entrywise: `summed` has their sums
    z: list[dict[str, Array]]
    g: list[Array]


def pull(rule: Rule, link: Link, read: list[dict[str, Array]], dz: Values, h: Hypers, g: list[Array] | None) -> Pullback:
    """The vjp of each increment of a link along dz, at what it reads."""
    rows = []
    for j in rule.leaves:
        rest = (read[j], None if g is None else g[j])
        update = increment(link, h[j], *rest)
        entries = {key: jnp.broadcast_to(x, update.shape) for key, x in h[j].items()} if rule.layout.flat else h[j]
        _, vjp = jax.vjp(lambda *a: increment(link, *a), entries, *rest)
        rows.append(vjp(sum_to(dz[link.name][j], update.shape).astype(update.dtype)))
    return Pullback(*(list(column) for column in zip(*rows, strict=True)))


def reads(rule: Rule, link: Link, z: Values, h: Hypers) -> set[str]:
    """The links whose values enter an increment of this one, of whichever leaf: a rule may tell them apart by shape."""
    found = set()
    for j, values in enumerate(rule.readable(z, link)):
        g = jnp.zeros(z[PARAMS][j].shape, rule.dtypes[j])
        program = jax.make_jaxpr(lambda values: increment(link, h[j], values, g))(values).jaxpr  # noqa: B023 (at once)
        used = {id(x) for x in (*program.outvars, *(x for e in program.eqns for x in e.invars))}
        found |= {name for name, x in zip(sorted(values), program.invars, strict=True) if id(x) in used}
    return found


def undo_link(
    rule: Rule, link: Link, t: Array, state: Exact, ct: Cotangents, h: Hypers, turns: Any, g: list[Array] | None
) -> tuple[Exact, Cotangents, list[Array]]:
    """Take back z <- rho z + increment(h, others, g) exactly, and pull the cotangents through it; also that of g.

    That of z itself has yet to decay.
    """
    read = _stored(rule, link, t, state.z, h, g)
    back = pull(rule, link, read, ct.z, h, g)
    state = retreat(rule, link, state, h, turns, increments_at(rule, link, t, read, h, g, composite))
    dz = spread(ct.z, back.z)
    dh = [{k: a[k] + summed(t, b[k], a[k].shape) for k in a} for a, b in zip(ct.h, back.h, strict=True)]
    if link.decay:
        for j in rule.leaves:
            old = decode(state.z[link.name][j], rule.bits(link)[j], rule.dtypes[j])
            dh[j][link.decay] += summed(t, dz[link.name][j] * old, dh[j][link.decay].shape)
    return state, Cotangents(dz, dh, ct.theta), back.g


def decays(rule: Rule, links: Iterable[Link], h: Hypers) -> Values:
    """{link: rho of each leaf}, of those that decay."""
    return {link.name: [h[j][link.decay] for j in rule.leaves] for link in links if link.decay}


def decayed(dz: Values, rho: Values) -> Values:
    """dz_k <- rho_k dz_k, of the links that have a rho here."""
    return {**dz, **{name: [r * x for r, x in zip(rhos, dz[name], strict=True)] for name, rhos in rho.items()}}


def _stored(rule: Rule, link: Link, t: Array, z: Values, h: Hypers, g: list[Array] | None) -> list[dict[str, Array]]:
    """What increments read; behind a branch where `increments_at` asks for one.

    What a branch computes is stored. In the open, XLA would read the integers again for every kernel of the derivative.
    """
    read = rule.readable(z, link)
    if any(composite(rule, link, h[j], read[j], None if g is None else g[j]) for j in rule.leaves):
        return isolated(t, lambda z: rule.readable(z, link), z)
    return read


def summed(t: Array, x: Array, shape: tuple[int, ...]) -> Array:
    """The cotangent of a hyperparameter from that of each entry, which is stored first.

    By a choice that is always the same. XLA:CPU's library for sums would pull in the last product, so that what it is made
    of, the decoded integers among it, is stored instead, and sum that at three to five times the cost.
    """
    return x if x.shape == shape else sum_to(jnp.where(t >= 0, x, 0), shape)


def plus(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), a, b)


def spread(dz: Values, read: list[dict[str, Array]]) -> Values:
    """Add what each leaf's increment passes back to the links that it read."""
    one = lambda name, x, row: x + row[name] if name in row else x  # noqa: E731
    return {name: [one(name, x, row) for x, row in zip(dz[name], read, strict=True)] for name in dz}


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum a cotangent over the axes along which its primal was broadcast."""
    if x.shape == shape:
        return x
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b)
    return x.sum(axis=axes, keepdims=True)
