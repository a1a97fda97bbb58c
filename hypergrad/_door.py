"""Checks of the arguments of `train`, before anything runs: each error says what, where, and what to do next."""

import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._closures import name_of
from hypergrad._counterparts import nearest
from hypergrad._program_keys import contains
from hypergrad._programs import Program, owned
from hypergrad.adjoints.base import Adjoint
from hypergrad.batches import FullBatch, HostBatches, Minibatches, Stacked
from hypergrad.exact import STEPS
from hypergrad.hypers import describe, is_domain
from hypergrad.optimizers.chain import Optimizer
from hypergrad.optimizers.expand import concrete
from hypergrad.optimizers.statistics import Statistics
from hypergrad.schedules import PerStep, spread


_BATCH_CURE = "hg.minibatches(data, batch_size, key), hg.stacked(arrays) (leading axis = step) or hg.full_batch(data)"
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_FLAX_CURES = {  # by the name of flax's error: flax is not imported here
    "TraceContextError": "The loss changes a flax object that was made outside of it. A stream of random keys: pass a key "
    "in the batch and call model(x, rngs=nnx.Rngs(key)). Running statistics: nnx.merge(graph, params, rest, copy=True).",
    "ModifyScopeVariableError": "Running statistics are no parameters: make the layer with momentum=0, apply it with "
    "mutable=['batch_stats'], and return what it finds as the evidence of hg.train(..., statistics=...), or drop it.",
}


def check_kinds(loss: Any, optimizer: Any, batches: Any, adjoint: Any) -> None:
    if not callable(loss):
        raise TypeError(f"`loss` must be a function loss(params, theta, batch) -> scalar; got {describe(loss)}.")
    check_rule(optimizer)
    if not callable(batches):
        what = f"`batches` must be a function t -> batch; got {type(batches).__name__}."
        if hasattr(batches, "__iter__") and not isinstance(batches, (tuple, list, dict)) and not eqx.is_array_like(batches):
            raise TypeError(
                f"{what} An iterator gives a batch once, and the way back needs it again: collect its batches with "
                "hg.stacked(jax.tree.map(lambda *b: np.stack(b), *batches)), or load batch t with hg.host_batches(function)."
            )
        raise TypeError(f"{what} A bare tuple or array does not say what a step sees: wrap it in {_BATCH_CURE}.")
    if not isinstance(adjoint, Adjoint):
        raise TypeError(f"`adjoint` must be hg.Reversible(), hg.Unrolled() or hg.Checkpointed(); got {describe(adjoint)}.")
    check_signature("loss(params, theta, batch)", loss, "Without theta write loss(params, _, batch).")
    check_signature("batches(t)", batches, f"t is the step; or take {_BATCH_CURE}.")


