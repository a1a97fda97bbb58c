"""Losses of the zoo, trained as one: the sum of theirs. And the same by SGD as one writes it."""

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import hypergrad as hg
from experiments._judge import Case


sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "adversarial"))  # the tests' own, and no package

import zoo  # noqa: E402


STEPS = 10
MOMENTUM = 0.9
PARTS = 2  # batches that are one batch where it is cut into as many


class Trained(NamedTuple):
    """What a problem's value may read of `hg.Trained`."""

    params: Any
    statistics: Any


class Together:
    """Some problems trained as one: the sum of their losses. A case for each rule."""

    def __init__(self, entries: Sequence[zoo.Entry], dtype: Any) -> None:
        self.problems = {entry.name: entry.make(dtype) for entry in entries}
        each = lambda field: {name: getattr(p, field) for name, p in self.problems.items()}  # noqa: E731
        self.theta, self.static = eqx.partition(each("theta"), eqx.is_inexact_array)
        self.params, self.data = each("params"), each("data")
        kept = {name: p.statistics for name, p in self.problems.items() if p.statistics is not None}
        decays, values = ({name: getattr(s, field) for name, s in kept.items()} for field in ("decay", "values"))
        self.statistics = hg.Statistics(values, decays) if kept else None
        self.dtype = dtype

    def loss(self, params: Any, theta: Any, batch: Any) -> Any:
        theta, total, evidence = eqx.combine(theta, self.static), jnp.zeros((), self.dtype), {}
        for name, problem in self.problems.items():
            found = problem.loss(params[name], theta[name], batch[name])
            if problem.statistics is not None:
                found, evidence[name] = found
            total = total + found.astype(self.dtype)
        return (total, evidence) if evidence else total

    def mean(self, params: Any, theta: Any, batches: Any) -> Any:
        """Of the losses of some batches, along a leading axis."""
        count = jax.tree.leaves(batches)[0].shape[0]
        each = [self.loss(params, theta, jax.tree.map(lambda x: x[i], batches)) for i in range(count)]  # noqa: B023
        return jax.tree.map(lambda *xs: sum(xs) / count, *each)

    def value(self, params: Any, statistics: Any) -> jax.Array:
        """What the runs come to: the sum of what each problem makes of its own."""
        total = jnp.zeros((), self.dtype)
        for name, problem in self.problems.items():
            own = Trained(params[name], (statistics or {}).get(name))
            total = total + (problem.value or (lambda run: zoo.probe(run.params)))(own).astype(self.dtype)
        return total

    def rates(self, factor: jax.Array) -> Any:
        return {name: factor * problem.rate for name, problem in self.problems.items()}

    def batches(self, key: Any, steps: int) -> Any:
        order = jax.random.permutation(key, steps) % zoo.DISTINCT
        return hg.stacked(jax.tree.map(lambda x: x[order], self.data))

    def several(self, key: Any, steps: int) -> Any:
        """`PARTS` batches at each step."""
        first = jax.random.permutation(key, steps)
        order = jnp.stack([(first + i) % zoo.DISTINCT for i in range(PARTS)], axis=1)
        return hg.stacked(jax.tree.map(lambda x: x[order], self.data))

    def case(
        self, rule: Callable[[Any], Any], steps: int = STEPS, varied: tuple[str, ...] = ("key",), cut: bool = False
    ) -> Case:
        """cut: into microbatches, each of which is one of the batches."""
        loss, batches, parts = (self.mean, self.several, PARTS) if cut else (self.loss, self.batches, None)

        def value(h: Any, key: Any, adjoint: Any) -> jax.Array:
            run = hg.train(
                loss, h["params"], rule(self.rates(h["rate"])), batches(key, steps), theta=h["theta"],
                statistics=self.statistics, microbatches=parts, adjoint=adjoint,
            )  # fmt: skip
            return self.value(run.params, run.statistics)

        h = {"params": self.params, "theta": self.theta, "rate": jnp.ones((), self.dtype)}
        return Case(value, h, jax.random.key(7), varied)

    def plainly(self, steps: int = STEPS) -> Callable[[Any, Any], jax.Array]:
        """(h, key) -> value, by SGD as one writes it: floats, `lax.scan`, and no part of the library but its batches."""
        kept = round(MOMENTUM * 2**16) / 2**16

        def value(h: Any, key: Any) -> jax.Array:
            batches, rates = self.batches(key, steps), self.rates(h["rate"])
            found = jax.value_and_grad(self.loss, has_aux=self.statistics is not None)

            def step(carry: Any, t: jax.Array) -> Any:
                w, v, s = carry
                value, g = found(w, h["theta"], batches(t))
                v = jax.tree.map(lambda v, g: kept * v - (1 - kept) * g, v, g)
                w = {name: jax.tree.map(lambda w, v, a=a: w + a * v, w[name], v[name]) for name, a in rates.items()}
                if self.statistics is not None:
                    r = {name: round(decay * 2**16) / 2**16 for name, decay in self.statistics.decay.items()}
                    follow = lambda r: lambda s, e: r * s + (1 - r) * e  # noqa: E731
                    s = {name: jax.tree.map(follow(r[name]), s[name], value[1][name]) for name in r}
                return (w, v, s), None

            means = None if self.statistics is None else self.statistics.values
            start = (h["params"], jax.tree.map(jnp.zeros_like, h["params"]), means)
            (w, _, s), _ = jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))
            return self.value(w, s)

        return value


def groups(size: int = 5) -> list[list[zoo.Entry]]:
    """The zoo in few programs: those to be alone, then the others in their order, own rules and 16 bits apart."""
    known = list(zoo.entries().values())
    alone = [[entry] for entry in known if entry.alone]
    kinds: dict[Any, list[zoo.Entry]] = {}
    for entry in known:
        if not entry.alone:
            kinds.setdefault((entry.own_rule, entry.tolerance > 1e-9), []).append(entry)
    return alone + [kind[i : i + size] for kind in kinds.values() for i in range(0, len(kind), size)]
