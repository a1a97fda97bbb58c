"""A training run as data: what is fixed (`Problem`, hashable) and what flows (`Inputs`, a pytree of arrays).

Invariant: `Problem.batch` is one function of t, and `Problem.gradient` one of (parameters, theta, batch), in every pass.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad import _programs as programs
from hypergrad.batches import HostBatches
from hypergrad.exact import Schedule
from hypergrad.loop import drivers
from hypergrad.loop.functions import Frozen, Functions
from hypergrad.loop.pieces import alone
from hypergrad.loop.step import Exact, Hypers, Rule, Values, isolated, returned, settled, start
from hypergrad.optimizers.chain import Link
from hypergrad.optimizers.expand import link_numerators


class Inputs(NamedTuple):
    """Everything a run computes with."""

    values: Values  # link name -> initial floats, "params" among them, and "statistics" if there are any
    h: Hypers  # per leaf: {name: [steps | 1, ...]}, of the parameters and then of the statistics
    theta: list[Array]  # float leaves, and what the loss reads from outside and somebody may differentiate
    frozen: Frozen  # all other arrays: never differentiated


class Labels(NamedTuple):
    """Names for errors."""

    places: tuple[str, ...]  # every (link, leaf), statistics last; then the decay of each
    limits: tuple[float, ...]  # of each place: the range of the value, the largest that the decay can be
    frozen: tuple[str, ...]  # of the leaves of `Inputs.frozen`


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a run is compiled for."""

    functions: Functions
    rule: Rule
    steps: int
    driver: str  # "scan", "host", "host_eager", or "either": the host where values are known, else the scan
    x64: bool  # the caller's setting: the user's functions run under it
    labels: Labels
    words: tuple[int | None, ...]  # per link: buffer words per parameter, where its decay is known beforehand
    throw: bool
    statistics: tuple[Rule, ...] = ()  # how they move, if there are any: one chain of one link, whose "gradient" is evidence
    watch: str = ""  # what else the reverse pass gives of each step: "norms" of its cotangents, "growth", "states"
    source: HostBatches | None = None  # of batches that Python loads, for host drivers
    progress: drivers.Progress | None = None  # told by host drivers how far they are
    shelved: bool = False  # whether spilled words go to host memory
    retries: bool = False  # whether a reverse pass that fails is tried again with gradients apart

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
        """The same run, its gradients compiled apart from their derivatives on the way back too."""
        return dataclasses.replace(self, rule=dataclasses.replace(self.rule, isolate=True))

    def bare(self) -> "Problem":
        """An equal one that keeps nothing of the user's, to be found by."""
        return dataclasses.replace(self, functions=programs.bare(self.functions), source=None, progress=None)

    def batch(self, frozen: Frozen, t: Array, apart: bool = True) -> list[Any]:
        """The arrays of step t's batch, bit for bit the same in every pass."""

        def arrays(frozen: Frozen, t: Array) -> list[Any]:
            with jax.enable_x64(self.x64):
                return self.functions.batch_at(frozen, t)

        return isolated(t, arrays, frozen, t) if apart else arrays(frozen, t)

    def value(self, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any]) -> tuple[Array, list[Array]]:
        """(loss, evidence for the statistics)."""
        with jax.enable_x64(self.x64):
            value, *seen = self.functions.loss_at(w, theta, frozen, batch)
            dtypes = self.statistics[0].dtypes if self.statistics else ()
            return value, [jnp.asarray(x).astype(dtype) for x, dtype in zip(seen, dtypes, strict=True)]

    def gradient(
        self, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any]
    ) -> tuple[Array, list[Array], list[Array]]:
        """(loss, gradient in w, evidence), the last two bit for bit the same in every pass: if all are used in each."""
        with jax.enable_x64(self.x64):
            (value, seen), g = jax.value_and_grad(self.value, has_aux=True)(w, theta, frozen, batch)
        return value, *settled((g, seen))

    def gradient_apart(
        self, gradient: Callable[..., Any], t: Array, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any]
    ) -> tuple[Array, list[Array], list[Array]]:
        """(loss, `joined` gradient, evidence) as training computes them: compiled apart from what surrounds them."""
        apart = alone(gradient) if self.driver == "host" else functools.partial(isolated, t, gradient)
        value, g, seen = apart(w, theta, frozen, batch)
        return value, self.joined(t, g), seen

    def joined(self, t: Array, leaves: list[Array]) -> list[Array]:
        """What a gradient gave, vector by vector, in the accumulators' dtypes. Behind a branch: XLA would fuse the two, and
        not alike in all passes."""
        vector, parts = self.rule.layout.vector, self.rule.layout.parts(leaves)
        vectors = [isolated(t, vector, part) if len(part) > 1 else vector(part) for part in parts]
        return [x.astype(dtype) for x, dtype in zip(vectors, self.rule.dtypes, strict=True)]

    def run(
        self, body: drivers.Body, consts: Any, carry: Any, xs: Any, reverse: bool = False, pause: drivers.Pause | None = None
    ) -> tuple[Any, Any]:
        """The body over all steps: a function of (consts, carry, x) that closes over nothing but what the problem fixes."""
        if self.driver == "scan":
            return drivers.scan(body, consts, carry, xs, reverse)
        feed, fed = None, 0
        if self.source is not None:
            feed, fed = functools.partial(self.source.leaves, steps=self.steps), len(self.source.like)
        between = drivers.Between(feed, fed, pause or drivers.Pause(), self.progress)
        if self.driver == "host":
            return drivers.host(body, (body.__code__, self.bare()), consts, carry, xs, reverse, between)
        return drivers.host_eager(body, consts, carry, xs, reverse, between)

    def beside(self, function: Callable[..., Any], *args: Any, static: tuple[Any, ...] = ()) -> Any:
        """function(problem, *static, *args), which calls no function of the user: one program where Python runs the loop."""
        if self.driver != "host":
            return function(self, *static, *args)
        shell = dataclasses.replace(self, functions=None, source=None, progress=None)  # type: ignore[arg-type]
        return programs.call(function, (shell, *static), *args)

    def maybe_jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Jit what the driver leaves in Python, so that both directions run the same programs."""
        return eqx.filter_jit(function) if self.driver == "host_eager" else function


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


def one_of(h: Hypers, steps: int) -> tuple[Hypers, Hypers]:
    """`split_steps` at the first step."""
    constant, stepped = split_steps(h, steps)
    return constant, jax.tree.map(lambda x: x[0], stepped)


def split(problem: Problem, h: Hypers) -> tuple[Hypers, Hypers]:
    """`split_steps`, for `Problem.beside`."""
    return split_steps(h, problem.steps)


def join_steps(constant: Hypers, stepped: Hypers) -> Hypers:
    return [{**c, **s} for c, s in zip(constant, stepped, strict=True)]


def _squeezed(x: Array) -> Array:
    return x.reshape(()) if x.size == 1 else x
