"""One training step on the grid, and its exact inverse.

Invariant: `unstep(step(state, g), g) == state`, bit for bit, where both directions compute the same g at the old parameters.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr

from hypergrad import _programs as programs
from hypergrad.exact import (
    Deferral,
    InformationBuffer,
    Value,
    add,
    all_of,
    behind_branch,
    decode,
    numerator,
    same,
    subtract,
    unseen,
    widen,
)
from hypergrad.loop import arithmetic
from hypergrad.optimizers.chain import PARAMS, Link, View
from hypergrad.optimizers.layout import Layout
from hypergrad.optimizers.transform import Transform


Hypers = list[dict[str, Array]]  # one dict per parameter leaf: what increments read as `h`
Values = dict[str, list[Any]]  # link name -> per parameter leaf, floats or grid values
Turns = dict[str, list[Any]]  # decaying link -> what each leaf's buffer must know at this step


class Exact(NamedTuple):
    """The state of training, all of it: integers and what their decays have lost."""

    z: Values  # int64, or `Wide`
    buffers: dict[str, list[Any]]  # of the links that decay


@dataclasses.dataclass(frozen=True)
class Rule:
    """What `step` needs to know of the optimizer and the parameters; hashable."""

    chain: tuple[Link, ...]
    fraction_bits: tuple[tuple[int, ...], ...]  # per link, per leaf
    dtypes: tuple[np.dtype, ...]  # of accumulators and updates, per leaf
    param_dtypes: tuple[np.dtype, ...]
    buffers: tuple[tuple[InformationBuffer | None, ...], ...]  # per link, per leaf: what its decay loses goes there
    linear: bool  # as `Optimizer.linear`; if not, floats are computed `isolated`
    isolate: bool  # whether the gradient of the loss is; always, if not linear
    layout: Layout  # which parameter leaves are one "leaf" here
    transforms: tuple[Transform, ...] = ()  # what the gradient passes before the chain sees it
    programs: Hashable = None  # what the functions of a rule that is not the library's compute today
    collective: bool = False  # whether they speak of an axis that a `jax.vmap` around the run has named

    def bits(self, link: Link) -> tuple[int, ...]:
        return self.fraction_bits[self.chain.index(link)]

    def kept(self, link: Link) -> tuple[Any, ...]:
        return self.buffers[self.chain.index(link)]

    @property
    def double(self) -> bool:
        """Whether increments are computed in the grid's own precision."""
        return any(dtype == np.float64 for dtype in self.dtypes)

    @property
    def leaves(self) -> range:
        return range(len(self.dtypes))

    def floats(self, z: Values, link: Link) -> list[Array]:
        """A link's values as increments compute with them."""
        return [decode(*args) for args in zip(z[link.name], self.bits(link), self.dtypes, strict=True)]

    def decoded(self, z: Values, link: Link) -> list[Array]:
        """A link's values as the world sees them: the parameters in their own dtypes."""
        dtypes = self.param_dtypes if link.name == PARAMS else self.dtypes
        return [decode(*args) for args in zip(z[link.name], self.bits(link), dtypes, strict=True)]

    def readable(self, z: Values, link: Link) -> list[dict[str, Array]]:
        """What a link's increments may read: every other link, as floats."""
        floats = {other.name: self.floats(z, other) for other in self.chain if other is not link}
        return [{name: leaves[j] for name, leaves in floats.items()} for j in self.leaves]


def increment(link: Link, h: dict[str, Array], z: dict[str, Array], g: Array | None) -> Array:
    """A link's increment for one leaf: a pure function of floats, differentiated by every adjoint."""
    args = (View(h, link.name), View(z, link.name))
    return link.increment(*args) if link.name == PARAMS else link.increment(*args, g)


Gradient = Callable[[list[Array]], list[Array]]
Apart = Callable[..., bool]  # (rule, link, h, what is read, gradient or None) -> whether the increment is `isolated`


def step(rule: Rule, t: Array, state: Exact, h: Hypers, turns: Turns, g: list[Array]) -> Exact:
    """z_k <- rho_k z_k + increment_k for k = 1..K."""
    g = evidence(rule, t, h, rule.floats(state.z, rule.chain[-1]), g)
    for link in rule.chain:
        state = advance(rule, link, t, state, h, turns, increments(rule, link, t, state.z, h, g))
    return state


def unstep(rule: Rule, t: Array, state: Exact, h: Hypers, turns: Turns, gradient: Gradient) -> Exact:
    """The inverse of `step`: its links in reverse order, the gradient recomputed once the parameters are back."""
    *others, params = rule.chain
    state = retreat(rule, params, state, h, turns, increments(rule, params, t, state.z, h, None))
    g = evidence(rule, t, h, rule.floats(state.z, params), gradient(parameters(rule, t, state.z)))
    for link in reversed(others):
        state = retreat(rule, link, state, h, turns, increments(rule, link, t, state.z, h, g))
    return state


