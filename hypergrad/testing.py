"""Checkers of the two laws that everything rests on: `unstep` inverts `step`, and hypergradients are derivatives."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._differences import central, extrapolated
from hypergrad.exact import DEVICE, schedule
from hypergrad.loop import step as _step
from hypergrad.loop.problem import join_steps, split_steps
from hypergrad.optimizers.chain import Optimizer
from hypergrad.optimizers.expand import compute_dtype, link_fraction_bits, link_numerators, prepared


_EXTREMES = (0, -1, 1, 2**16 - 1, -(2**16), 2**60, -(2**60), 2**61 - 1, -(2**61) + 1)


def check_inverse(optimizer: Optimizer, params: Any = None, *, steps: int = 20, seed: int = 0) -> None:
    """Assert `unstep(step(state, g), g) == state` bit for bit, over `steps` random gradients and extreme integers.

    params: pytree of floats whose shapes the optimizer's hyperparameters fit; None: one float32 [3, 4] leaf. Raises
    AssertionError naming the step, link and leaf that did not come back.
    """
    params = {"w": jnp.zeros((3, 4), jnp.float32)} if params is None else params
    leaves = jax.tree.leaves(params)
    chain = optimizer.chain
    bits = tuple(tuple(link_fraction_bits(link, x, None) for x in leaves) for link in chain)
    dtypes = tuple(compute_dtype(x) for x in leaves)
    rule = _step.Rule(chain, bits, dtypes, tuple(np.dtype(x.dtype) for x in leaves), DEVICE, optimizer.linear)
    h = prepared(optimizer, params, steps)
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        plans = {k.name: [schedule(link_numerators(k, hj, steps), k.denominator) for hj in h] for k in chain if k.decay}
        constant, stepped = split_steps(h, steps)
        shapes = {link.name: [jnp.shape(link.start(x)) for x in leaves] for link in chain}
        z = {n: [jnp.asarray(rng.choice(_EXTREMES, s)) for s in row] for n, row in shapes.items()}
        state = _step.Exact(
            z,
            {n: [DEVICE.empty(x.shape, int(s.words)) for x, s in zip(z[n], p, strict=True)] for n, p in plans.items()},
        )
        gradients = [[jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves] for _ in range(steps)]
        moments = [(*_moment(t, constant, stepped, plans), gradients[t]) for t in range(steps)]
        before = []
        for h_t, turns, g in moments:
            before.append(state)
            state, _ = _step.step(rule, state, h_t, turns, g)
        for t, (h_t, turns, g) in reversed(list(enumerate(moments))):
            state = _step.unstep(rule, state, h_t, turns, functools.partial(_given, g))
            _assert_same(t, before[t], state)


def _given(g: list[Array], w: list[Array]) -> list[Array]:
    del w
    return g


def _moment(t: int, constant: Any, stepped: Any, plans: dict[str, list[Any]]) -> tuple[Any, Any]:
    """The hyperparameters and the turns of step t."""
    turns = {name: [jax.tree.map(lambda x: x[t], s.turns) for s in row] for name, row in plans.items()}
    return join_steps(constant, jax.tree.map(lambda x: x[t], stepped)), turns


def _assert_same(t: int, expected: Any, got: Any) -> None:
    for name, leaves in expected.z.items():
        for j, (x, y) in enumerate(zip(leaves, got.z[name], strict=True)):
            if not bool(jnp.all(x == y)):
                off = int(jnp.max(jnp.abs(x - y)))
                raise AssertionError(f"unstep did not undo step {t}: link `{name}`, leaf {j}, is off by up to {off} quanta.")
    for name, buffers in expected.buffers.items():
        for j, (x, y) in enumerate(zip(buffers, got.buffers[name], strict=True)):
            if not bool(jnp.all(x.head == y.head)):
                raise AssertionError(f"unstep did not undo step {t}: the buffer of link `{name}`, leaf {j}, differs.")


class Comparison(NamedTuple):
    """A directional derivative, twice."""

    derivative: float
    difference: float

    @property
    def relative_error(self) -> float:
        return abs(self.derivative - self.difference) / max(abs(self.derivative), abs(self.difference), 1e-300)


def check_hypergradient(
    f: Callable[[Any], Array],
    hypers: Any,
    *,
    tolerance: float,
    directions: int = 5,
    step: float = 2.0**-10,
    seed: int = 0,
    gradient: Any = None,
) -> list[Comparison]:
    """Assert that grad f agrees with central differences along random directions of +-1, to a relative `tolerance`.

    f: hypers -> scalar; run it in float64 for tolerances below 1e-3. Differences (4 D(step/2) - D(step)) / 3 are of fourth
    order (Richardson). step: a power of two; a momentum moves on a grid of 2^-16, so take at least 2^-14 where one is among
    the hypers, which keeps both differences on the grid. gradient: checked instead of jax.grad(f)(hypers) if given.
    """
    gradient = jax.grad(f)(hypers) if gradient is None else gradient
    leaves, tree = jax.tree.flatten(hypers)
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(directions):
        d = [jnp.asarray(rng.choice([-1.0, 1.0], jnp.shape(x)), jnp.result_type(x)) for x in leaves]
        direction = jax.tree.unflatten(tree, d)
        numeric = extrapolated(central(f, hypers, direction, step), central(f, hypers, direction, step / 2))
        exact = float(sum(jnp.vdot(g, e) for g, e in zip(jax.tree.leaves(gradient), d, strict=True)))
        results.append(Comparison(exact, numeric))
    worst = max(results, key=lambda c: c.relative_error)
    if not worst.relative_error <= tolerance:
        raise AssertionError(
            f"the gradient is not the derivative: along one direction {worst.derivative:.10g}, central differences give "
            f"{worst.difference:.10g}, relative error {worst.relative_error:.1e} > {tolerance:.1e}."
        )
    return results
