"""The derivative of the gradient against a cotangent: what the reverse pass needs of the loss beside the gradient itself.

Invariant: `products` gives J^T u for every loss. J u is taken for it, which is cheaper, only where J is symmetric for
certain.

With g = the loss's gradient in w and J its Jacobian, forward over reverse gives g and J u from one jvp of the gradient
along u, without residuals of residuals; and along the same u, the derivative of the gradient in theta, (d_theta g)^T u.
Both hold where g is the gradient of something. A loss with a derivative rule of its own (`jax.custom_vjp`) has a field of
which J need not be symmetric: there reverse over reverse gives J^T u and (d_theta g)^T u from one vjp of the gradient, in
the memory of one step. Nor is that field the derivative of the loss that training reports, nor need a rule be linear in its
cotangent, as one that clips it is not: so the same vjp takes the cotangents of the loss and of the batch statistics, too.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._isolation import barrier, isolated
from hypergrad._settings import own_settings
from hypergrad.errors import HypergradError
from hypergrad.exact import exponent_of, power_of_two
from hypergrad.optimizers.block import Floats
from hypergrad.optimizers.chain import GRADIENT
from hypergrad.run.functions import Frozen
from hypergrad.run.means import InOrder, OnGrid, Scaled
from hypergrad.run.spec import Run
from hypergrad.run.step import Signals


class Gradients(NamedTuple):
    """Of the loss at one step, as they come beside their derivatives."""

    value: Array
    seen: list[Array]  # batch statistics
    w: list[Array]
    theta: list[Array]  # of the wanted leaves; none where the loss has derivative rules of its own


class Products(NamedTuple):
    """The gradient's derivative against u."""

    w: list[Array]  # J^T u; where J need not be symmetric, with the cotangents through the loss and the batch statistics
    theta: list[Array]  # (d_theta g)^T u, of the wanted leaves; likewise
    asymmetry: Array | None = None  # `_asymmetry`: float32 [3], where somebody watches and J passes as symmetric

    def times(self, c: Array) -> "Products":
        """Against c u."""
        w, theta = ([c.astype(x.real.dtype) * x for x in leaves] for leaves in (self.w, self.theta))
        return Products(w, theta, self.asymmetry)


FirstOrder = Callable[[list[Array], list[Array], list[Array], Frozen, list[Any]], tuple[Any, Any]]


def first_order(run: Run, wanted: tuple[bool, ...]) -> FirstOrder:
    """(w, wanted theta, theta, frozen, batch) -> ((gradient in w, in the wanted leaves of theta), (loss, batch statistics)).

    A derivative rule holds once: training differentiates in w, which uses it up for w, and not for theta. So where the loss
    has rules of its own the gradient is in w alone, as in training.
    """
    symmetric = run.functions.symmetric

    def gradients(w: list[Array], chosen: list[Array], theta: list[Array], *rest: Any) -> tuple[Any, Any]:
        value = lambda w, chosen: run.value(w, merged(wanted, chosen, theta), *rest)  # noqa: E731
        found, g = jax.value_and_grad(value, argnums=(0, 1) if symmetric else (0,), has_aux=True)(w, chosen)
        return g if symmetric else (*g, []), found

    return run.maybe_jit(gradients)


def chosen(wanted: Sequence[bool], theta: Sequence[Any]) -> list[Any]:
    return [x for x, is_wanted in zip(theta, wanted, strict=True) if is_wanted]


def merged(wanted: tuple[bool, ...], these: list[Array], others: list[Array]) -> list[Array]:
    """The inverse of `chosen`, the rest from `others`."""
    left = iter(these)
    return [next(left) if is_wanted else x for x, is_wanted in zip(others, wanted, strict=True)]


def products(
    run: Run,
    t: Array,
    gradients: FirstOrder,
    w: list[Array],
    these: list[Array],
    rest: Any,
    u: list[Array],
    dloss: Array | None,
    push: list[Array],
) -> tuple[Gradients, Products]:
    """u: the cotangent of the `joined` gradient; dloss: of the loss; push: of the batch statistics, none where nobody
    differentiates what they come to. The last two count where J need not be symmetric. Both results are joined, too."""
    symmetric = run.functions.symmetric
    theta, frozen, batch = rest
    push = [] if symmetric else push
    with jax.enable_x64(run.x64):
        cotangents, unscaled = _scaled(run, [*u, jnp.zeros(()) if dloss is None else dloss, *push])
        u, dloss, push = cotangents[: len(u)], cotangents[len(u)], cotangents[len(u) + 1 :]
        u = barrier([x.astype(y.dtype) for x, y in zip(run.split_apart(t, u), w, strict=True)])

    def of_part(shared: Any, batch: list[Any]) -> Any:
        w, these, theta, frozen, u, dloss, push = shared
        f = lambda w, these: gradients(w, these, theta, frozen, batch)  # noqa: E731
        with jax.enable_x64(run.x64):
            return _by_jvp(run, f, w, these, u) if symmetric else _by_vjp(run, f, w, these, (u, dloss, push))

    kinds, shared = (InOrder(), OnGrid(), Scaled()), (w, these, theta, frozen, u, dloss, push)
    found = run.over_parts(of_part, kinds, shared, batch, [*u, dloss, *push])
    value, (g, seen), (g_theta, hu, cross, asymmetry) = found
    return Gradients(value, seen, run.joined(t, g), g_theta), Products(
        unscaled(run.joined(t, hu)), unscaled(cross), asymmetry
    )


