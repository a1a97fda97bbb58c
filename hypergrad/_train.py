"""`train`: from a loss, parameters, an optimizer and batches to a run, checked at the door."""

import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _door as door
from hypergrad import _programs as programs
from hypergrad._meshes import reject_explicit
from hypergrad._program_keys import contains
from hypergrad._report import mask, surface
from hypergrad._trace import rule_programs, trace
from hypergrad.adjoints import Checkpointed, Reversible, Unrolled
from hypergrad.batches import HostBatches, full_batch
from hypergrad.errors import Status
from hypergrad.exact import grid_range
from hypergrad.loop.functions import Functions
from hypergrad.loop.problem import Inputs, Labels, Problem, join_steps, one_of
from hypergrad.loop.step import Rule
from hypergrad.optimizers.chain import PARAMS, STATISTICS, Link, Optimizer
from hypergrad.optimizers.expand import (
    buffers,
    compute_dtype,
    concrete,
    decay_interval,
    known_numerators,
    layout_of,
    link_fraction_bits,
    prepared,
    prepared_statistics,
    weights_after,
)
from hypergrad.optimizers.layout import Layout, separate
from hypergrad.optimizers.statistics import MEANS, Statistics
from hypergrad.optimizers.transform import Transform, transforms


class Trained(eqx.Module):
    """What `train` returns; every float is NaN if `status` is not OK."""

    params: Any  # like `params`
    losses: Array  # float [steps]: the loss at each step, before its update
    state: dict[str, Any]  # final accumulators, {link: like params}, and what else to go on with; may be passed as `state`
    status: Status
    buffer_words: Array  # int32: 32-bit words per parameter that the information buffer needs
    statistics: Any = None  # like `statistics.values`: what they came to


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
    adjoint: Reversible | Unrolled | Checkpointed = Reversible(),  # noqa: B008 (frozen)
    throw: bool = True,
) -> Trained:
    """w_T, v_T = steps of `optimizer` on loss(w, theta, batches(t)), t = 0..steps-1; differentiable in all that is float.

    loss(params, theta, batch) -> float scalar, pure. params: pytree of real float arrays. optimizer: `hg.SGD(...)` or
    another; its leaves are hyperparameters. batches: a pure function t (int32 scalar) -> batch, as `hg.minibatches`,
    `hg.stacked`, `hg.full_batch` make them, or `hg.host_batches`. theta: pytree handed to the loss; its float leaves are
    differentiated. steps: int, may be left out where `batches` knows it. state: as in `Trained.state`, None for zeros.
    statistics: running means: `hg.Statistics(values, decay)`, or the initial values alone; the loss then returns (float
    scalar, evidence), evidence being a pytree like the values. adjoint: how the derivative is computed; the forward numbers
    are the same bit for bit. throw: raise a `HypergradError` when the run goes wrong (under jit and vmap: from the compiled
    code); otherwise look at `Trained.status`.

    Called outside of jax.jit, it traces the loss each time and compiles once per program: a new lambda with the same
    operations and shapes finds the old one, and a loss that reads something else by now is another.
    Composes with jax.grad (params, optimizer, theta, state, statistics in; params, losses, state, statistics out), jax.jit
    and jax.vmap.
    """
    problem, inputs, trees = set_up(loss, params, optimizer, batches, theta, steps, state, adjoint, throw, statistics)
    outcome = adjoint.run(problem, inputs)
    ok = surface(outcome.status, throw)
    weights = weights_after(optimizer, known_weights(optimizer, state), problem.steps)
    values, losses, weights = mask(ok, (outcome.values, outcome.losses, weights))
    (tree, means_tree), alone = trees, values.pop(STATISTICS, None)
    final = {name: jax.tree.unflatten(tree, problem.rule.layout.split(vectors)) for name, vectors in values.items()}
    means = None if alone is None else jax.tree.unflatten(means_tree, alone)
    return Trained(final.pop(PARAMS), losses, {**final, **weights}, outcome.status, outcome.status.words, means)


