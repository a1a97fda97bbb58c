"""From the arguments of `train` to a run: what is fixed, what flows, and what puts results together again.

Invariant: every argument is checked before anything is compiled, and each of the user's functions is traced once.
"""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hypergrad import _door as door
from hypergrad import _programs as programs
from hypergrad._examples import check_examples
from hypergrad._meshes import reject_explicit, reject_varying
from hypergrad._metrics import CALL, measured
from hypergrad._microbatches import check_loss, spread
from hypergrad._numbers import check_numbers
from hypergrad._problem import Problem
from hypergrad._processes import reject_python, several
from hypergrad._program_keys import contains
from hypergrad._signals import check_shapes_of_signals
from hypergrad._trace import Traced, trace, with_foreign
from hypergrad.adjoints import Adjoint, Reversible
from hypergrad.batches import HostBatches, full_batch
from hypergrad.exact import grid_range
from hypergrad.optimizers.block import Block, decided, statistics_in
from hypergrad.optimizers.chain import STATISTICS
from hypergrad.optimizers.expand import decay_interval
from hypergrad.optimizers.lay_out import LaidOut, common, lay_out, shared, with_statistics
from hypergrad.optimizers.linearity import linear_in_gradient
from hypergrad.optimizers.partition import Layer
from hypergrad.optimizers.statistics import Statistics
from hypergrad.run.functions import Functions
from hypergrad.run.per_step import like_one_step
from hypergrad.run.spec import Inputs, Labels, Run


class About(NamedTuple):
    """What puts the results of a run together again."""

    layers: tuple[Layer, ...]
    tree: Any  # of the parameters
    statistics_tree: Any  # None where there are none
    begin: int = 0  # the step that the derivative begins with


def set_up(problem: Problem, adjoint: Adjoint = Reversible(), throw: bool = True) -> tuple[Run, Inputs, About]:  # noqa: B008
    """Check every argument and take the run apart into what is fixed and what flows."""
    door.check_kinds(problem.loss, problem.optimizer, problem.batches, adjoint)
    source = problem.batches if isinstance(problem.batches, HostBatches) else None
    problem = _checked(problem)
    _, params, optimizer, _, _, steps, _, means, metric, parts, _ = problem
    traced = _traced(problem)
    out = _laid_out(problem, adjoint)
    h = [{**own, **flat} for own, flat in zip(out.h, out.per_step, strict=True)]
    of_one_step = like_one_step(h)
    statistics_tree = None if means is None else jax.tree.structure(means.values)
    seen = _statistics_like(statistics_tree, out.values)
    if traced.functions.signals is not None:
        check_shapes_of_signals(traced.functions.signals.program.out, tuple(out.blocks), out.values, params)
        if any(layer.is_rule and layer.optimizer.of_examples for layer in out.layers):
            check_examples(problem, (traced.theta, traced.frozen), traced.functions.signals.program.key)
    blocks = decided(out.blocks, of_one_step, out.values, seen)
    if metric is not None:
        door.check_metric(metric)
        door.check_signature(CALL, metric, "hypers is the optimizer, as it is at that step.")
        of_parameters = tuple(block for block in blocks if block.of_parameters)
        traced = measured(traced, metric, optimizer, steps, of_parameters, out.values, jax.tree.structure(params))
    # A transformation that reads links passes cotangents back to them: those of links after it must be known first.
    reading = any(around.reads for around in out.transforms)
    linear = optimizer.linear and not optimizer.signals and not statistics_in(blocks) and not reading
    linear = linear and linear_in_gradient(blocks, of_one_step, out.values)
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
        common=common(h),
        statistics_tree=statistics_tree,
        source=source,
        progress=adjoint.progress,
        store=adjoint.store,
        retries=adjoint.isolate is None,
        microbatches=parts,
    )
    run = with_foreign(run, out.values, of_one_step, seen)
    inputs = Inputs(out.values, h, traced.theta, traced.frozen)
    reject_varying(inputs)
    return run, inputs, About(out.layers, jax.tree.structure(params), statistics_tree, adjoint.begins_at(steps))


def _checked(problem: Problem) -> Problem:
    """With arrays for what may be given as numbers, steps that are known, and of batches from Python the place where the
    driver puts them."""
    trees = problem._asdict()
    for name in ("params", "theta", "state", "optimizer", "statistics"):
        door.reject_domains(name, trees[name])
        check_numbers(name, trees[name])
    reject_explicit({name: trees[name] for name in ("params", "theta", "state", "optimizer", "statistics", "batches")})
    params, batches = door.check_params(problem.params), problem.batches
    means = None if problem.statistics is None else door.check_statistics(problem.statistics)
    steps = door.check_steps(problem.steps, batches)
    theta = jax.tree.map(lambda x: programs.owned(x) if isinstance(x, (float, np.ndarray)) else x, problem.theta)
    if isinstance(batches, HostBatches):
        batches = full_batch(batches.first)
    parts = spread(problem.microbatches, batches, (params, theta, problem.optimizer))
    return problem._replace(params=params, batches=batches, theta=theta, steps=steps, statistics=means, microbatches=parts)


def _traced(problem: Problem) -> Traced:
    """The user's functions, once what they compute is known to be of use."""
    traced = trace(problem)
    check_loss(problem.microbatches, traced.functions.loss.jaxpr)
    means, value = problem.statistics, traced.returned
    door.check_loss_value(value if means is None else door.check_evidence(value, means.values), problem.theta, problem.steps)
    return traced


def _laid_out(problem: Problem, adjoint: Adjoint) -> LaidOut:
    """All that moves, running statistics after the parameters."""
    options: Any = {"unbounded": adjoint.buffer == "gmpy2"}
    steps, bits = problem.steps, adjoint.fraction_bits
    late: Any = {"begin": adjoint.begins_at(steps), "past": problem.past, "elsewhere": problem.microbatches is not None}
    out = lay_out(problem.optimizer, problem.params, steps, problem.state, bits, **options, **late)
    return out if problem.statistics is None else with_statistics(out, problem.statistics, steps, bits, **options)


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
    if (asked := adjoint.driver_for(source)) is not None:
        return str(asked)
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