def follow(rules: tuple[Rule, ...], t: Array, state: Exact, h: Hypers, turns: Turns, seen: list[Array]) -> Exact:
    """s <- rho s + (1 - rho) e of the statistics, if there are any; beside `step`, with the evidence at its gradient."""
    for rule in rules:
        (link,) = rule.chain
        state = advance(rule, link, t, state, h, turns, increments(rule, link, t, state.z, h, seen))
    return state


def unfollow(rules: tuple[Rule, ...], t: Array, state: Exact, h: Hypers, turns: Turns, seen: list[Array]) -> Exact:
    """The inverse of `follow`."""
    for rule in rules:
        (link,) = rule.chain
        state = retreat(rule, link, state, h, turns, increments(rule, link, t, state.z, h, seen))
    return state


def transformed(rule: Rule, h: Hypers, w: list[Array], g: list[Array]) -> list[Array]:
    """The gradient as the chain sees it: a pure function of floats, differentiated by every adjoint."""
    g = [x.astype(dtype) for x, dtype in zip(g, rule.dtypes, strict=True)]
    for transform in rule.transforms:
        g = transform(h, w, g)
    return g


def evidence(rule: Rule, t: Array, h: Hypers, w: list[Array], g: list[Array]) -> list[Array]:
    """`transformed`, with the same bits in every pass; w in the accumulators' dtypes."""
    if not rule.transforms:
        return g
    return isolated(t, functools.partial(transformed, rule), h, w, g)


def increments(rule: Rule, link: Link, t: Array, z: Values, h: Hypers, g: list[Array] | None) -> list[Array]:
    """A link's increments, leaf by leaf, at the present values: the same bits in every pass."""
    return increments_at(rule, link, t, rule.readable(z, link), h, g, ambiguous)


def increments_at(
    rule: Rule, link: Link, t: Array, read: list[dict[str, Array]], h: Hypers, g: list[Array] | None, apart: Apart
) -> list[Array]:
    """`increments` at what `Rule.readable` gives, `isolated` where `apart` asks for it."""
    one = functools.partial(increment, link)
    leaves = zip(h, read, [None] * len(read) if g is None else g, strict=True)
    return [isolated(t, one, *args) if apart(rule, link, *args) else one(*args) for args in leaves]


def ambiguous(rule: Rule, link: Link, *args: Any) -> bool:
    """Whether the bits of an increment may depend on what is compiled with it: on what it reads, too.

    Other links' values are products with a unit (`decode`), and so may be a gradient that no branch stores. Hyperparameters
    are stored by the loop. In float64 all are ambiguous: no rounding to float32 stands between an increment and the unit of
    its link, and XLA multiplies the constants of a product among themselves, where one program knows them and the other not.
    """
    if rule.double:
        return True
    program, counts = _program(link, *args)
    products = {1, 2} if rule.linear and not rule.isolate else {1}
    return arithmetic.ambiguous(program, [which in products for which, count in enumerate(counts) for _ in range(count)])


def composite(rule: Rule, link: Link, *args: Any) -> bool:
    """Whether an increment is more than products: its derivative reads what it reads again, and it may run beside it.

    One that is `ambiguous` is `isolated` in both directions.
    """
    return ambiguous(rule, link, *args) or (not rule.linear and not arithmetic.only_products(_program(link, *args)[0]))


def _program(link: Link, *args: Any) -> tuple[Jaxpr, list[int]]:
    """An increment as it is traced, and how many of its inputs are of each argument."""
    arrays, rest = eqx.partition(args, eqx.is_array)
    traced = jax.make_jaxpr(lambda a: increment(link, *eqx.combine(a, rest)))(jax.eval_shape(lambda a: a, arrays))
    return traced.jaxpr, [len(jax.tree.leaves(x)) for x in arrays]


def isolated(t: Array, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), compiled apart from what surrounds it.

    That the branch is always taken, XLA does not see; and t is the same for all elements of a batch. Where Python runs the
    steps operation by operation it is a program of its own.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((t, args))):
        return behind_branch(t >= 0, function, *args)
    return programs.apart(function, *args)


