"""`train`: from a loss, parameters, an optimizer and batches to a run, checked at the door."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax import Array

from hypergrad._meshes import explicit_mesh, with_automatic_axes
from hypergrad._needs import asking, untrained
from hypergrad._problem import Problem
from hypergrad._report import exceeded, mask, probing_curvature, surface
from hypergrad._set_up import About, set_up
from hypergrad._sharpness import excess_of
from hypergrad.adjoints import Adjoint, Reversible
from hypergrad.errors import Status
from hypergrad.optimizers.chain import PARAMS, STATISTICS, Optimizer
from hypergrad.optimizers.initial import final_state
from hypergrad.optimizers.weights import weights_after
from hypergrad.run.microbatches import Microbatches
from hypergrad.run.spec import Run
from hypergrad.run.status import Outcome


class Trained(eqx.Module):
    """What `train` returns; every float is NaN if `status` is not OK."""

    params: Any  # like `params`
    losses: Array  # float [steps]: the loss at each step, before its update
    state: dict[str, Any]  # final accumulators, {link: like params}, and what else to go on with; may be passed as `state`
    status: Status
    buffer_words: Array  # int32: 32-bit words per parameter that the information buffer needs
    statistics: Any = None  # like `statistics.values`: what they came to
    metrics: Any = None  # as `metric` returns them, each float [steps]


def train(
    loss: Callable[[Any, Any, Any], Any],
    params: Any,
    optimizer: Optimizer,
    batches: Callable[[Array], Any],
    *,
    theta: Any = None,
    steps: int | None = None,
    state: dict[str, Any] | None = None,
    statistics: Any = None,
    metric: Callable[..., Any] | None = None,
    microbatches: int | Microbatches | None = None,
    adjoint: Adjoint = Reversible(),  # noqa: B008 (frozen)
    throw: bool = True,
) -> Trained:
    """w_T, v_T = steps of `optimizer` on loss(w, theta, batches(t)), t = 0..steps-1; differentiable in all that is float.

    loss(params, theta, batch) -> float scalar, pure. params: pytree of real float arrays. optimizer: `hg.SGD(...)` or
    another; its leaves are hyperparameters. batches: a pure function t (int32 scalar) -> batch, as `hg.minibatches`,
    `hg.stacked`, `hg.full_batch` make them, or `hg.host_batches`. theta: pytree handed to the loss; its float leaves are
    differentiated. steps: int, may be left out where `batches` knows it. state: as in `Trained.state`, None for zeros.
    statistics: running means: `hg.Statistics(values, decay)`, or the initial values alone; the loss then returns (float
    scalar, evidence), evidence being a pytree like the values. metric: a pure function (params, theta, batch, state,
    hypers) -> pytree of float scalars, measured at each step before its update, `Trained.metrics`; state: accumulators,
    {link: like params}; hypers: the optimizer, with the step's own of what is `PerStep`. microbatches: in how many parts
    each batch is cut, by rows; the loss is the mean of theirs, and so is the gradient, rounded to 2^-72 and added as
    integers: the same bits on any number of devices that divides it, if the mesh is known (`hg.Microbatches`) and parameters
    are whole on each, in the memory of one part.
    adjoint: how the derivative is computed; the forward numbers are the same bit for bit. throw: raise a `HypergradError`
    when the run goes wrong (under jit and vmap: from the compiled code); otherwise look at `Trained.status`.

    Called outside of jax.jit, it traces the loss each time and compiles once per program: a new lambda with the same
    operations and shapes finds the old one, and a loss that reads something else by now is another. Composes with jax.grad
    (params, optimizer, theta, state, statistics in; params, losses, metrics, state, statistics out), jax.jit and jax.vmap.
    """
    if explicit_mesh() is not None:
        given = {"params": params, "optimizer": optimizer, "batches": batches, "theta": theta, "state": state}
        given |= {"statistics": statistics}
        fixed: Any = {"steps": steps, "metric": metric, "microbatches": microbatches, "adjoint": adjoint, "throw": throw}
        return with_automatic_axes(lambda given: train(loss, **given, **fixed), given)
    excess = excess_of(loss, optimizer, statistics is not None) if metric is None and probing_curvature() else None
    problem = Problem(loss, params, optimizer, batches, theta, steps, state, statistics, metric or excess, microbatches)
    run, inputs, about = set_up(problem, adjoint, throw)
    outcome = untrained(adjoint, run, inputs) if asking() else adjoint.run(run, inputs)
    ok = surface(outcome.status, throw)
    if excess is not None and outcome.metrics:
        exceeded(outcome.metrics[0])
    return put_together(run, about, outcome, run.steps, state, ok)


def put_together(run: Run, about: About, outcome: Outcome, steps: int, state: dict[str, Any] | None, ok: Array) -> Trained:
    """What a run came to after so many steps, as its caller knows it. state: that it began with; ok: else all is NaN."""
    weights = weights_after(about.layers, state, steps, about.begin)
    values, losses, metrics, weights = mask(ok, (outcome.values, outcome.losses, outcome.metrics, weights))
    final = final_state(run.of_parameters, values, about.tree)
    means = None
    if about.statistics_tree is not None:
        means = jax.tree.unflatten(about.statistics_tree, [values[j][STATISTICS] for j in run.statistics])
    found = None
    if run.functions.metrics is not None and outcome.metrics:
        found = jax.tree.unflatten(jax.tree.structure(run.functions.metrics.program.out), metrics)
    return Trained(final.pop(PARAMS), losses, {**final, **weights}, outcome.status, outcome.status.words, means, found)
