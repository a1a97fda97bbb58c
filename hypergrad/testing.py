"""Checkers of the laws that everything rests on: steps have inverses, and hypergradients are derivatives."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._check import Certificate, check_reversal
from hypergrad._differences import central, check_like, check_step, extrapolated
from hypergrad._door import check_rule
from hypergrad._increments import check_entrywise, check_increments
from hypergrad._inverse import check_inverse as check_inverse
from hypergrad._meshes import in_automatic_axes
from hypergrad._train import train
from hypergrad._volume import check_volume
from hypergrad.adjoints import Reversible, Unrolled
from hypergrad.batches import stacked
from hypergrad.errors import HypergradError
from hypergrad.hypers import split_fixed
from hypergrad.optimizers.chain import PARAMS, Optimizer
from hypergrad.optimizers.initial import final_state
from hypergrad.optimizers.lay_out import lay_out
from hypergrad.optimizers.partition import layers_of


@in_automatic_axes
def check_optimizer(optimizer: Optimizer, params: Any = None, *, steps: int = 8, tolerance: float = 1e-8) -> None:
    """Assert that an optimizer keeps the contract of reversible optimizers, on a small problem in float64.

    In this order: a step multiplies volumes by its decays alone, as one with an explicit inverse does; increments are pure,
    have the derivatives that differences give, are linear in the gradient where `linear` says so and blind to the rest of a
    leaf where `entrywise` does; extreme integers come back (`check_inverse`); a training run comes back; its buffers hold
    log2(1/decay) bits; values out of range are reported; in float32 it comes back, too; derivatives are finite where
    gradients are zero; those of `hg.Reversible` and of `hg.Unrolled` agree to a relative `tolerance` in every
    hyperparameter, the parameters and the state. params: pytree of floats whose shapes the hyperparameters fit; None: a
    vector and a matrix, [4] and [4, 4]. steps: of the run, and of `PerStep` hyperparameters.
    Raises AssertionError that says what is wrong and where to look.
    """
    check_rule(optimizer)
    with jax.enable_x64(True):
        params = {"b": jnp.ones(4), "w": jnp.ones((4, 4))} if params is None else params
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
        optimizer = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), optimizer)
        layers, leaves = layers_of(optimizer, params), jax.tree.leaves(params)
        rules = [layer for layer in layers if layer.is_rule and layer.leaves]
        name = " and ".join(type(rule.optimizer).__name__ for rule in rules)
        for rule in rules:
            _check_signals(rule.optimizer, params)
            for shape in sorted({leaves[i].shape for i in rule.leaves}):
                check_volume(rule.optimizer, shape)
                check_increments(rule.optimizer, shape)
            around = [layer for layer in layers if not layer.is_rule and layer.leaves & rule.leaves]
            check_entrywise(rule, around)
        check_inverse(optimizer, params, steps=steps)
        batches = stacked([_data(rng, x.shape, steps) for x in leaves])
        arguments = (_loss, params, optimizer, batches)
        _check_run(name, optimizer, arguments, steps)
        single = jax.tree.map(lambda x: x.astype(jnp.float32), (params, optimizer, batches))
        _returned(f"{name} in float32", (_loss, *single))
        _check_derivatives(name, arguments, tolerance)


def _check_signals(rule: Optimizer, params: Any) -> None:
    """That the small problem has what the rule sees beside the gradient."""
    batch = [(jnp.ones(x.shape), jnp.ones(x.shape)) for x in jax.tree.leaves(params)]
    for signal, function in rule.signals.items():
        cause = None
        try:
            given = function(_loss, params, None, batch, jax.random.key(0))
            fits = jax.tree.map(jnp.shape, given) == jax.tree.map(jnp.shape, params)
        except (TypeError, ValueError) as e:
            fits, cause = False, e
        if not fits:
            raise TypeError(
                f"hg.testing.check_optimizer has a loss without examples, of which {type(rule).__name__} has nothing to see "
                f"({signal}). Take a loss of yours: hg.check_reversal says whether training comes back, and hg.Unrolled has "
                "the derivative that hg.Reversible must have."
            ) from cause


def _data(rng: np.random.Generator, shape: tuple[int, ...], steps: int) -> tuple[Array, Array]:
    """(slopes, targets) [steps, ...]: the first weight never has a gradient, the second none at first, all none at last."""
    slopes = rng.normal(size=(steps, math.prod(shape)))
    slopes[:, :1], slopes[0, 1:2], slopes[-1] = 0, 0, 0
    return jnp.asarray(slopes.reshape(steps, *shape)), jnp.asarray(rng.normal(size=(steps, *shape)))


def _loss(params: Any, theta: Any, batch: Any) -> Array:
    """Smooth, with a Hessian that couples all leaves."""
    del theta
    pairs = [(w, *data) for w, data in zip(jax.tree.leaves(params), batch, strict=True)]
    return sum(jnp.sum(jnp.logaddexp(a * (w - b), 0)) for w, a, b in pairs) + jnp.tanh(
        sum(jnp.vdot(a, w) for w, a, _ in pairs)
    )


def _returned(name: str, arguments: tuple[Any, ...]) -> Certificate:
    """Of a run that comes back."""
    try:
        proof = check_reversal(*arguments)
    except HypergradError as e:
        raise AssertionError(f"{name} cannot train a small problem with these hyperparameters: {e}") from e
    if not proof.exact:
        first = proof.first_mismatch
        place, where = (
            ("?", "") if first is None else (first.place, " where derivatives are taken" * (first.cause == "derivative"))
        )
        raise AssertionError(
            f"{name}: training does not come back to its first bits{where}; {place} differs first. Is an increment random, "
            "or does it end in a product plus a sum?"
        )
    return proof


def _check_run(name: str, optimizer: Optimizer, arguments: tuple[Any, ...], steps: int) -> None:
    proof = _returned(name, arguments)
    blocks = lay_out(optimizer, arguments[1], steps, None, None, unbounded=False).blocks
    links = max(sum(link.decay is not None for link in block.chain) for block in blocks)
    slack = 24 * links / steps  # the part of a head that is not filled yet
    if not proof.bits_per_parameter_step <= 1.02 * proof.ideal_bits_per_parameter_step + slack:
        raise AssertionError(
            f"{name}: {proof.bits_per_parameter_step:.3g} bits a parameter and step, where its decays lose "
            f"{proof.ideal_bits_per_parameter_step:.3g}."
        )
    loss, params, optimizer, batches = arguments
    far = jax.tree.map(lambda x: jnp.full_like(x, 1e9), params)
    run = train(loss, far, optimizer, batches, throw=False)
    if bool(run.status.ok) or not all(bool(jnp.isnan(x).all()) for x in jax.tree.leaves((run.params, run.state))):
        raise AssertionError(f"{name}: parameters out of range went unreported.")


def _check_derivatives(name: str, arguments: tuple[Any, ...], tolerance: float) -> None:
    loss, params, optimizer, batches = arguments

    def objective(inputs: Any, adjoint: Any) -> Array:
        run = train(loss, inputs["params"], inputs["optimizer"], batches, state=inputs["state"], adjoint=adjoint)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves((run.params, run.state))) + jnp.sum(jnp.cos(run.losses))

    out = lay_out(optimizer, params, batches.steps, None, None, unbounded=False)
    state = final_state(tuple(out.blocks), out.values, jax.tree.structure(params))
    wide = {name: x for name, x in state.items() if name != PARAMS}
    inputs = {"optimizer": optimizer, "params": params, "state": wide}
    try:
        ours, stored = (jax.jit(jax.grad(lambda i, a=a: objective(i, a)))(inputs) for a in (Reversible(), Unrolled()))
    except (HypergradError, jax.errors.JaxRuntimeError) as e:  # of what is compiled, the last line says what was raised
        raise AssertionError(f"{name}: no hypergradient of a small problem: {str(e).strip().splitlines()[-1]}") from e
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(stored), strict=True):
        where = jax.tree_util.keystr(path)[2:].replace("']", "", 1)
        if not bool(jnp.isfinite(x).all() and jnp.isfinite(y).all()):
            raise AssertionError(
                f"{name}: the derivative in {where} is NaN or infinite. One weight of this problem never has a gradient, "
                "one none at first, and all none at last: is there a sqrt, a norm, a power or a quotient at zero? Its "
                "derivative must be finite there."
            )
        error = float(jnp.linalg.norm((x - y).ravel()) / jnp.maximum(jnp.linalg.norm(y.ravel()), 1e-300))
        if float(jnp.linalg.norm((x - y).ravel())) > 0 and not error <= tolerance:
            raise AssertionError(
                f"{name}: the derivative in {where} by reversal differs from that of the unrolled run, relative error "
                f"{error:.1e}. Is an increment's custom derivative wrong, or `prepare` not a pure function of h?"
            )


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

    f: hypers -> scalar; run it in float64 for tolerances below 1e-3. What is `hg.fixed` stays. Differences
    (4 D(step/2) - D(step)) / 3 are of fourth order (Richardson). step: a power of two; a momentum moves on a grid of 2^-16,
    so take at least 2^-14 where one is among the hypers, which keeps both differences on the grid. gradient: checked
    instead of jax.grad(f)(hypers) if given. A derivative or a difference that is not finite agrees with nothing.
    """
    check_step(step)
    if directions < 1:
        raise ValueError(f"`directions` must be at least 1: none is no check; got {directions}.")
    learned, fixed = split_fixed(hypers)
    leaves, tree = jax.tree.flatten(learned)
    if not leaves:
        raise ValueError("`hypers` has nothing to move: it is empty, or every leaf of it is hg.fixed.")
    of_learned = lambda x: f(eqx.combine(x, fixed))  # noqa: E731
    gradient = jax.grad(of_learned)(learned) if gradient is None else check_like(split_fixed(gradient)[0], learned)
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(directions):
        d = [jnp.asarray(rng.choice([-1.0, 1.0], jnp.shape(x)), jnp.result_type(x)) for x in leaves]
        direction = jax.tree.unflatten(tree, d)
        numeric = extrapolated(*(central(of_learned, learned, direction, size)[0] for size in (step, step / 2)))
        exact = float(sum(jnp.vdot(g, e) for g, e in zip(jax.tree.leaves(gradient), d, strict=True)))
        results.append(Comparison(exact, numeric))
    worst = max(results, key=lambda c: math.inf if math.isnan(c.relative_error) else c.relative_error)
    if not worst.relative_error <= tolerance:
        raise AssertionError(
            f"the gradient is not the derivative: along one direction {worst.derivative:.10g}, central differences give "
            f"{worst.difference:.10g}, relative error {worst.relative_error:.1e} > {tolerance:.1e}."
        )
    return results
