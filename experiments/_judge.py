"""Is the hypergradient along `hg.Reversible` the one along `hg.Unrolled`? What every adversary of the library asks.

Both differentiate the same map of integers, so that in float64 they differ by the rounding of derivatives alone. The oracle
is compiled with few of XLA's optimizations, since it need not have the bits of anything; `hg.Reversible` as users do.
"""

import inspect
import math
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hypergrad as hg
from experiments import _quick


MODES = ("eager", "jit", "vmap")
LANES = 2  # of vmap

LIBRARY = pathlib.Path(inspect.getfile(hg.train)).parent


class Case(NamedTuple):
    """One question: the derivative of `value` in all of h, at a key."""

    value: Callable[[Any, Any, Any], jax.Array]  # (h, key, adjoint) -> scalar: training, and what is made of its result
    h: dict[str, Any]  # float leaves, or none: all of them are differentiated
    key: Any
    varied: tuple[str, ...] = ("key",)  # what differs between the lanes of vmap: names of h, or "key"

    def asking(self, *names: str) -> "Case":
        """The derivative in these alone."""
        chosen, rest = {k: self.h[k] for k in names}, {k: x for k, x in self.h.items() if k not in names}
        return self._replace(value=lambda h, *others: self.value({**rest, **h}, *others), h=chosen)

    def lane(self, i: int) -> tuple[dict[str, Any], Any]:
        """The arguments of one lane of vmap; lane 0 has those of the case."""
        h = {k: jax.tree.map(lambda x: x * (1 + i / 8), x) if k in self.varied else x for k, x in self.h.items()}
        return h, jax.random.fold_in(self.key, i) if i and "key" in self.varied else self.key


class Verdict(NamedTuple):
    """What came of one road, beside the oracle."""

    kind: str  # "equal", "isolated" (equal, with a warning), "refused", "diverged", "DIFFERENT", "CRASHED"
    detail: str = ""
    error: float = math.nan  # the worst of all leaves, relative

    @property
    def fine(self) -> bool:
        return self.kind in ("equal", "isolated", "diverged")


def reversed_gradients(case: Case, mode: str, adjoint: Any = None, **options: Any) -> list[tuple[Any, Any]]:
    """(value, gradient) of each lane along `hg.Reversible`. Modes: `MODES`, "eager vmap", `META_MODES`; "vmap" is jitted."""
    adjoint = adjoint or hg.Reversible()
    function = lambda h, key: jax.value_and_grad(case.value)(h, key, adjoint)  # noqa: E731
    if mode == "eager":
        return [function(*case.lane(0))]
    if mode in META_MODES:
        return [META_MODES[mode](case, adjoint)]
    if mode == "jit":
        return [jax.jit(function, **options)(*case.lane(0))]
    # Names that do not vary among those that are asked for are batched along no axis.
    lanes = [case.lane(i) for i in range(LANES)]
    axes = {k: 0 if k in case.varied else None for k in case.h}
    stack = lambda *xs: jnp.stack(xs)  # noqa: E731
    h = {k: x if axes[k] is None else jax.tree.map(stack, *(lane[k] for lane, _ in lanes)) for k, x in case.h.items()}
    key = jnp.stack([key for _, key in lanes]) if "key" in case.varied else case.key
    batched = jax.vmap(function, (axes, 0 if "key" in case.varied else None))
    found = (batched if mode == "eager vmap" else jax.jit(batched, **options))(h, key)
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(LANES)]


def by_hypergradient(case: Case, adjoint: Any) -> tuple[Any, Any]:
    return hg.hypergradient(lambda h, key: case.value(h, key, adjoint), lambda value: value, case.h, case.key)


def by_optimize(case: Case, adjoint: Any, scale: float = -1024.0) -> tuple[Any, Any]:
    """What one meta-step of steepest descent moves the hyperparameters by."""
    far = optax.scale(scale)
    found = hg.optimize(
        lambda h, key: case.value(h, key, adjoint),
        lambda value: value,
        case.h,
        meta_steps=1,
        meta_optimizer=far,
        key=case.key,
    )
    return found.history[0].value, jax.tree.map(lambda after, before: (after - before) / scale, found.hypers, case.h)


def by_pulls(case: Case, adjoint: Any) -> tuple[Any, Any]:
    """One of several derivatives of one run, as `jax.jacrev` takes them."""

    def several(h: Any) -> tuple[Any, Any]:
        value, pull = jax.vjp(lambda h: case.value(h, case.key, adjoint), h)
        return value, jax.vmap(lambda c: pull(c)[0])(jnp.array([2.0, 1.0], value.dtype))

    value, found = jax.jit(several)(case.h)
    return value, jax.tree.map(lambda x: x[1], found)


META_MODES = {"hypergradient": by_hypergradient, "optimize": by_optimize, "pulls": by_pulls}


def asked(case: Case, mode: str) -> list[tuple[dict[str, Any], Any]]:
    """(h, key) of each lane, as a mode has them."""
    if mode == "optimize":
        return [(case.h, jax.random.fold_in(case.key, 0))]
    return [case.lane(i) for i in range(LANES if "vmap" in mode else 1)]


def oracle(case: Case, quick: bool = True) -> Callable[..., tuple[Any, Any]]:
    """(h, key) -> (value, gradient) along `hg.Unrolled`, compiled once."""
    options = _quick.OPTIONS if quick and jax.default_backend() == "cpu" else None
    return jax.jit(lambda h, key: jax.value_and_grad(case.value)(h, key, hg.Unrolled()), compiler_options=options)


