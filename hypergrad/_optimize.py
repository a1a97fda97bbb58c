"""`hypergradient` and `optimize`: one evaluation, and a meta-loop over it."""

import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from hypergrad._report import Ledger, listen
from hypergrad.errors import BUFFER_FULL, HypergradError, NonFiniteError, Status
from hypergrad.hypers import check_hypers, hyper_path, natural, split_fixed


class MetaStep(NamedTuple):
    """One evaluation of the meta-loop, before its update."""

    step: int
    value: float
    gradient_norm: float
    seconds: float
    status: Status | None  # of the training run inside; None if there was none
    bits_per_parameter_step: float  # that its information buffer stored
    hypers: Any  # as stored (domains)
    value_error: float = 0.0  # standard error of `value` over the seeds
    monitor: float = math.nan  # value on a third split, if one is watched


class Result(NamedTuple):
    """What `optimize` returns."""

    hypers: Any  # after the last update, as stored: `hg.natural` gives natural units
    best: MetaStep  # the step of lowest value
    history: list[MetaStep]


Callback = Callable[[MetaStep], Any]


def hypergradient(
    train_fn: Callable[[Any, Array], Any], val_fn: Callable[[Any], Array], hypers: Any, key: Array | None = None
) -> tuple[Array, Any]:
    """(f(h), df/dh) of f(h) = val_fn(train_fn(natural(h), key)), evaluated once, outside of jit.

    grads: like `hypers`, in the coordinates in which it is stored (unconstrained for domains), zero where `hg.fixed`. key:
    `jax.random.key(0)` if None. Raises a `HypergradError` if training fails or the gradient is not finite.
    """
    hypers = check_hypers(hypers)
    learned, fixed = split_fixed(hypers)
    value, grads, failure = _Evaluation(train_fn, val_fn, fixed, jit=False)(learned, _key(key))
    if failure is not None:
        raise failure
    _check_finite(value, grads)
    _warn_unused(grads)
    return value, eqx.combine(grads, _zeros_like(fixed))


def optimize(
    train_fn: Callable[[Any, Array], Any],
    val_fn: Callable[[Any], Array],
    hypers: Any,
    *,
    meta_steps: int = 50,
    meta_optimizer: optax.GradientTransformation = optax.adam(0.04),  # noqa: B008 (immutable)
    key: Array | None = None,
    callbacks: Sequence[Callback] = (),
    jit: bool = True,
    skip_nonfinite: bool = False,
) -> Result:
    """h <- h + meta_optimizer(d/dh val_fn(train_fn(natural(h), key_i))), `meta_steps` times.

    train_fn(hypers in natural units, key) -> anything; val_fn(that) -> float scalar. hypers: pytree of domains
    (`hg.positive`, ...) and bare floats. key: meta-step i uses fold_in(key, i); None: `jax.random.key(0)`. callbacks: called
    with each `MetaStep`; a true result stops. jit: compile the evaluation once for all steps (and once more whenever the
    information buffer must grow); False runs it from Python, as host drivers need. skip_nonfinite: leave the hypers alone
    after an evaluation that diverged, instead of raising.
    """
    _check_arguments(meta_steps, meta_optimizer, callbacks)
    hypers = check_hypers(hypers)
    learned, fixed = split_fixed(hypers)
    evaluate = _Evaluation(train_fn, val_fn, fixed, jit)
    state, key, history = meta_optimizer.init(learned), _key(key), []
    update = jax.jit(functools.partial(_updated, meta_optimizer))
    for step in range(meta_steps):
        begin = time.perf_counter()
        value, grads, failure = evaluate(learned, jax.random.fold_in(key, step))
        failure = failure or _finite_failure(value, grads, step)
        if failure is not None and not skip_nonfinite:
            raise failure
        if step == 0 and failure is None:
            _warn_unused(grads)
        status = evaluate.ledger.summary()
        done = MetaStep(
            step, float(value), float(optax.tree.norm(grads)), time.perf_counter() - begin, status,
            float(status.bits) if status else 0.0, eqx.combine(learned, fixed),
        )  # fmt: skip
        history.append(done)
        if failure is None:
            learned, state = update(grads, state, learned)
        if any([callback(done) for callback in callbacks]):
            break
    best = min(history, key=lambda s: s.value if math.isfinite(s.value) else math.inf)
    return Result(eqx.combine(learned, fixed), best, history)


def _updated(meta_optimizer: optax.GradientTransformation, grads: Any, state: Any, learned: Any) -> tuple[Any, Any]:
    updates, state = meta_optimizer.update(grads, state, learned)
    return optax.apply_updates(learned, updates), state