def check_rule(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        if hasattr(optimizer, "update") and hasattr(optimizer, "init"):
            raise TypeError(
                f"`optimizer` is an optax transformation, which cannot be run backwards exactly. {nearest(optimizer)} optax "
                "belongs in hg.optimize(..., meta_optimizer=...)."
            )
        raise TypeError(f"`optimizer` must be a reversible optimizer such as hg.SGD(0.1, 0.9); got {describe(optimizer)}.")


def theta_by_steps(theta: Any, steps: int, name: str = "theta") -> tuple[Any, list[bool]]:
    """(theta as the loss has it, but for the leading axes of what is `PerStep`; of its float leaves, whether it has one)."""
    theta, is_per_step = spread(theta), lambda x: isinstance(x, PerStep)
    plain = jax.tree.map(lambda x: x.values if is_per_step(x) else x, theta, is_leaf=is_per_step)
    marks = jax.tree.map(lambda x: jax.tree.map(lambda _: is_per_step(x), x), theta, is_leaf=is_per_step)
    flags = []
    for (path, x), marked in zip(jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(marks), strict=True):
        where = f"{name}{jax.tree_util.keystr(path)} is hg.PerStep of"
        if marked and not eqx.is_inexact_array(x):
            raise TypeError(f"{where} {describe(x)}; it must be of float arrays. Others are picked by a t in the batch.")
        if marked and x.shape[:1] != (steps,):
            hint = "" if x.shape else " A list is a tree of its entries: make it an array, jnp.array([...])."
            raise ValueError(f"{where} shape {x.shape}; its leading axis must be steps={steps}.{hint}")
        if eqx.is_inexact_array(x):
            flags.append(marked)
    return plain, flags


def reject_domains(name: str, tree: Any) -> None:
    """`hg.train` computes in natural units; a domain's stored leaves would silently be taken for them."""
    if any(is_domain(x) for x in jax.tree.leaves(tree, is_leaf=is_domain)):
        raise TypeError(
            f"`{name}` holds a domain (hg.positive, ...), which stores an unconstrained value. hg.optimize and "
            "hg.hypergradient hand natural values to `train_fn`; if you call it, write train_fn(hg.natural(hypers), "
            "key)."
        )


def check_params(params: Any) -> Any:
    """The parameters with every leaf a real float array."""
    if not jax.tree.leaves(params):
        raise ValueError("`params` is empty: there is nothing to train. Pass a pytree of float arrays.")

    def check(path: Any, leaf: Any) -> Array:
        where = f"params{jax.tree_util.keystr(path)}"
        if isinstance(leaf, float):
            return jnp.asarray(leaf, jnp.result_type(float))
        if not eqx.is_array_like(leaf) or isinstance(leaf, (bool, int, complex)) or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"{where} is {describe(leaf)}, not an array of real floats. For a model with other leaves (functions, "
                "integers, ...), train its arrays only: params, static = equinox.partition(model, "
                "equinox.is_inexact_array) and equinox.combine in the loss (flax: nnx.split and nnx.merge)."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 2:
            raise TypeError(
                f"{where} is {describe(leaf)}; parameters are real floats of 16 bits or more. Keep other leaves out of "
                "`params`: equinox.partition(model, equinox.is_inexact_array), flax's nnx.split, or pass them through the "
                "batch; split a complex leaf into real and imaginary parts."
            )
        leaf = owned(leaf)
        return leaf.astype(leaf.dtype)  # a weak type would change dtype inside the loop

    return jax.tree_util.tree_map_with_path(check, params)


def check_metric(metric: Any) -> None:
    if not callable(metric):
        raise TypeError(f"`metric` must be a function metric(params, theta, batch, state, hypers); got {describe(metric)}.")


def check_steps(steps: Any, batches: Any) -> int:
    known = batches.steps if isinstance(batches, (Stacked, HostBatches)) else None
    if steps is None and known is None:
        raise ValueError(
            "`steps` is missing: only hg.stacked(arrays) and hg.host_batches(list) know how many steps there are. Pass "
            "steps=..."
        )
    if steps is None:
        return int(known)  # type: ignore[arg-type]
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)):
        raise TypeError(f"`steps` must be a Python integer, as int(...) makes, it fixes shapes; got {describe(steps)}.")
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1; got {steps}.")
    if steps > STEPS:
        raise ValueError(f"`steps` must be at most {STEPS}, what the status can count; got {steps}.")
    if isinstance(batches, HostBatches) and known is not None and steps > known:
        raise ValueError(f"`batches` ends early: hg.host_batches has {known} batches for steps={steps}. Pass fewer `steps`.")
    if isinstance(batches, Stacked) and steps != known:
        raise ValueError(
            f"steps={steps} contradicts `batches`: hg.stacked has {known} along its leading axis. A list of batches is "
            "a pytree to it: stack them first, jax.tree.map(lambda *b: np.stack(b), *batches)."
        )
    return int(steps)


def check_signature(call: str, function: Any, otherwise: str) -> None:
    """`call`: how the library calls it, such as "loss(params, theta, batch)"."""
    name, count = call.partition("(")[0], call.count(",") + 1
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as e:
        arguments = ("one argument", "two arguments", "three arguments", "four arguments", "five arguments")[count - 1]
        raise TypeError(
            f"`{name}` must take {arguments}, {call}; {name_of(function)} has the signature "
            f"{inspect.signature(function)}. {otherwise}"
        ) from e
    except ValueError:
        pass  # a builtin without a signature: calling it will tell


def check_pure(batches: Any, traced: tuple[Program, list[Any]], again: Callable[[], tuple[Program, list[Any]]]) -> None:
    """`batches` must trace to the same program each time, on the same constants, and act on nothing."""
    if isinstance(batches, (FullBatch, HostBatches, Minibatches, Stacked)):
        return
    if contains(traced[0].jaxpr, "io_callback"):
        what = "it calls Python by jax.experimental.io_callback, which may act or be left out"
    elif not _alike(traced, again()):
        what = "called twice for the same step, it made two different batches"
    else:
        return
    raise ValueError(
        f"`batches` ({name_of(batches)}) has side effects: {what}. It must be a pure function of t: the way back needs "
        "batch t again. Make random numbers from jax.random.fold_in(key, t), and load data with hg.host_batches."
    )


def _alike(first: tuple[Program, list[Any]], again: tuple[Program, list[Any]]) -> bool:
    """The same program on the same constants; functions in it count as one if they print as one."""
    text = lambda program: re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr))  # noqa: E731
    if first[0] != again[0] and text(first[0]) != text(again[0]):
        return False
    data = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)  # noqa: E731
    bits = lambda x: (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())  # noqa: E731 (NaN is no sign of change)
    pairs = zip(first[1], again[1], strict=False)
    return all(x is y or (concrete((x, y)) and bits(data(x)) == bits(data(y))) for x, y in pairs)


