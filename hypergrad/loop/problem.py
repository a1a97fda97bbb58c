"""A training run as data: what is fixed (`Problem`, hashable) and what flows (`Inputs`, a pytree of arrays).

Invariant: `Problem.batch` is one function of t, and `Problem.gradient` one of (parameters, theta, batch), in every pass.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.batches import HostBatches
from hypergrad.exact import Schedule
from hypergrad.loop import drivers
from hypergrad.loop.step import Exact, Hypers, Rule, Values, isolated, returned, settled, start
from hypergrad.optimizers.chain import Link
from hypergrad.optimizers.expand import link_numerators


class Inputs(NamedTuple):
    """Everything a run computes with."""

    values: Values  # link name -> initial floats, "params" among them, and "statistics" if there are any
    h: Hypers  # per leaf: {name: [steps | 1, ...]}, of the parameters and then of the statistics
    theta: list[Array]  # float leaves
    frozen: list[Any]  # theta's other leaves, and the arrays of `batches`: never differentiated


@dataclasses.dataclass(frozen=True)
class Static:
    """A value compared by identity where it cannot be hashed, so that it can ride in a static argument."""

    value: Any

    def __hash__(self) -> int:
        return hash(self.value) if isinstance(self.value, Hashable) else id(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        same = self.value is other.value
        return same or (isinstance(self.value, Hashable) and bool(self.value == other.value))


class Labels(NamedTuple):
    """Names for errors."""

    places: tuple[str, ...]  # every (link, leaf), statistics last; then the decay of each
    limits: tuple[float, ...]  # of each place: the range of the value, the largest that the decay can be
    frozen: tuple[str, ...]  # paths of `Inputs.frozen`


class Assemble(Protocol):
    """From what flows back to what the user's functions take."""

    def batch(self, frozen: list[Any], t: Array) -> Any: ...

    def arguments(self, w: list[Array], theta: list[Array], frozen: list[Any], batch: Any) -> tuple[Any, Any, Any]: ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a run is compiled for."""

    loss: Callable[..., Any]  # -> scalar, or (scalar, evidence) where there are statistics
    assemble: Assemble
    rule: Rule
    steps: int
    driver: str  # "scan", "host", "host_eager", or "either": the host where values are known, else the scan
    x64: bool  # the caller's setting: the user's functions run under it
    labels: Labels
    words: tuple[int | None, ...]  # per link: buffer words per parameter, where its decay is known beforehand
    throw: bool
    statistics: tuple[Rule, ...] = ()  # how they move, if there are any: one chain of one link, whose "gradient" is evidence
    probed: bool = False  # whether the reverse pass also gives the norms of its cotangents
    source: HostBatches | None = None  # of batches that Python loads, for host drivers
    progress: drivers.Progress | None = None  # told by host drivers how far they are
    shelved: bool = False  # whether spilled words go to host memory

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (self.rule, *self.statistics)

    def parts(self, h: list[Any]) -> tuple[list[Any], list[Any]]:
        """`Inputs.h`, or anything like it, of the parameters and of the statistics."""
        return h[: len(self.rule.leaves)], h[len(self.rule.leaves) :]

    def links(self, h: list[Any]) -> list[tuple[Rule, Link, list[Any]]]:
        """Every link with its rule and its part of `h`, that of the statistics last."""
        return [(rule, link, part) for rule, part in zip(self.rules, self.parts(h), strict=False) for link in rule.chain]

    def isolated(self) -> "Problem":
        """The same run, its gradients compiled apart from what surrounds them."""
        return dataclasses.replace(self, rule=dataclasses.replace(self.rule, isolate=True))

    def apart(self, t: Array, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), `isolated` if gradients are."""
        return isolated(t, function, *args) if self.rule.isolate else function(*args)

    def batch(self, frozen: list[Any], t: Array) -> Any:
        """Step t's batch, bit for bit the same in every pass."""
        rest = []

        def arrays(frozen: list[Any], t: Array) -> Any:
            with jax.enable_x64(self.x64):
                found, others = eqx.partition(self.assemble.batch(frozen, t), eqx.is_array)
            rest.append(others)
            return found

        found = self.apart(t, arrays, frozen, t)
        return eqx.combine(found, rest[-1])

    def value(self, w: list[Array], theta: list[Array], frozen: list[Any], batch: Any) -> tuple[Array, list[Array]]:
        """(loss, evidence for the statistics)."""
        with jax.enable_x64(self.x64):
            value = self.loss(*self.assemble.arguments(w, theta, frozen, batch))
            if not self.statistics:
                return value, []
            value, seen = value
            leaves = zip(jax.tree.leaves(seen), self.statistics[0].dtypes, strict=True)
            return value, [jnp.asarray(x).astype(dtype) for x, dtype in leaves]

    def gradient(
        self, w: list[Array], theta: list[Array], frozen: list[Any], batch: Any
    ) -> tuple[Array, list[Array], list[Array]]:
        """(loss, gradient in w, evidence), the last two bit for bit the same in every pass: if all are used in each."""
        with jax.enable_x64(self.x64):
            (value, seen), g = jax.value_and_grad(self.value, has_aux=True)(w, theta, frozen, batch)
        return value, *settled((g, seen))

    def joined(self, t: Array, leaves: list[Array]) -> list[Array]:
        """What a gradient gave, vector by vector. Behind a branch: XLA would fuse the two, and not alike in all passes."""
        vector, parts = self.rule.layout.vector, self.rule.layout.parts(leaves)
        return [isolated(t, vector, part) if len(part) > 1 else vector(part) for part in parts]

    def run(
        self, body: drivers.Body, consts: Any, carry: Any, xs: Any, reverse: bool = False, pause: drivers.Pause | None = None
    ) -> tuple[Any, Any]:
        """The body over all steps: a function of (consts, carry, x) that closes over nothing but what the problem fixes."""
        if self.driver == "scan":
            return drivers.scan(body, consts, carry, xs, reverse)
        feed, fed = None, 0
        if self.source is not None:
            feed, fed = functools.partial(self.source.leaves, steps=self.steps), len(self.source.like)
        same = dataclasses.replace(self, source=None, progress=None)
        named = drivers.Named(body, (body.__code__, same))
        loop = drivers.host if self.driver == "host" else drivers.host_eager
        between = drivers.Between(feed, fed, pause or drivers.Pause(), self.progress)
        return loop(named, consts, carry, xs, reverse, between)

    def beside(self, function: Callable[..., Any], *args: Any, static: tuple[Any, ...] = ()) -> Any:
        """function(problem, *static, *args), which calls no function of the user: one program where Python runs the loop."""
        if self.driver != "host":
            return function(self, *static, *args)
        shell = dataclasses.replace(self, loss=None, assemble=None, source=None, progress=None)  # type: ignore[arg-type]
        return _beside(function, shell, static, *args)

    def maybe_jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Jit what the driver leaves in Python, so that both directions run the same programs."""
        return eqx.filter_jit(function) if self.driver == "host_eager" else function


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _beside(function: Callable[..., Any], problem: Problem, static: tuple[Any, ...], *args: Any) -> Any:
    return function(problem, *static, *args)


def schedules(problem: Problem, h: Hypers) -> dict[str, list[Schedule]]:
    """When each buffer spills: per decaying link, per leaf."""
    result = {}
    for rule, link, part in problem.links(h):
        if link.decay:
            result[link.name] = [
                keep.schedule(link_numerators(link, hj, problem.steps), link.denominator)
                for keep, hj in zip(rule.kept(link), part, strict=True)
            ]
    return result


def begun(problem: Problem, values: Values, words: dict[str, int | None]) -> Exact:
    """The state of parameters, accumulators and statistics that holds these floats and has lost nothing yet."""
    z, buffers = zip(*(start(rule, values, words) for rule in problem.rules), strict=True)
    return Exact(functools.reduce(operator.or_, z), functools.reduce(operator.or_, buffers))


def intact(problem: Problem, values: Values, end: Exact) -> Array:
    """Per place, whether `end` is exactly the state that `begun` makes: bool [places]. The certificate."""
    return jnp.concatenate([returned(rule, values, end).reshape(-1) for rule in problem.rules])


def turns_of(plan: dict[str, list[Schedule]]) -> dict[str, list[Any]]:
    return {name: [s.turns for s in leaves] for name, leaves in plan.items()}


def split_steps(h: Hypers, steps: int) -> tuple[Hypers, Hypers]:
    """(constant, per step): the step axis dropped from the first, scanned over in the second; scalars squeezed."""
    constant = [{k: _squeezed(x[0]) for k, x in hj.items() if x.shape[0] != steps} for hj in h]
    stepped = [{k: jax.vmap(_squeezed)(x) for k, x in hj.items() if x.shape[0] == steps} for hj in h]
    return constant, stepped


def split(problem: Problem, h: Hypers) -> tuple[Hypers, Hypers]:
    """`split_steps`, for `Problem.beside`."""
    return split_steps(h, problem.steps)


def join_steps(constant: Hypers, stepped: Hypers) -> Hypers:
    return [{**c, **s} for c, s in zip(constant, stepped, strict=True)]


def _squeezed(x: Array) -> Array:
    return x.reshape(()) if x.size == 1 else x