class _Evaluation:
    """Value and gradient at (learned hypers, key), compiled once and again when the buffer must grow."""

    def __init__(self, train_fn: Any, val_fn: Any, fixed: Any, jit: bool) -> None:
        self.function = jax.value_and_grad(_objective(train_fn, val_fn))
        self.fixed, self.jit, self.ledger = fixed, jit, Ledger()
        self.compiled = self._compile()

    def _compile(self) -> Callable[..., Any]:
        if not self.jit:
            return lambda learned, key: self.function(learned, self.fixed, key)
        arrays, rest = eqx.partition(self.fixed, eqx.is_array)
        jitted = jax.jit(lambda learned, arrays, key: self.function(learned, eqx.combine(arrays, rest), key))
        return lambda learned, key: jitted(learned, arrays, key)

    def __call__(self, learned: Any, key: Array) -> tuple[Array, Any, HypergradError | None]:
        self.ledger.clear()
        try:
            with listen(self.ledger):
                value, grads = jax.block_until_ready(self.compiled(learned, key))
        except HypergradError as error:  # raised by a run outside of compiled code
            value, grads = jnp.nan, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), learned)
            self.ledger.failure = self.ledger.failure or error.status
        failure = self.ledger.failure
        if failure is not None and int(failure.code) == BUFFER_FULL and int(failure.words) > self.ledger.capacity:
            self.ledger.capacity = -(-5 * int(failure.words) // 4)  # a quarter more: learned decays drift
            self.compiled = self._compile()
            return self(learned, key)
        return value, grads, failure.error() if failure is not None else None


def _objective(train_fn: Any, val_fn: Any) -> Callable[[Any, Any, Array], Array]:
    for name, function, example in (
        ("train_fn", train_fn, "train_fn(hypers, key)"),
        ("val_fn", val_fn, "val_fn(trained)"),
    ):
        if not callable(function):
            raise TypeError(f"`{name}` must be a function {example}; got {type(function).__name__}.")

    def objective(learned: Any, fixed: Any, key: Array) -> Array:
        value = val_fn(train_fn(natural(eqx.combine(learned, fixed)), key))
        if not eqx.is_array_like(value):
            raise TypeError(f"`val_fn` must return one real float; got {type(value).__name__}. Return the number alone.")
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape != () or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"`val_fn` must return one real float; got {dtype.name}{list(shape)}. Take its mean or sum.")
        return value

    return objective


def _key(key: Array | None) -> Array:
    return jax.random.key(0) if key is None else key


def _zeros_like(fixed: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_inexact_array(x) else x, fixed)


def _check_arguments(meta_steps: Any, meta_optimizer: Any, callbacks: Any) -> None:
    if isinstance(meta_steps, bool) or not isinstance(meta_steps, int) or meta_steps < 1:
        raise ValueError(f"`meta_steps` must be an integer of at least 1; got {meta_steps!r}.")
    if not (hasattr(meta_optimizer, "init") and hasattr(meta_optimizer, "update")):
        raise TypeError(
            f"`meta_optimizer` must be an optax transformation like optax.adam(0.04); got {type(meta_optimizer).__name__}."
        )
    if not all(callable(c) for c in callbacks):
        raise TypeError("`callbacks` must be a sequence of functions of a MetaStep, e.g. [hg.callbacks.Progress()].")


def _finite_failure(value: Any, grads: Any, step: int) -> NonFiniteError | None:
    try:
        _check_finite(value, grads, f" at meta-step {step}")
    except NonFiniteError as error:
        return error
    return None


def _check_finite(value: Any, grads: Any, where: str = "") -> None:
    if not jnp.isfinite(value):
        raise NonFiniteError(
            f"the validation value is {float(value)}{where}, though training itself was fine: look at `val_fn`."
        )
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        if not jnp.all(jnp.isfinite(g)):
            raise NonFiniteError(
                f"the hypergradient of hypers{hyper_path(path)} is not finite{where}. Long or unstable training "
                "makes derivatives explode: lower the learning rates or the steps, clip with optax.clip_by_global_norm, or "
                "pass skip_nonfinite=True to hg.optimize."
            )


def _warn_unused(grads: Any) -> None:
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        if g.size and not jnp.any(g != 0):
            warnings.warn(
                f"the hypergradient of hypers{hyper_path(path)} is exactly zero everywhere: is it used? "
                "If it is not to be learned, wrap it in hg.fixed.",
                stacklevel=3,
            )
