"""A hypergradient against what really happens along a direction: is it the derivative, and how far does it reach?

Invariant: both sides are computed with one key, so that they belong to the same function of the hyperparameters.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from hypergrad._average import norm, widened
from hypergrad._differences import central, check_like, check_step, extrapolated, moved
from hypergrad._evaluate import default_key, objective
from hypergrad._optimize import hypergradient
from hypergrad.errors import HypergradError
from hypergrad.hypers import check_hypers, is_domain, split_fixed


_HALVINGS = 7
_ASKED = 5  # the place of the step that is asked about, on the ladder of sizes
_SETTLED = 0.05  # differences that vary by more than this share of themselves have not settled on a derivative
_FAITHFUL = 0.1  # a prediction is trusted while it is off by at most this share


class GradientCheck(NamedTuple):
    """A hypergradient held against differences along a direction; `print` it for the sentences."""

    verdict: Literal["agrees", "disagrees", "the difference is too noisy to tell"]
    derivative: float  # along the direction, from the hypergradient
    difference: float  # the same from runs nearby
    relative_error: float
    noise: float  # how far the difference itself may be off: how much it varies with the step size
    step: float  # the size at which the difference varied least
    tolerance: float  # the relative error up to which they agree
    direction: str = "the sign of the gradient"

    def explain(self) -> str:
        """The verdict in sentences."""
        size = max(abs(self.difference), 1e-300)
        along = f"along {self.direction} the hypergradient gives {self.derivative:.6g}, "
        if math.isinf(self.noise):
            return f"{self.verdict}: {along}{_LOST}"
        numbers = (
            f"differences of nearby runs {self.difference:.6g} with an uncertainty of {self.noise:.1g} "
            f"({self.noise / size:.1g} of it), taken at steps of {self.step:.3g}. "
        )
        return f"{self.verdict}: {along}{numbers}{_CHECK_SENTENCES[self.verdict](self)}"

    def __str__(self) -> str:
        return self.explain()


_LOST = (
    "and nearby runs fail, or differ by less than the rounding of their value. Pass another `step` (decays move by 2^-16), "
    "compute in float64 (jax.enable_x64), or start where the hyperparameters matter for the value."
)

_CHECK_SENTENCES: dict[str, Callable[[GradientCheck], str]] = {
    "agrees": lambda c: f"They differ by {c.relative_error:.1g}, within {c.tolerance:.1g}.",
    "disagrees": lambda c: (
        f"They differ by {c.relative_error:.1g}, more than {c.tolerance:.1g} and more than the uncertainty: the gradient is "
        "not the derivative of this function, or the function has kinks within the steps. For the first look for "
        "jax.lax.stop_gradient, a custom derivative rule, rounding or integers in `train_fn` or `val_fn`, and values that "
        "depend on more than (hypers, key); hg.Truncated and a constant preconditioner leave out a part of it. Kinks are in "
        "relu, in a clip near its threshold, in Adam where a gradient is zero, and in a run that hg.diagnose calls "
        "exploding: a smaller `step` in float64 tells, and adjoint=hg.Unrolled()."
    ),
    "the difference is too noisy to tell": lambda c: (
        "The differences do not settle, so they can neither confirm nor refute it. Compute in float64 (jax.enable_x64), "
        "pass another `step`, or take fewer training steps: after long unstable training (hg.diagnose tells) no step is "
        "both small enough for the derivative and large enough for the rounding."
    ),
}


class Smoothness(NamedTuple):
    """How well a hypergradient predicts what a step along it does; `print` it for the sentences."""

    step: float  # the size asked about: the largest change of any hyperparameter
    ratio: float  # actual change / predicted change of the value at `step`; 1 is perfect, negative the wrong way
    cosine: float  # between the hypergradients at both ends of the step
    same_sign: float  # share of the hypergradient's magnitude in coordinates that keep their sign
    trusted_step: float  # the largest size up to which predictions are within 10 %; 0 if none of `sizes` is
    sizes: np.ndarray  # the ladder of step sizes, [8], ascending up to 4 `step`
    predicted: np.ndarray  # g . d for each size
    actual: np.ndarray  # f(h + d) - f(h) for each size; NaN where training fails
    rounding: float = 0.0  # of the value: predictions below it are not seen

    def explain(self) -> str:
        """What that means for the meta-loop."""
        if math.isnan(self.ratio):
            return (
                f"rough: a step of {self.step:.3g} leads to hyperparameters with which training fails. Take a smaller one."
            )
        if (foreseen := abs(float(self.predicted[_ASKED]))) <= self.rounding:
            return (
                f"flat: a step of {self.step:.3g} against the hypergradient should change the value by {foreseen:.1g}, and "
                f"its rounding is {self.rounding:.1g}: whether predictions hold cannot be seen. The hyperparameters hardly "
                "matter here: begin where they do, take a larger `step`, or compute in float64 (jax.enable_x64)."
            )
        moved_by = (
            f"a step of {self.step:.3g} against the hypergradient changes the value by {self.ratio:.2f} of the prediction"
        )
        turned = f"the hypergradient at its end has cosine {self.cosine:.2f} with the first"
        reach = f"predictions hold to 10 % up to steps of {self.trusted_step:.2g}"
        reach = reach if self.trusted_step else f"no prediction holds to 10 %, down to steps of {self.sizes[0]:.2g}"
        if 0.5 < self.ratio < 2 and self.cosine > 0.5:
            return f"smooth: {moved_by}, and {turned}; {reach}. Steps of this size are safe."
        cure = "Take a smaller meta-step"
        if self.trusted_step < self.step / 8:
            cure += ", or make training smoother: lower its learning rate or take fewer steps (hg.diagnose says where)"
        return f"rough: {moved_by}, and {turned}; {reach}. {cure}."

    def __str__(self) -> str:
        return self.explain()


def check_gradient(
    train_fn: Callable[[Any, Array], Any],
    val_fn: Callable[[Any], Array],
    hypers: Any,
    key: Array | None = None,
    *,
    step: float = 2.0**-3,
    tolerance: float = 5e-3,
    gradient: Any = None,
) -> GradientCheck:
    """The hypergradient against central differences of nearby training runs, along the sign of the gradient: 16 runs, and
    where they agree 8 more, in which each entry moves by another share, as entries that are exchanged show in these alone.

    The arguments of `hg.hypergradient`. step: the largest of the step sizes, halved seven times; a power of two. A domain
    moves by it in its stored coordinate, a bare leaf by it times its own magnitude (rounded down to a power of two, so
    that momenta stay on their grid of 2^-16). The difference is extrapolated from two sizes, and taken where it varies
    least from size to size; that variation, or what rounding of the values takes, is its uncertainty. gradient: checked in
    place of the hypergradient, if given.
    """
    check_step(step)
    hypers = check_hypers(hypers)
    if gradient is None:
        _, gradient = hypergradient(train_fn, val_fn, hypers, key)
    learned, _ = split_fixed(hypers)
    slopes = check_like(split_fixed(gradient)[0], learned)
    rng = np.random.default_rng(0)

    def direction(unit: Any, g: Array) -> Array:
        # Every hyperparameter moves, and none cancels another: an error anywhere counts with its full share.
        known = jnp.isfinite(g) & (g != 0)
        return unit * jnp.where(~known, jnp.asarray(rng.choice([-1.0, 1.0], g.shape), g.dtype), jnp.sign(g))

    d = jax.tree.map(direction, _units(hypers), slopes)
    value = _value(train_fn, val_fn, hypers, key)
    sizes = step * 2.0 ** -np.arange(_HALVINGS + 1)
    along = _checked(value, learned, slopes, d, sizes, tolerance)
    if along.verdict != "agrees" or sum(x.size for x in jax.tree.leaves(slopes)) < 2:
        return along
    best = int(np.argmin(abs(sizes - along.step)))
    again = _checked(value, learned, slopes, jax.tree.map(_shared_out(d), d), sizes[best - 1 : best + 3], tolerance)
    other = again._replace(direction="the sign of the gradient, by a share of each entry's own,")
    return other if other.verdict == "disagrees" else along


def _shared_out(d: Any) -> Callable[[Array], Array]:
    """Entry by entry, a share of the direction: eighths, so that momenta stay on their grid; of 16 bits all."""
    rng = np.random.default_rng(1)
    shares = iter(rng.permuted(np.resize(np.arange(4, 9) / 8, sum(x.size for x in jax.tree.leaves(d)))).tolist())

    def share(x: Array) -> Array:
        own = np.reshape([next(shares) for _ in range(x.size)], x.shape)
        return x if jnp.finfo(x.dtype).bits < 32 else x * jnp.asarray(own, x.dtype)

    return share


def _checked(
    value: Callable[[Any], Array], learned: Any, slopes: Any, d: Any, sizes: np.ndarray, tolerance: float
) -> GradientCheck:
    """sizes: of steps along d, each half of the one before; at least four."""
    differences, rounding = np.array([central(value, learned, d, float(size)) for size in sizes]).T
    windows, lost = (np.lib.stride_tricks.sliding_window_view(x, 3) for x in (
        extrapolated(differences[:-1], differences[1:]), extrapolated(-rounding[:-1], rounding[1:])
    ))  # fmt: skip
    noises = np.maximum((windows.max(axis=1) - windows.min(axis=1)) / 2, lost.max(axis=1))
    best = int(np.argmin(noises := np.where(np.isnan(noises), math.inf, noises)))
    derivative, difference, noise = _dot(slopes, d), float(np.median(windows[best])), float(noises[best])
    error = abs(derivative - difference)
    if not math.isfinite(derivative):  # it is no derivative, whatever the differences are
        error = math.inf
    allowed = tolerance * (max(abs(difference), abs(derivative)) if math.isfinite(derivative) else abs(difference))
    verdict: Any = "the difference is too noisy to tell"
    if noise <= allowed and error <= allowed:
        verdict = "agrees"
    elif noise <= _SETTLED * abs(difference) and error > allowed + 3 * noise:
        verdict = "disagrees"
    relative = error / max(abs(difference), abs(derivative), 1e-300)
    return GradientCheck(verdict, derivative, difference, relative, noise, float(sizes[best + 1]), tolerance)


def check_smoothness(
    train_fn: Callable[[Any, Array], Any],
    val_fn: Callable[[Any], Array],
    hypers: Any,
    key: Array | None = None,
    *,
    step: float = 0.05,
) -> Smoothness:
    """How far a hypergradient can be followed: f(h + d) - f(h) against g . d, and the hypergradient at both ends.

    d = -g scaled so that no hyperparameter moves by more than `step`: in its stored coordinate for a domain (0.05 is 5 %
    of a learning rate), relative to its magnitude for a bare leaf. `step` is about the learning rate of the meta-optimizer,
    for those like Adam. Two hypergradients, and eight training runs for a ladder of sizes from step / 32 to 4 step.
    Agreement of gradients at both ends is the metasmoothness of Engstrom et al. (2025).
    """
    check_step(step)
    hypers = check_hypers(hypers)
    learned, fixed = split_fixed(hypers)
    start, gradient = hypergradient(train_fn, val_fn, hypers, key)
    slopes, _ = split_fixed(gradient)
    steepest = jax.tree.map(lambda g, unit: g / unit, slopes, _units(hypers))
    largest = max((float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(steepest) if x.size), default=0.0)
    if largest == 0:
        raise ValueError(
            "hg.check_smoothness has no direction to follow: the hypergradient is zero. Does `val_fn` use what was trained, "
            "and training the hyperparameters?"
        )
    d = jax.tree.map(lambda g: -g / largest, slopes)
    value = _value(train_fn, val_fn, hypers, key)
    sizes = step * 2.0 ** np.arange(-_ASKED, 3)
    predicted = sizes * _dot(slopes, d)
    actual = np.array([float(value(moved(learned, d, float(s)))) for s in sizes]) - float(start)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = actual / predicted
    rounding = 4 * float(jnp.finfo(start.dtype).eps) * abs(float(start))
    lost = np.abs(predicted) <= rounding
    faithful = (np.abs(ratios - 1) <= _FAITHFUL) | (lost & ~lost.all())
    rungs = int(np.argmin(faithful)) if not faithful.all() else len(sizes)
    cosine, same_sign = _ends(train_fn, val_fn, moved(learned, d, step), fixed, key, slopes)
    trusted = float(sizes[rungs - 1]) if rungs else 0.0
    return Smoothness(step, float(ratios[_ASKED]), cosine, same_sign, trusted, sizes, predicted, actual, rounding)


def _ends(train_fn: Any, val_fn: Any, there: Any, fixed: Any, key: Array | None, slopes: Any) -> tuple[float, float]:
    """(cosine, share of |g| that keeps its sign) between the hypergradient here and there; NaN if there is none there."""
    try:
        _, gradient = hypergradient(train_fn, val_fn, eqx.combine(there, fixed), key)
    except (HypergradError, jax.errors.JaxRuntimeError):
        return math.nan, math.nan
    slopes, other = widened((slopes, split_fixed(gradient)[0]))
    both = float(norm(slopes)) * float(norm(other))
    magnitude = jax.tree.map(lambda g: jnp.abs(g), slopes)
    same = _dot(magnitude, jax.tree.map(lambda a, b: jnp.asarray(jnp.sign(a) == jnp.sign(b), a.dtype), slopes, other))
    return _dot(slopes, other) / max(both, 1e-300), same / max(float(optax.tree.sum(magnitude)), 1e-300)


def _value(train_fn: Any, val_fn: Any, hypers: Any, key: Array | None) -> Callable[[Any], Array]:
    """The validation value as a function of the learned hyperparameters; NaN where training fails."""
    _, fixed = split_fixed(hypers)
    f = objective(train_fn, val_fn)

    def value(learned: Any) -> Array:
        try:
            return f(learned, fixed, default_key(key))[0]
        except (HypergradError, jax.errors.JaxRuntimeError):  # the latter where `train_fn` jits
            return jnp.asarray(jnp.nan)

    return value


def _units(hypers: Any) -> Any:
    """What a step of 1 means for each learned leaf: 1 in a domain, its magnitude (down to a power of two) for a bare one."""

    def unit(x: Any) -> Any:
        if is_domain(x):
            return jax.tree.map(jnp.ones_like, x)
        magnitude = np.abs(np.asarray(x, np.float64))
        return jnp.asarray(np.exp2(np.floor(np.log2(np.where(magnitude == 0, 1, magnitude)))), x.dtype)

    learned, _ = split_fixed(hypers)
    return jax.tree.map(unit, learned, is_leaf=is_domain)


def _dot(a: Any, b: Any) -> float:
    """The inner product, summed in float64."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(sum(np.vdot(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs))