def _by_jvp(run: Run, f: Callable[..., Any], w: list[Array], these: list[Array], u: list[Array]) -> Any:
    """Where J is symmetric: (loss, (gradient, batch statistics), (gradient in theta, J u, the same in theta, asymmetry))"""
    of_w = lambda w: f(w, these)  # noqa: E731
    (g, g_theta), (hu, cross), (value, seen) = barrier(jax.jvp(of_w, (w,), (u,), has_aux=True))
    asymmetry = None
    if run.watch and run.watch != "growth":
        field = _field(f, [])
        pushed = lambda w: jax.jvp(of_w, (w,), (u,), has_aux=True)[1]  # noqa: E731
        pulled = lambda w: jax.vjp(field, w, these, has_aux=True)[1]((u, jnp.zeros_like(value), []))  # noqa: E731
        near = [x * (1 + 4 * jnp.finfo(x.dtype).eps) for x in w]
        asymmetry = _asymmetry(((hu, cross), pulled(w)), (pushed(near), pulled(near)))
    return value, (g, seen), (g_theta, hu, cross, asymmetry)


def _by_vjp(run: Run, f: Callable[..., Any], w: list[Array], these: list[Array], ct: Any) -> Any:
    """The same where it need not be, of J^T. ct: of the gradient, the loss and the batch statistics."""
    (u, dloss, push), parts = ct, run.microbatches
    (g, value, _), pull, (g_theta, seen) = jax.vjp(_field(f, push), w, these, has_aux=True)
    cotangents = u, dloss.astype(value.dtype), push
    back = pull(cotangents) if parts is None else parts.whole(pull(parts.share(cotangents)))
    g, (hu, cross), g_theta, value, seen = barrier((g, back, g_theta, value, seen))
    return value, (g, seen), (g_theta, hu, cross, None)


def _field(f: Callable[..., Any], push: list[Array]) -> Callable[..., Any]:
    """(w, theta) -> ((gradient, loss, batch statistics if somebody differentiates them), the rest)"""

    def field(w: list[Array], these: list[Array]) -> Any:
        (g, g_theta), (value, seen) = f(w, these)
        return (g, value, seen if push else []), (g_theta, seen)

    return field


def _asymmetry(here: tuple[Any, Any], near: tuple[Any, Any]) -> Array:
    """|J u - J^T u|, |J^T u|, and by how much either changes with the last digits of the parameters, over all leaves:
    float32 [3]. here: both products, near: both at parameters that differ from these by a few roundings."""

    def norm(leaves: list[Array]) -> Array:
        return jnp.sqrt(sum(jnp.sum(jnp.abs(x.astype(jnp.complex128)) ** 2) for x in leaves)).astype(jnp.float32)

    def apart(a: Any, b: Any) -> Array:
        return norm([x - y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)])

    with own_settings():
        roundings = jnp.maximum(apart(here[0], near[0]), apart(here[1], near[1]))
        return jnp.stack([apart(*here), norm(jax.tree.leaves(here[1])), roundings])


ROUNDINGS = 10  # times what a few of them change is no asymmetry: medians of overtrained networks are 0.3 to 1.1


def check_symmetric(asymmetry: Any, dtypes: Any) -> None:
    """asymmetry: of every step, or None; dtypes: of the parameters. Where the program of a loss promised what its numbers do
    not keep."""
    if asymmetry is None:
        return
    apart, size, roundings = np.asarray(asymmetry, np.float64).reshape(-1, 3).T
    # In float32, a loss that has come to zero has a J without a correct digit, in either product.
    apart, size = np.maximum(apart - ROUNDINGS * roundings, 0).sum(), size.sum()
    tolerance = 10 * max(float(jnp.finfo(dtype).eps) for dtype in dtypes) ** 0.5
    if apart > tolerance * size:
        raise HypergradError(
            f"the Jacobian J of the loss's gradient is not symmetric: J u and J^T u differ by {apart / size:.2g} of their "
            "size, though the program of the loss has nothing but JAX's own derivative rules. One of these is not the "
            "derivative of what it computes, so hg.Reversible would be wrong. Take adjoint=hg.Unrolled(), and report this "
            "loss."
        )


