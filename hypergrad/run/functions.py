"""The user's functions as the programs that they trace to, when training is entered and under the user's settings.

Invariant: nothing of a function itself decides anything later. Two that compute the same are the same here; one that reads
something else today than yesterday, or has another derivative rule, is another.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
from jax import Array

from hypergrad._programs import Program
from hypergrad.run.reads import StepTheta


class Frozen(NamedTuple):
    """What flows through a run and is never differentiated."""

    theta: list[Any]  # theta's leaves that are not float
    loss: list[Any]  # what the loss closes over
    signals: list[Any]  # what the functions of an optimizer's signals close over
    metrics: list[Any]  # what the metric closes over
    batch: list[Any]  # what the function of batches closes over
    batches: list[Any]  # its leaves: last, as a host driver takes them in anew at every step


class Rules(NamedTuple):
    """What derivative rules of the user's own compute, to the second order."""

    program: Hashable
    held: tuple[Hashable, ...]  # the arrays that they close over
    axes: bool  # whether they speak of an axis that a `jax.vmap` around the run has named


@dataclasses.dataclass(frozen=True)
class Signals:
    """What an optimizer's links see beside the gradient."""

    names: tuple[str, ...]
    program: Program  # (w, theta, theta's other leaves, batch, key) -> {name: [leaf like w]}
    captured: tuple[int | None, ...]  # of each constant: its place among the loss's that are in theta; None: it is frozen

    def bare(self) -> "Signals":
        return dataclasses.replace(self, program=self.program.bare())


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What is measured of each step, at the values before it."""

    # ([{link: values} of each block of the parameters], theta and hyperparameters, theta's other leaves, batch) -> scalars
    program: Program
    captured: tuple[int | None, ...]  # as in `Signals`
    hypers: int  # how many leaves at the end of theta are the optimizer's
    rules: Rules | None  # as in `Functions`

    def bare(self) -> "Metrics":
        return dataclasses.replace(self, program=self.program.bare())


@dataclasses.dataclass(frozen=True)
class Functions:
    """What a step asks of the user."""

    batch: Program  # (batches, t) -> the arrays of a batch
    loss: Program  # (w, theta, theta's other leaves, batch) -> [loss, *batch statistics]
    traced: tuple[bool, ...]  # of each constant of the loss: whether it is float and was traced; such a one is among theta
    theta: StepTheta
    rules: Rules | None  # what the loss's own derivative rules compute; None: it has none
    symmetric: bool  # whether the gradient's Jacobian is, for certain
    narrow: bool  # whether the loss computes in floats of fewer exponents than float32
    sure: bool  # whether batches are functions of t for certain: no Python runs in them
    collective: bool  # whether they speak of an axis that a `jax.vmap` around the run has named
    signals: Signals | None = None
    metrics: Metrics | None = None

    def batch_at(self, frozen: Frozen, t: Array) -> list[Any]:
        return self.batch(frozen.batch, frozen.batches, t)

    def indices_at(self, captured: list[Array], frozen: Frozen, batch: list[Any]) -> list[list[Array]]:
        """Of each read of theta."""
        if self.theta.indices is None:
            return []
        found = iter(self.theta.indices(self._constants(captured, frozen), frozen.theta, batch))
        return [[next(found) for _ in range(read.indices)] for read in self.theta.reads]

    def loss_at(self, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any]) -> list[Array]:
        """[loss, *batch statistics]. theta: as `StepTheta.seen` gives it."""
        given, captured, _ = self._split(theta)
        return jax.tree.leaves(self.loss(self._constants(captured, frozen), w, given, frozen.theta, batch))

    def _constants(self, captured: list[Array], frozen: Frozen) -> list[Any]:
        """Of the loss."""
        others, from_theta = iter(frozen.loss), iter(captured)
        return [next(from_theta if traced else others) for traced in self.traced]

    def signals_at(
        self, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any], key: Array
    ) -> dict[str, list[Array]]:
        """{name: [like w]}."""
        assert self.signals is not None
        given, captured, _ = self._split(theta)
        constants = _constants(self.signals.captured, captured, frozen.signals)
        return self.signals.program(constants, w, given, frozen.theta, batch, key)

    def metrics_at(self, values: list[Any], theta: list[Array], frozen: Frozen, batch: list[Any]) -> list[Array]:
        """Scalars. values: of each block of the parameters, link by link."""
        assert self.metrics is not None
        given, captured, hypers = self._split(theta)
        constants = _constants(self.metrics.captured, captured, frozen.metrics)
        return jax.tree.leaves(self.metrics.program(constants, values, [*given, *hypers], frozen.theta, batch))

    def _split(self, theta: list[Array]) -> tuple[list[Array], list[Array], list[Array]]:
        """theta as it was given, what the loss captured, and the leaves of the optimizer that a metric reads."""
        end = len(theta) - (self.metrics.hypers if self.metrics else 0)
        given = end - sum(self.traced)
        return theta[:given], theta[given:end], theta[end:]

    def bare(self) -> "Functions":
        """An equal one without the programs themselves, to be found by."""
        signals = None if self.signals is None else self.signals.bare()
        metrics = None if self.metrics is None else self.metrics.bare()
        batch, loss, theta = self.batch.bare(), self.loss.bare(), self.theta.bare()
        return dataclasses.replace(self, batch=batch, loss=loss, theta=theta, signals=signals, metrics=metrics)


def _constants(places: tuple[int | None, ...], captured: list[Array], others: list[Any]) -> list[Any]:
    """Of a program: those that are the loss's and among theta, and the others."""
    rest = iter(others)
    return [next(rest) if place is None else captured[place] for place in places]