def known_weights(optimizer: Optimizer, state: dict[str, Any] | None) -> dict[str, Any]:
    """Those of `Optimizer.weights` that a run begins with."""
    return {name: state[name] for name in optimizer.layers[-1].weights if state and name in state}


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
) -> tuple[Problem, Inputs, tuple[Any, Any]]:
    """Check every argument and take the run apart into what is fixed and what flows; also the trees of parameters and
    statistics."""
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
    leaves, tree = jax.tree.flatten(params)
    traced = trace(loss, params, theta, batches)
    door.check_loss_value(traced.returned if means is None else door.check_evidence(traced.returned, means.values))
    values = door.check_state(optimizer.chain, params, state, optimizer.layers[-1].weights)
    weights = known_weights(optimizer, state)
    layout = layout_of(optimizer, params, weights)
    values = {name: layout.join(x) for name, x in values.items()}
    h, unchanged = prepared(optimizer, params, steps, layout, weights)
    if state is not None:
        h = [optimizer.layers[-1].begin(hj, {name: x[j] for name, x in values.items()}) for j, hj in enumerate(h)]
    rule = _rule(optimizer.chain, h, leaves, layout, adjoint, optimizer.linear, transforms(optimizer))
    one_step = jax.eval_shape(lambda h: join_steps(*one_of(h, steps)), h)
    rule = rule_programs(optimizer, rule, values, one_step)
    fields = {name: x for name, x in optimizer.layers[-1].hyperparameters().items() if name in unchanged}
    words = tuple(_words_known(link, fields.get(str(link.decay)), params, steps) for link in optimizer.chain)
    followers: tuple[Rule, ...] = ()
    if means is not None:
        s = jax.tree.leaves(means.values)
        rates = prepared_statistics(means, steps)
        followers = (_rule((MEANS,), rates, s, separate([x.shape for x in s]), adjoint),)
        values = {**values, STATISTICS: [x.astype(dtype) for x, dtype in zip(s, followers[0].dtypes, strict=True)]}
        h, words = h + rates, (*words, _words_known(MEANS, means.decay, means.values, steps))
    x64 = jnp.result_type(float) == jnp.float64
    labels = _labels(rule, followers, optimizer, params, traced.names, means)
    problem = Problem(
        traced.functions,
        rule,
        steps,
        _driver(adjoint, traced.functions, source),
        x64,
        labels,
        words,
        throw,
        followers,
        source=source,
        progress=adjoint.progress,
        shelved=adjoint.buffer == "host",
        retries=adjoint.isolate is None,
    )
    trees = tree, None if means is None else jax.tree.structure(means.values)
    return problem, Inputs(values, h, traced.theta, traced.frozen), trees


def _rule(
    chain: tuple[Link, ...],
    h: list[dict[str, Array]],
    leaves: list[Array],
    layout: Layout,
    adjoint: Any,
    linear: bool = True,
    layers: tuple[Transform, ...] = (),
) -> Rule:
    leaves = layout.first(leaves)
    return Rule(
        chain,
        tuple(tuple(link_fraction_bits(link, x, adjoint.fraction_bits) for x in leaves) for link in chain),
        tuple(compute_dtype(x) for x in leaves),
        tuple(np.dtype(x.dtype) for x in leaves),
        buffers(chain, h, unbounded=adjoint.buffer == "gmpy2"),
        linear,
        not linear or bool(adjoint.isolate),
        layout,
        layers,
    )


def _driver(adjoint: Any, functions: Functions, source: Any) -> str:
    """What repeats the step: as asked for; or the host where it must, and where it may if a scan would be slower there.

    XLA:CPU runs convolutions on all cores, but inside a scan on one.
    """
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


def _labels(
    rule: Rule,
    followers: tuple[Rule, ...],
    optimizer: Optimizer,
    params: Any,
    frozen: tuple[str, ...],
    means: Statistics | None,
) -> Labels:
    paths = [path for path, _ in _paths("", params)]
    places = [f"{link.name}{path}" for link in rule.chain for path in paths]
    limits = [grid_range(bits) for row in rule.fraction_bits for bits in rule.layout.spread(list(row))]
    owner = f"optimizer.{'inner.' * (len(optimizer.layers) - 1)}"
    fields = {name: f"{owner}{name}" for name in optimizer.layers[-1].hyperparameters()}
    firsts = rule.layout.first(paths)
    decays = [f"{fields.get(str(link.decay), link.decay)} for params{path}" for link in rule.chain for path in firsts]
    highest = [decay_interval(link)[1] for link in rule.chain for _ in firsts]
    if means is not None:
        means_places = [path for path, _ in _paths(STATISTICS, means.values)]
        places, decays = places + means_places, decays + [f"statistics.decay for {place}" for place in means_places]
        limits += [grid_range(bits) for bits in followers[0].fraction_bits[0]]
        highest += [decay_interval(MEANS)[1]] * len(means_places)
    return Labels((*places, *decays), (*limits, *highest), frozen)


def _paths(name: str, tree: Any) -> list[tuple[str, Any]]:
    return [(name + jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def _words_known(link: Link, decay: Any, tree: Any, steps: int) -> int | None:
    """Buffer words per parameter where a decay is concrete, even if all else is traced."""
    if decay is None or not concrete(decay):
        return None
    with jax.ensure_compile_time_eval():
        distinct = {(n.tobytes(), keep) for n, keep in known_numerators(link, decay, tree, steps)}
    return max(keep.words_needed(np.frombuffer(n, np.int64), link.denominator) for n, keep in distinct)