def accumulator(x: Array) -> Any:
    """The dtype that cotangents of a leaf are summed in over the steps: its own, float32 at least."""
    return x.dtype if jnp.finfo(x.dtype).bits >= 32 else jnp.dtype(jnp.float32)


def _scaled(run: Run, u: list[Array]) -> tuple[list[Array], Callable[[list[Array]], list[Array]]]:
    """(u times a power of two, what divides by it again, as `accumulator`s). Only where the loss computes in float16 or
    less, and has no derivative rules of its own, which need not be linear in their cotangents.

    The largest entry becomes 2^-6, where float16 has as many exponents below as above. Without it what passes back through
    float16 is zero below 6e-8 and infinite above 65504, in whatever unit the validation loss is counted.
    """
    wide = lambda xs: [x.astype(accumulator(x)) for x in xs]  # noqa: E731
    if not (run.functions.narrow and run.functions.symmetric and u):
        return u, wide
    largest = jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(u[0].dtype) for x in u]).max()
    with own_settings():
        exponent = exponent_of(largest.astype(jnp.float64))
        scale = power_of_two(jnp.clip(-6 - exponent, -120, 120)).astype(largest.dtype)
    return [x * scale.astype(x.dtype) for x in u], lambda xs: [x / scale.astype(x.real.dtype) for x in wide(xs)]


def pulled_statistics(
    run: Run, t: Array, wanted: tuple[bool, ...], push: list[Array], w: list[Array], theta: list[Array], *rest: Any
) -> Products:
    """The cotangents of w and theta from that of the batch statistics, where J is symmetric. Isolated: in the open, XLA
    would round the gradient beside it otherwise than in the forward pass."""
    return _pulled(run, t, wanted, lambda w, theta, *rest: run.value(w, theta, *rest)[1], push, w, theta, *rest)


def pulled_signals(
    run: Run,
    t: Array,
    wanted: tuple[bool, ...],
    dsignals: Signals,
    w: list[Array],
    theta: list[Array],
    frozen: Frozen,
    batch: list[Any],
) -> Products:
    """The cotangents of w and theta from those of what links see beside the gradient."""
    names = sorted(dsignals[0].keys() - {GRADIENT})

    def values(w: list[Array], theta: list[Array], frozen: Frozen, drawn: list[Any]) -> list[Array]:
        found = run.signals_at_once((w, theta, frozen), drawn)
        return [block.join(found[name]).astype(block.dtype) for name in names for block in run.of_parameters]

    push = [own[name] for name in names for own in dsignals]
    return _pulled(run, t, wanted, values, push, w, theta, frozen, run.drawn(t, batch))


def pulled_metrics(
    run: Run,
    t: Array,
    wanted: tuple[bool, ...],
    push: list[Array],
    values: list[Floats],
    theta: list[Array],
    frozen: Frozen,
    batch: list[Any],
) -> tuple[list[Floats], list[Array]]:
    """The cotangents of the values of the blocks of the parameters, and of theta, from those of what is measured."""

    def pulled(push: list[Array], values: list[Floats], theta: list[Array], frozen: Frozen, batch: list[Any]) -> Any:
        def measured(values: list[Floats], these: list[Array]) -> list[Array]:
            return run.metrics(t, values, merged(wanted, these, theta), frozen, batch, apart=False)

        dvalues, dtheta = jax.vjp(measured, values, chosen(wanted, theta))[1](push)
        return dvalues, [x.astype(accumulator(x)) for x in dtheta]

    return isolated(t, pulled, push, values, theta, frozen, batch)


def _pulled(
    run: Run,
    t: Array,
    wanted: tuple[bool, ...],
    function: Callable[..., list[Array]],
    push: list[Array],
    w: list[Array],
    theta: list[Array],
    frozen: Frozen,
    batch: list[Any],
) -> Products:
    """The vjp of function(w, theta, frozen, batch) along push, in w and in the wanted leaves of theta."""

    def pulled(push: list[Array], w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any]) -> Any:
        with jax.enable_x64(run.x64):
            push, unscaled = _scaled(run, push)

        def of_part(shared: Any, batch: list[Any]) -> Any:
            push, w, theta, frozen = shared
            of_these = lambda w, these: function(w, merged(wanted, these, theta), frozen, batch)  # noqa: E731
            _, vjp = jax.vjp(of_these, w, chosen(wanted, theta))
            with jax.enable_x64(run.x64):
                if run.microbatches is None or run.functions.symmetric:
                    return vjp(push)
                return run.microbatches.whole(vjp(run.microbatches.share(push)))  # rules see a part's share

        found = run.over_parts(of_part, Scaled(), (push, w, theta, frozen), batch, push)
        with jax.enable_x64(run.x64):
            return [unscaled(x) for x in found]

    dw, dtheta = isolated(t, pulled, push, w, theta, frozen, batch)
    return Products(run.joined(t, dw), dtheta)
