"""`hypergradient`, `optimize` and `restarts`: one evaluation, a meta-loop over it, and several of them."""

import inspect
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from hypergrad._callbacks import Callback
from hypergrad._evaluate import Evaluation, default_key, reject_traced
from hypergrad._meta_loop import MetaLoop, Result, warn_unused
from hypergrad.errors import HypergradError
from hypergrad.hypers import check_hypers, split_fixed


def hypergradient(
    train_fn: Callable[[Any, Array], Any], val_fn: Callable[[Any], Array], hypers: Any, key: Array | None = None
) -> tuple[Array, Any]:
    """(f(h), df/dh) of f(h) = val_fn(train_fn(natural(h), key)), evaluated once, outside of jit.

    grads: like `hypers`, in the coordinates in which it is stored (unconstrained for domains), zero where `hg.fixed`; the
    number of a domain is `grads[name].unconstrained`, that of a schedule at step t `.unconstrained.values[t]`. A gradient is
    no point: `hg.natural` of it means nothing. key: `jax.random.key(0)` if None. Raises a `HypergradError` if training
    fails or the gradient is not finite.
    """
    hypers = check_hypers(hypers)
    reject_traced("hg.hypergradient", (hypers, key))
    learned, fixed = split_fixed(hypers)
    evaluated, failure = Evaluation(train_fn, val_fn, jit=False)(learned, fixed, default_key(key))
    if failure is not None:
        raise failure
    warn_unused(evaluated.grads)
    return evaluated.value, eqx.combine(evaluated.grads, _zeros_like(fixed))


def optimize(
    train_fn: Callable[[Any, Array], Any],
    val_fn: Callable[[Any], Array],
    hypers: Any,
    *,
    meta_steps: int = 50,
    meta_optimizer: optax.GradientTransformation = optax.adam(0.04),  # noqa: B008 (immutable)
    key: Array | None = None,
    seeds_per_step: int = 1,
    monitor_fn: Callable[[Any], Array] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    jit: bool = True,
    skip_nonfinite: bool = False,
    aggregate: Literal["clipped", "mean"] | None = None,
    diagnose: bool = True,
    stop_on_growth: bool = True,
) -> Result:
    """h <- h + meta_optimizer(mean over seeds of d/dh val_fn(train_fn(natural(h), key_i))), `meta_steps` times.

    train_fn(hypers in natural units, key) -> anything; val_fn(that) -> float scalar. hypers: pytree of domains
    (`hg.positive`, ...), `hg.knots` and bare floats. key: meta-step i uses fold_in(key, i); None: `jax.random.key(0)`.
    meta_optimizer: any optax transformation; one that searches along a line or keeps secants (`optax.lbfgs()`) sees
    fold_in(key, 0) at every meta-step, so that its values are comparable. seeds_per_step: keys to average over, split from
    that of the meta-step and vmapped (one after the other if jit=False). monitor_fn: like val_fn, on a third split of the
    data; it is not differentiated, and decides on `Result.best` and early stopping. callbacks: called with each
    `MetaStep`; True stops, with a warning where one returned nothing before, and what is no bool and
    not None is a TypeError. checkpoint: a folder, made if absent, to go on from if it holds this run: killed at any
    moment and called again, or called with more `meta_steps`, the history is that of an uninterrupted run. jit: compile
    the evaluation once for all steps (and once more whenever the information buffer must grow); False runs it from Python,
    as host drivers need. skip_nonfinite: average over the seeds that did not diverge, and leave the hypers alone where
    all did, instead of raising. aggregate: how the hypergradients of seeds become one; "mean"; "clipped": weighed by min(1,
    (3 median norm / norm)^2), so that none that explodes moves the mean; None: "clipped", but "mean" for line searches.
    diagnose: measure at each meta-step how much the derivative of training grows backwards (`MetaStep.growth`), for 2 to 4%
    more time, and warn where it explodes at the first one or where the hypergradient jumps. stop_on_growth: stop where it
    stays long, and take the best hypers, by `hg.callbacks.StopOnGrowth()`, unless one is among the `callbacks`.
    """
    loop = MetaLoop(
        train_fn, val_fn, meta_steps=meta_steps, meta_optimizer=meta_optimizer, key=key, seeds_per_step=seeds_per_step,
        monitor_fn=monitor_fn, callbacks=callbacks, jit=jit, skip_nonfinite=skip_nonfinite, aggregate=aggregate,
        diagnose=diagnose, stop_on_growth=stop_on_growth,
    )  # fmt: skip
    return loop.run(hypers, checkpoint)


def restarts(
    train_fn: Callable[[Any, Array], Any],
    val_fn: Callable[[Any], Array],
    starts: Sequence[Any],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    **options: Any,
) -> list[Result]:
    """`optimize` from each of `starts`, compiled once; the results by their best step, the lowest first.

    starts: hypers of the same tree, for instance `[hypers, *(hg.scatter(hypers, k) for k in keys)]`. All see the same keys.
    checkpoint: start i keeps its run in the folder `checkpoint/start-<i>`. options: those of `optimize`. A start whose
    training fails is left out with a warning; the error is raised if all fail.
    """
    if unknown := sorted(options.keys() - _OPTIONS):
        raise TypeError(f"hg.restarts has no option {', '.join(unknown)}. It takes {', '.join(_OPTIONS)}.")
    loop = MetaLoop(train_fn, val_fn, **options)
    starts = _checked(starts)
    results: list[Result] = []
    failures: list[HypergradError] = []
    for i, start in enumerate(starts):
        for callback in loop.callbacks:
            if hasattr(callback, "begin_start"):
                callback.begin_start(i)
        try:
            results.append(loop.run(start, None if checkpoint is None else pathlib.Path(checkpoint) / f"start-{i}"))
        except HypergradError as error:
            failures.append(error)
            warnings.warn(f"start {i} of hg.restarts is left out: {error}", stacklevel=2)
    if not results:
        raise failures[0] if failures else ValueError("`starts` of hg.restarts is empty.")
    return sorted(results, key=lambda result: result.best.judged)


_OPTIONS = tuple(inspect.signature(MetaLoop).parameters)[2:]  # those of `optimize`


def _checked(starts: Any) -> list[Any]:
    """All of them, before the first runs: the results of those before a bad one would be lost."""
    one = isinstance(starts, (Mapping, str)) or eqx.is_array_like(starts) or hasattr(starts, "_fields")
    if one or not isinstance(starts, Iterable):
        raise TypeError(
            f"`starts` of hg.restarts must be a list of hypers, one for each start; got {type(starts).__name__}. Write "
            "[hypers] for a single one."
        )
    starts = list(starts)
    for i, start in enumerate(starts):
        try:
            check_hypers(start)
        except (TypeError, ValueError) as error:
            error.add_note(f"(start {i} of hg.restarts; none has run)")
            raise
    return starts


def _zeros_like(fixed: Any) -> Any:
    """Of numbers; a key, or what is no array, stays."""
    number = lambda x: eqx.is_array_like(x) and jnp.issubdtype(jnp.result_type(x), np.number)  # noqa: E731
    return jax.tree.map(lambda x: jnp.zeros_like(x) if number(x) else x, fixed)