@contextlib.contextmanager
def calling_batches(batches: Any) -> Iterator[None]:
    """The step is traced, so Python's `int`, `if` and indexing cannot read it: say what can."""
    try:
        yield
    except _NEEDS_A_VALUE as e:
        raise TypeError(
            f"`batches` ({name_of(batches)}) asks for the value of t, which is traced: training is compiled as one loop. "
            "Index JAX arrays (jnp.asarray(data)[t]), stack a list of batches for hg.stacked, choose with jnp.where, or "
            "load from Python with hg.host_batches."
        ) from e


@contextlib.contextmanager
def calling(call: str, *arguments: Any) -> Iterator[None]:
    """An error out of the user's function keeps its class and text, and gets a note of what the function was given."""
    try:
        yield
    except Exception as e:
        given = dict(zip(call.partition("(")[2].rstrip(")").split(", "), arguments, strict=True))
        lines = [f"  {name} = {outlined(x)}" for name, x in given.items()]
        e.add_note("\n".join([f"`{call}` was called by hypergrad with", *lines, *_hints(e, given)]))
        raise


def _hints(error: Exception, arguments: dict[str, Any]) -> Iterator[str]:
    if type(error).__name__ in _FLAX_CURES:
        yield _FLAX_CURES[type(error).__name__]
    if "NoneType" not in str(error):
        return
    if arguments.get("theta", ()) is None:
        yield "theta is what hg.train(..., theta=...) was given, and stands between params and batch."
    if any(x is None for x in jax.tree.leaves(arguments.get("params"), is_leaf=lambda x: x is None)):
        yield "A model that equinox.partition took apart is put together with equinox.combine(params, static)."


def outlined(tree: Any) -> str:
    """Structure, shapes and dtypes of a pytree, on one line."""
    return textwrap.shorten(eqx.tree_pformat(tree, width=10_000), 300, placeholder=" ...")


def check_loss_value(value: Any, theta: Any = None, steps: int = 0) -> None:
    """`value`: what the loss returns, as `jax.eval_shape` knows it. theta: as it was given."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        kind = type(value).__name__
        raise TypeError(
            f"`loss` must return one scalar; got a {kind}. Return the loss alone: hg.train differentiates it. (A second "
            "result, statistics of the batch, goes with hg.train(..., statistics=...).)"
        )
    if value.shape != ():
        leaves = jax.tree_util.tree_leaves_with_path(theta, is_leaf=lambda x: isinstance(x, PerStep))
        tables = [path for path, x in leaves if steps and getattr(x, "shape", ())[:1] == (steps,) == value.shape[:1]]
        cure = "Take its mean or sum."
        if tables:
            where = f"theta{jax.tree_util.keystr(tables[0])}"
            cure = f"{where} has a leading axis of steps={steps}: hg.PerStep({where}) gives the loss the step's own value."
        raise ValueError(f"`loss` must return a scalar; got shape {value.shape}. {cure}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"`loss` must return a real float; got {value.dtype.name}.")


def check_statistics(statistics: Any) -> Statistics:
    """The `statistics` of `train` with every initial value a real float array."""
    given = statistics if isinstance(statistics, Statistics) else Statistics(statistics)
    if not jax.tree.leaves(given.values):
        raise ValueError("`statistics` is empty. Pass a pytree of float arrays, or leave it out.")

    def check(path: Any, leaf: Any) -> Array:
        dtype = jnp.result_type(leaf) if eqx.is_array_like(leaf) else np.dtype(object)
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            raise TypeError(
                f"statistics{jax.tree_util.keystr(path)} is {describe(leaf)}; running statistics are real floats, of 16 "
                "bits or more. What else a layer keeps (a count of steps, say) stays out of them."
            )
        leaf = owned(leaf)
        return leaf.astype(leaf.dtype)  # a weak type would change dtype inside the loop

    return Statistics(jax.tree_util.tree_map_with_path(check, given.values), given.decay)


def check_evidence(returned: Any, statistics: Any) -> Any:
    """The loss among `returned`, what it returns as `jax.eval_shape` knows it; beside it there is evidence."""
    pair = "With `statistics` given, `loss` must return two things, the loss and the evidence for them"
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        what = shaped(returned) if isinstance(returned, jax.ShapeDtypeStruct) else f"a {type(returned).__name__}"
        raise TypeError(f"{pair}: `return value, evidence`; got {what}.")
    value, evidence = returned
    expected: Any = jax.tree.structure(statistics)
    if jax.tree.structure(evidence) != expected:
        raise ValueError(f"{pair}, a pytree like them: {expected}; got {jax.tree.structure(evidence)}.")
    for (path, s), e in zip(jax.tree_util.tree_leaves_with_path(statistics), jax.tree.leaves(evidence), strict=True):
        if e.shape != s.shape or not jnp.issubdtype(e.dtype, jnp.floating):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"evidence{where} is {shaped(e)}, and statistics{where} is {shaped(s)}. What a statistic follows is a "
                "float array of its own shape: take the mean over the batch."
            )
    return value


def shaped(x: Any) -> str:
    return f"{x.dtype.name}{list(x.shape)}"
