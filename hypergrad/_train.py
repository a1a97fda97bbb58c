"""`train`: from a loss, parameters, an optimizer and batches to a run, checked at the door."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _door as door
from hypergrad import _programs as programs
from hypergrad._meshes import explicit_mesh, reject_explicit, with_automatic_axes
from hypergrad._metrics import CALL, measured
from hypergrad._microbatches import check_loss, check_rule, spread
from hypergrad._needs import asking, untrained
from hypergrad._processes import reject_python, several
from hypergrad._program_keys import contains
from hypergrad._report import exceeded, mask, probing_curvature, surface
from hypergrad._sharpness import excess_of
from hypergrad._signals import check_shapes_of_signals
from hypergrad._trace import trace, with_foreign
from hypergrad.adjoints import Adjoint, Reversible
from hypergrad.batches import HostBatches, full_batch
from hypergrad.errors import Status
from hypergrad.exact import grid_range
from hypergrad.optimizers.block import Block, decided, statistics_in
from hypergrad.optimizers.chain import PARAMS, STATISTICS, Optimizer
from hypergrad.optimizers.expand import decay_interval
from hypergrad.optimizers.initial import final_state
from hypergrad.optimizers.lay_out import LaidOut, lay_out, shared, with_statistics
from hypergrad.optimizers.partition import Layer
from hypergrad.optimizers.statistics import Statistics
from hypergrad.optimizers.weights import weights_after
from hypergrad.run.functions import Functions
from hypergrad.run.microbatches import Microbatches
from hypergrad.run.per_step import one_step
from hypergrad.run.spec import Inputs, Labels, Run
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
    integers: the same bits on any number of devices that divides it, if the mesh is known (`hg.Microbatches`), in the memory
    of one part.
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
    run, inputs, about = set_up(
        loss, params, optimizer, batches, theta, steps, state, adjoint, throw, statistics, metric or excess, microbatches
    )
    outcome = untrained(adjoint, run, inputs) if asking() else adjoint.run(run, inputs)
    ok = surface(outcome.status, throw)
    if excess is not None and outcome.metrics:
        exceeded(outcome.metrics[0])
    return put_together(run, about, outcome, run.steps, state, ok)


def put_together(run: Run, about: "About", outcome: Outcome, steps: int, state: dict[str, Any] | None, ok: Array) -> Trained:
    """What a run came to after so many steps, as its caller knows it. state: that it began with; ok: else all is NaN."""
    weights = weights_after(about.layers, state, steps)
    values, losses, metrics, weights = mask(ok, (outcome.values, outcome.losses, outcome.metrics, weights))
    final = final_state(run.of_parameters, values, about.tree)
    means = None
    if about.statistics_tree is not None:
        means = jax.tree.unflatten(about.statistics_tree, [values[j][STATISTICS] for j in run.statistics])
    found = None
    if run.functions.metrics is not None and outcome.metrics:
        found = jax.tree.unflatten(jax.tree.structure(run.functions.metrics.program.out), metrics)
    return Trained(final.pop(PARAMS), losses, {**final, **weights}, outcome.status, outcome.status.words, means, found)


class About(NamedTuple):
    """What puts the results of a run together again."""

    layers: tuple[Layer, ...]
    tree: Any  # of the parameters
    statistics_tree: Any  # None where there are none


def set_up(
    loss: Any,
    params: Any,
    optimizer: Any,
    batches: Any,
    theta: Any,
    steps: Any,
    state: Any,
    adjoint: Any,
    throw: bool,
    statistics: Any = None,
    metric: Any = None,
    microbatches: Any = None,
) -> tuple[Run, Inputs, About]:
    """Check every argument and take the run apart into what is fixed and what flows."""
    door.check_kinds(loss, optimizer, batches, adjoint)
    given = {"params": params, "theta": theta, "state": state, "optimizer": optimizer, "statistics": statistics}
    for name, tree in given.items():
        door.reject_domains(name, tree)
    reject_explicit({**given, "batches": batches})
    params = door.check_params(params)
    means = None if statistics is None else door.check_statistics(statistics)
    steps = door.check_steps(steps, batches)
    theta = jax.tree.map(lambda x: programs.owned(x) if isinstance(x, (float, np.ndarray)) else x, theta)
    source = batches if isinstance(batches, HostBatches) else None
    if source is not None:
        batches = full_batch(source.first)  # its place, where the driver puts the others
    parts = spread(microbatches, batches, (params, theta, optimizer))
    check_rule(parts, optimizer.signals)
    options: Any = {"pair": means is not None, "steps": steps, "whole": metric is not None, "microbatches": parts}
    traced = trace(loss, params, theta, batches, optimizer.signals, **options)
    check_loss(parts, traced.functions.loss.jaxpr)
    value = traced.returned if means is None else door.check_evidence(traced.returned, means.values)
    door.check_loss_value(value, theta, steps)
    out = lay_out(optimizer, params, steps, state, adjoint.fraction_bits, unbounded=adjoint.buffer == "gmpy2")
    if means is not None:
        out = with_statistics(out, means, steps, adjoint.fraction_bits, unbounded=adjoint.buffer == "gmpy2")
    statistics_tree = None if means is None else jax.tree.structure(means.values)
    values, h = out.values, out.h
    of_one_step = jax.eval_shape(lambda h: one_step(h, steps), h)
    seen = _statistics_like(statistics_tree, values)
    if traced.functions.signals is not None:
        check_shapes_of_signals(traced.functions.signals.program.out, tuple(out.blocks), values, params)
    blocks = decided(out.blocks, of_one_step, values, seen)
    if metric is not None:
        door.check_signature(CALL, metric, "hypers is the optimizer, as it is at that step.")
        of_parameters = tuple(block for block in blocks if block.of_parameters)
        traced = measured(traced, metric, optimizer, steps, of_parameters, values, jax.tree.structure(params))
    linear = optimizer.linear and not optimizer.signals and not statistics_in(blocks)
    run = Run(
        traced.functions,
        blocks,
        out.transforms,
        steps,
        _driver(adjoint, traced.functions, source),
        x64=jnp.result_type(float) == jnp.float64,
        labels=_labels(blocks, out, params, traced.names, means, _left_out(out, adjoint, steps)),
        throw=throw,
        linear=linear,
        isolate=_apart(adjoint, linear),
        shared=shared(blocks, out.alike),
        statistics_tree=statistics_tree,
        source=source,
        progress=adjoint.progress,
        store=adjoint.store,
        retries=adjoint.isolate is None,
        microbatches=parts,
    )
    run = with_foreign(run, values, of_one_step, seen)
    return (
        run,
        Inputs(values, h, traced.theta, traced.frozen),
        About(out.layers, jax.tree.structure(params), statistics_tree),
    )


def _statistics_like(tree: Any, values: list[Any]) -> Any:
    """The statistics as a rule reads them: `ShapeDtypeStruct`s in the user's tree; None where there are none."""
    if tree is None:
        return None
    leaves = [own[STATISTICS] for own in values if STATISTICS in own]
    return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])


