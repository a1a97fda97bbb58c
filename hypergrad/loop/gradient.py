"""The gradient of the loss at one step, and its derivative along a direction.

Invariant: where gradients are isolated, every pass computes the same behind its branch: the gradient, and the products that
its derivative reads again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.loop.problem import Problem
from hypergrad.loop.step import isolated, settled


class Tangent(eqx.Module):
    """(directions of the parameters, of `push`) -> the derivative of the gradients in w and in theta along them."""

    jaxpr: Any = eqx.field(static=True)
    kept: list[Array]  # what was computed with the gradient

    def __call__(self, u: list[Array], push: list[Array]) -> tuple[list[Array], list[Array]]:
        rest = self.jaxpr.invars[len(u) :]
        push = push or [jnp.zeros(x.aval.shape, x.aval.dtype) for x in rest]
        both = jax.core.eval_jaxpr(self.jaxpr, self.kept, *u, *push)
        return both[: len(u)], both[len(u) :]

    def glimpse(self, dtype: Any) -> Array:
        """A number that all of `kept` enter."""
        firsts = [x.reshape(-1)[0].astype(dtype) for x in self.kept if x.size and eqx.is_inexact_array(x)]
        return jnp.asarray(sum(firsts), dtype)


class Found(NamedTuple):
    """What a pass knows once it has a step's parameters."""

    value: Array  # the loss
    g: list[Array]  # its gradient, leaf by leaf
    seen: list[Array]  # evidence for the statistics
    tangent: Any = None  # `Tangent`, where gradients are isolated


@dataclasses.dataclass(frozen=True)
class Gradient:
    """(w, theta, frozen, batch) -> `Found`; compared by value, so that all passes find the same program again."""

    problem: Problem

    def __call__(self, *args: Any) -> Found:
        return _linearized(self.problem, *args) if self.problem.rule.isolate else Found(*self.problem.gradient(*args))


def gradient_of(problem: Problem) -> Callable[..., Found]:
    """For `found`."""
    return problem.maybe_jit(Gradient(problem))


def found(problem: Problem, t: Array, gradient: Callable[..., Found], *args: Any) -> Found:
    """`gradient_of(problem)` at these arguments, `isolated` if gradients are."""
    if not problem.rule.isolate:
        return gradient(*args)
    here = isolated(t, gradient, *args)
    # On the way out nothing reads what is kept, and XLA would drop it there, and fuse the rest in another way.
    return here._replace(value=jnp.where(t >= 0, here.value, here.tangent.glimpse(here.value.dtype)))


def _linearized(problem: Problem, w: list[Array], theta: list[Array], frozen: list[Any], batch: Any) -> Found:
    """The gradient, and the derivative that follows, which reads again what products came to and computes the rest anew."""
    with jax.enable_x64(problem.x64):
        first = first_order(problem)
        like = jax.eval_shape(problem.value, w, theta, frozen, batch)[1] if problem.statistics else []
        none = [jnp.zeros(x.shape, x.dtype) for x in like]

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
        def move(w: list[Array], push: list[Array]) -> Any:
            return first(w, push, theta, frozen, batch)

        (g, _), tangent, (value, seen) = jax.linearize(move, w, none, has_aux=True)
        closed = jax.make_jaxpr(tangent)(w, none)
        g, seen = settled((g, seen))
    return Found(value, g, seen, Tangent(closed.jaxpr, list(map(jnp.asarray, closed.consts))))


def first_order(problem: Problem) -> Callable[..., tuple[Any, Any]]:
    """(w, push, theta, frozen, batch) -> ((gradient of loss + push . evidence in w, in learned theta), (loss, evidence))."""

    def pushed(w: list[Array], theta: list[Array], push: list[Array], *rest: Any) -> tuple[Array, Any]:
        value, seen = problem.value(w, theta, *rest)
        return sum((jnp.vdot(a, x) for a, x in zip(push, seen, strict=False)), value), (value, seen)

    def gradients(w: list[Array], push: list[Array], theta: list[Array], *rest: Any) -> tuple[Any, Any]:
        differentiated = jax.value_and_grad(pushed, argnums=(0, 1) if problem.learned else 0, has_aux=True)
        (_, found), g = differentiated(w, theta, push, *rest)
        return (g if problem.learned else (g, None)), found

    return gradients


def along(
    problem: Problem, t: Array, first_order: Callable[..., Any], w: list[Array], u: list[Array], push: list[Array]
) -> Any:
    """Forward over reverse: ((g, g_theta), (H u, (d_theta g)^T u), (loss, evidence)) from one jvp, without residuals of
    residuals; theta's are None if it is not learned. A push from 0 along the cotangent of the evidence adds what the
    statistics pass back to the second of them."""
    with jax.enable_x64(problem.x64):
        none = [jnp.zeros_like(x) for x in push]
        directions = settled(problem.rule.layout.split(u)), settled(push)
        (g, g_theta), (hu, cross), seen = settled(jax.jvp(first_order, (w, none), directions, has_aux=True))
    return (problem.joined(t, g), g_theta), (problem.joined(t, hu), cross), seen


def along_kept(problem: Problem, t: Array, tangent: Tangent, u: list[Array], push: list[Array]) -> Any:
    """(H u, (d_theta g)^T u) likewise, from what was computed with the gradient."""
    with jax.enable_x64(problem.x64):
        hu, cross = settled(tangent(settled(problem.rule.layout.split(u)), settled(push)))
    return problem.joined(t, hu), cross if problem.learned else None


def of_theta(problem: Problem, w: list[Array], theta: list[Array], *rest: Any) -> list[Array] | None:
    """The gradient in a learned theta. `found` has none: no step needs it, and it takes a product more."""
    if not problem.learned:
        return None
    with jax.enable_x64(problem.x64):
        return jax.grad(lambda theta: problem.value(w, theta, *rest)[0])(theta)