def advance(rule: Rule, link: Link, t: Array, state: Exact, h: Hypers, turns: Turns, updates: list[Array]) -> Exact:
    """z <- rho z + update, for every leaf of one link."""
    z, buffers = list(state.z[link.name]), list(state.buffers.get(link.name, ()))
    for j in rule.leaves:
        if link.decay:
            n, turn = _numerator(link, h[j], turns[link.name][j]), turns[link.name][j]
            buffers[j], z[j] = rule.kept(link)[j].multiply_by(buffers[j], z[j], n, link.denominator, turn)
        z[j] = add(z[j], updates[j], rule.bits(link)[j], t, state.z[link.name][j])
    return _replaced(state, link, z, buffers)


def retreat(rule: Rule, link: Link, state: Exact, h: Hypers, turns: Turns, updates: list[Array]) -> Exact:
    """The inverse of `advance`: its lines in reverse order."""
    z, buffers = list(state.z[link.name]), list(state.buffers.get(link.name, ()))
    for j in rule.leaves:
        z[j] = subtract(z[j], updates[j], rule.bits(link)[j])
        if link.decay:
            n, turn = _numerator(link, h[j], turns[link.name][j]), turns[link.name][j]
            buffers[j], z[j] = rule.kept(link)[j].divide_by(buffers[j], z[j], n, link.denominator, turn)
    return _replaced(state, link, z, buffers)


def start(rule: Rule, values: Values, capacity: dict[str, int | None]) -> Exact:
    """The state that holds these floats and has lost nothing yet."""
    z = {link.name: _apart(link, functools.partial(_on_grid, rule, link), values[link.name]) for link in rule.chain}
    buffers = {
        link.name: [keep.empty(x.shape, capacity[link.name]) for keep, x in zip(rule.kept(link), z[link.name], strict=True)]
        for link in rule.chain
        if link.decay
    }
    return Exact(z, buffers)


def returned(rule: Rule, values: Values, end: Exact) -> Array:
    """Per link and leaf, whether `end` is exactly the state that `start` makes: bool [links, leaves]. The certificate.

    Leaves of one vector share a flag, so the first of them is named; `check_reversal` finds the one.
    """

    def same_start(link: Link, values: list[Array], z: list[Value]) -> list[Array]:
        return [all_of(same(x, y)) for x, y in zip(_on_grid(rule, link, values), z, strict=True)]

    rows = []
    for link in rule.chain:
        back = _apart(link, functools.partial(same_start, link), values[link.name], end.z[link.name])
        if link.decay:
            buffers = zip(rule.kept(link), end.buffers[link.name], strict=True)
            back = [s & all_of(keep.is_empty(b)) for s, (keep, b) in zip(back, buffers, strict=True)]
        rows.append(jnp.stack(rule.layout.spread(back)))
    return jnp.stack(rows)


def _apart(link: Link, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args); of parameters behind a branch, so that what they begin with is computed before, and once.

    In the open, XLA computes what is cheap again for each kernel that reads it. Parameters that a program draws had other
    bits in the certificate than in training: the polynomial of a normal distribution was part of both kernels.
    """
    return behind_branch(unseen(), function, *args) if link.name == PARAMS else function(*args)


def _on_grid(rule: Rule, link: Link, values: list[Array]) -> list[Value]:
    # `add` to zero, not `encode`: it records what no grid value can represent.
    zero = lambda x: widen(jnp.zeros(x.shape, jnp.int64)) if link.wide else jnp.zeros(x.shape, jnp.int64)  # noqa: E731
    held = [keep.hold if keep else lambda z: z for keep in rule.kept(link)]
    return [add(hold(zero(x)), x, b) for hold, x, b in zip(held, values, rule.bits(link), strict=True)]


def _numerator(link: Link, h: dict[str, Array], turn: Any) -> Array | None:
    """Of each weight's own decay; one that waits has all that it needs in its turn."""
    return None if isinstance(turn, Deferral) else numerator(h[link.decay], link.denominator)  # type: ignore[index]


def _replaced(state: Exact, link: Link, z: list[Array], buffers: list[Any]) -> Exact:
    kept = {**state.buffers, link.name: buffers} if link.decay else state.buffers
    return Exact({**state.z, link.name: z}, kept)


def parameters(rule: Rule, t: Array, z: Values) -> list[Array]:
    """What the loss takes, leaf by leaf. Behind a branch, so that it is stored.

    In the open, XLA:CPU would decode a bias again for each row that it is added to, and its library for sums would pull the
    decoding in, its constant as an array.
    """
    return isolated(t, lambda z: rule.layout.split(rule.decoded(z, rule.chain[-1])), z)


def settled(values: Any) -> Any:
    """A barrier around the user's gradient. XLA:CPU drops it before it fuses: what must be stored, or keep its bits, stands
    behind a branch."""
    return jax.lax.optimization_barrier(values)