def _driver(adjoint: Any, functions: Functions, source: Any) -> str:
    """What repeats the step: as asked for; or the host where it must, and where it may if a scan would be slower there.

    XLA:CPU runs convolutions on all cores, but inside a scan on one.
    """
    if several():
        reject_python(adjoint.driver_name, adjoint.store, source)
        return "scan"
    if source is not None and adjoint.driver_name not in (None, "host", "host_eager"):
        raise ValueError(
            "hg.host_batches loads from Python while training runs, which a scan cannot: take adjoint=hg.Reversible() (or "
            'driver="host"), or stack the batches with hg.stacked.'
        )
    if adjoint.driver_name is not None:
        return adjoint.driver_name
    if source is not None:
        return "host"
    cores = (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
    return "either" if cores > 1 and contains(functions.loss.jaxpr, "conv_general_dilated") else "scan"


def _apart(adjoint: Any, linear: bool) -> bool:
    """Whether gradients are compiled apart from their derivatives on the way back from the start.

    On a GPU kernels for products are chosen anew for each program: beside its derivative, no gradient tried had the same
    bits.
    """
    return bool(adjoint.isolate) or not linear or (adjoint.isolate is None and jax.default_backend() != "cpu")


def _left_out(out: LaidOut, adjoint: Any, steps: int) -> tuple[str, ...]:
    """What the derivative does not have, as it was asked for: by rules, then by the adjoint."""
    by_rules = [layer.optimizer.approximate for layer in out.layers if getattr(layer.optimizer, "approximate", "")]
    return (*dict.fromkeys(by_rules), *([said] if (said := adjoint.left_out(steps)) else []))


def _labels(
    blocks: tuple[Block, ...],
    out: LaidOut,
    params: Any,
    frozen: tuple[str, ...],
    means: Statistics | None,
    approximate: tuple[str, ...],
) -> Labels:
    paths = [path for path, _ in _paths("", params)]
    of_statistics = [] if means is None else [path for path, _ in _paths("", means.values)]
    places, limits, decays, highest = [], [], [], []
    for block in blocks:
        own = paths if block.of_parameters else of_statistics
        named = out.names[block.leaves[0]] if block.of_parameters else {"decay": "statistics.decay"}
        of = "params" if block.of_parameters else STATISTICS
        for link in block.chain:
            places += [f"{link.name}{own[i]}" for i in block.leaves]
            limits += [grid_range(block.bits(link))] * len(block.leaves)
            decays.append(f"{named.get(str(link.decay), link.decay)} for {of}{own[block.leaves[0]]}")
            highest.append(decay_interval(link)[1])
    return Labels((*places, *decays), (*limits, *highest), frozen, approximate)


def _paths(name: str, tree: Any) -> list[tuple[str, Any]]:
    return [(name + jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