def distances(found: Any, expected: Any, floor: float = 1e-5) -> Iterator[tuple[str, float]]:
    """(path, relative error of the leaf by its norm), where a leaf counts as at least `floor` of the largest."""
    leaves = [(jax.tree_util.keystr(path), np.asarray(x, np.float64)) for path, x in paths(expected)]
    least = floor * max((float(np.linalg.norm(x)) for _, x in leaves), default=0.0) + 1e-12
    for (path, x), (_, y) in zip(leaves, paths(found), strict=True):
        apart = float(np.linalg.norm(np.asarray(y, np.float64) - x))
        yield path, apart / max(float(np.linalg.norm(x)), least)


def paths(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def finite(tree: Any) -> bool:
    return all(bool(np.isfinite(np.asarray(x, np.float64)).all()) for x in jax.tree.leaves(tree))


def refusal(error: BaseException) -> str | None:
    """The name of an error that the library raised in words of its own; None for one that it did not foresee."""
    if isinstance(error, hg.HypergradError):
        return type(error).__name__.removeprefix("hypergrad.")
    text = str(error)
    if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)) and "hypergrad." in text:  # JAX raises either
        return text.rsplit("hypergrad.", 1)[1].split(":")[0]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_by = trace is not None and pathlib.Path(trace.tb_frame.f_code.co_filename).is_relative_to(LIBRARY)
    return type(error).__name__ if raised_by and isinstance(error, (TypeError, ValueError)) else None


def attempt(function: Callable[[], Any]) -> tuple[Any, Verdict | None, list[str]]:
    """(what it returns, or None and the verdict on its error, warnings): computed to the end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, verdict = jax.block_until_ready(function()), None
        except Exception as e:  # noqa: BLE001  any at all: that is what is being looked for
            name, line = refusal(e), " ".join(str(e).split())
            found, verdict = (
                None,
                Verdict("refused", name) if name else Verdict("CRASHED", f"{type(e).__name__}: {line[:300]}"),
            )
    return found, verdict, [str(w.message) for w in caught]


def compare(found: list[Any], expected: list[Any], tolerance: float, said: list[str] = ()) -> Verdict:
    """Of the (value, gradient) of each lane."""
    if not finite(expected):
        return Verdict("diverged") if not finite(found) else Verdict("DIFFERENT", "finite, where the oracle is not")
    if not finite(found):
        return Verdict("DIFFERENT", "NaN or infinite without an error")
    errors = [(path, error) for a, b in zip(found, expected, strict=True) for path, error in distances(a[1], b[1])]
    path, worst = max(errors, key=lambda pair: pair[1], default=("", 0.0))
    of_value = max(abs(float(a[0]) - float(b[0])) / (abs(float(b[0])) + 1e-6) for a, b in zip(found, expected, strict=True))
    if of_value > tolerance:
        return Verdict("DIFFERENT", "the value", of_value)
    if worst > tolerance:
        wrong = sorted({path for path, error in errors if error > tolerance})
        return Verdict("DIFFERENT", f"{path}, and {len(wrong) - 1} other leaves" if len(wrong) > 1 else path, worst)
    return Verdict("isolated" if any("isolate" in line for line in said) else "equal", "", worst)


def judge(
    case: Case,
    names: tuple[str, ...],
    mode: str,
    tolerance: float,
    expected: Callable[..., Any] | None = None,
    adjoint: Any = None,
    **options: Any,
) -> Verdict:
    """`hg.Reversible`, asked for the derivatives in `names`, beside `expected`: what `oracle` gives for the case."""
    found, verdict, said = attempt(lambda: reversed_gradients(case.asking(*names), mode, adjoint, **options))
    if verdict is not None and verdict.detail not in ("RangeError", "NonFiniteError"):
        return verdict
    lanes = asked(case, mode)
    compute = expected or oracle(case)
    truth, failure, _ = attempt(lambda: [compute(*lane) for lane in lanes])
    if failure is not None and failure == verdict:
        return Verdict("diverged", verdict.detail)
    if failure is not None:
        return Verdict("CRASHED", f"the oracle: {failure.kind}, {failure.detail}")
    if verdict is not None:
        return verdict
    return compare(found, [(value, {k: gradient[k] for k in names}) for value, gradient in truth], tolerance, said)


def slope(case: Case, gradient: Any, seed: int = 0) -> tuple[float, float]:
    """(derivative along a random direction by `gradient`, the nearest difference of runs of `hg.train` to it).

    Every number moves in proportion to itself. Differences of fourth order, at distances of which one suits; a wrong
    derivative is near none of them.
    """
    rng = np.random.default_rng(seed)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * np.abs(x), x.dtype), case.h)
    claimed = sum(float(np.vdot(g, d)) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    moved = jax.jit(
        lambda by: case.value(jax.tree.map(lambda x, d: x + by * d, case.h, direction), case.key, hg.Reversible())
    )
    found = []
    for size in (1e-2, 3e-3, 1e-3, 3e-4, 1e-4):
        f = [float(moved(by * size)) for by in (-2.0, -1.0, 1.0, 2.0)]
        found.append((8 * (f[2] - f[1]) - (f[3] - f[0])) / (12 * size))
    return claimed, min(found, key=lambda x: abs(x - claimed))
