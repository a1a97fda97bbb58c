"""Pictures of what was learned and how, each drawn into one matplotlib Axes and returned: `plots.learning(result)`.

Every function takes `ax`, an Axes to draw into; None makes a figure of its own. `ax.figure.savefig("picture.png")` saves it.
matplotlib is imported when the first picture is drawn; it comes with the extra "studies".
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from hypergrad.exact import DEFERRED, MOMENTUM_DENOMINATOR, WORD_BITS, numerator
from hypergrad.hypers import describe, natural
from hypergrad.optimizers.chain import PARAMS
from hypergrad.schedules import PerStep


# Okabe and Ito: told apart by colour-blind eyes too; from the seventh curve on the line is dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#767676"
_ONSET = {"exploding": "onset", "vanishing": "no influence before", "not finite": "NaN or infinite, from here back"}


def learning(results: Any, ax: Any = None) -> Any:
    """Validation value against meta-step, with the seeds' band of one standard error, and the monitored value dashed.

    results: a `Result`, a sequence of them, or {label: Result}.
    """
    ax = _axes(ax)
    runs = results if isinstance(results, Mapping) else {f"run {i}": r for i, r in enumerate(_listed(results), 1)}
    if other := [x for x in runs.values() if not hasattr(x, "history")]:
        raise TypeError(
            f"hg.plots.learning takes what hg.optimize returns, a list of it, or {{label: it}}; got {describe(other[0])}."
        )
    for (label, result), style in zip(runs.items(), _styles(), strict=False):
        label = label if len(runs) > 1 or runs is results else "validation"
        steps = [done.step for done in result.history]
        value, error, monitor = (
            np.array([getattr(done, field) for done in result.history]) for field in ("value", "value_error", "monitor")
        )
        (line,) = ax.plot(steps, value, label=label, **style)
        if np.any(error > 0):
            ax.fill_between(steps, value - error, value + error, color=line.get_color(), alpha=0.25, linewidth=0)
        if np.isfinite(monitor).any():
            name = "monitor" if len(runs) == 1 else f"{label}, monitor"
            ax.plot(steps, monitor, color=line.get_color(), linestyle=":", label=name)
    ax.set(xlabel="meta-step", ylabel="validation value")
    return _finished(ax)


def schedules(hypers: Any, ax: Any = None, *, start: Any = None) -> Any:
    """Every `PerStep` of `hypers` against the training step, in natural units.

    hypers: stored (domains) or natural, a whole tree or a part such as `result.hypers["learning_rate"]`. A schedule per
    weight is drawn as its median and a band from the 10th to the 90th percentile. start: a tree like `hypers`, drawn in
    grey.
    """
    if hasattr(hypers, "history"):
        raise TypeError("hg.plots.schedules takes hyperparameters, such as result.hypers; got what hg.optimize returns.")
    ax = _axes(ax)
    curves = _per_step(hypers)
    if not curves:
        raise ValueError("there is no hg.PerStep among `hypers`: nothing is scheduled.")
    before = [] if start is None else [values for _, values in _per_step(start)]
    # Dozens of starts are one and the same line: draw each once, under the learned ones.
    for i, values in enumerate({np.median(_flat(v), axis=1).tobytes(): v for v in before}.values()):
        ax.plot(np.median(_flat(values), axis=1), color=_GREY, linestyle="--", label="start" if i == 0 else None)
    for (label, values), style in zip(curves, _styles(), strict=False):
        flat = _flat(values)
        (line,) = ax.plot(np.median(flat, axis=1), label=label or "learned", **style)
        if flat.shape[1] > 1:
            low, high = np.percentile(flat, [10, 90], axis=1)
            ax.fill_between(np.arange(len(flat)), low, high, color=line.get_color(), alpha=0.25, linewidth=0)
    ax.set(xlabel="training step", ylabel="value (natural units)")
    return _finished(ax)


def images(
    values: Any, shape: tuple[int, int] | None = None, ax: Any = None, *, columns: int | None = None, label: str = ""
) -> Any:
    """Hyperparameters as images, side by side in one picture with a colour bar.

    values: [count, rows, columns], [rows, columns], or [..., *shape] or [..., pixels] with `shape` = (rows, columns) of an
    image, also in a domain. Colours are images of their own, one for each channel.
    Values of both signs get a diverging map with white at 0, others a sequential one; colours saturate at the 2nd and 98th
    percentile.
    label: of the colour bar.
    """
    if not eqx.is_array_like(values := natural(values)):
        raise TypeError(f"hg.plots.images takes one array, such as result.hypers['images']; got {describe(values)}.")
    values = np.asarray(values, np.float64)
    if shape is None and values.ndim > 3:
        raise ValueError(
            f"`values` of shape {values.shape} do not say which axes are an image's: pass shape=(rows, columns) if they are "
            "the last two; of images with channels at the end one channel at a time, values[..., 0]."
        )
    shape = values.shape[-2:] if shape is None else shape
    if len(shape) != 2 or not _are_images(values.shape, tuple(shape)):
        raise ValueError(f"`values` of shape {values.shape} are no images of shape {shape}: pass shape=(rows, columns).")
    if not values.size:
        raise ValueError(f"`values` of shape {values.shape} have no entry: there is no image to draw.")
    if columns is not None and columns < 1:
        raise ValueError(f"`columns` must be at least 1; got {columns}.")
    stack = values.reshape(-1, *shape)
    columns = columns or math.ceil(math.sqrt(len(stack) * shape[0] / shape[1] * 1.5))
    columns = min(columns, len(stack))
    rows = -(-len(stack) // columns)
    tall, wide = shape[0] + 1, shape[1] + 1  # a line of nothing between neighbours
    sheet = np.full((rows * tall - 1, columns * wide - 1), np.nan)
    for i, image in enumerate(stack):
        y, x = divmod(i, columns)
        sheet[y * tall : y * tall + shape[0], x * wide : x * wide + shape[1]] = image
    ax = _axes(ax, (6, 1 + 5 * sheet.shape[0] / sheet.shape[1]))
    low, high = np.nanpercentile(stack, [2, 98])
    signed = low < 0 < high
    low, high = (-max(-low, high), max(-low, high)) if signed else (low, high)
    shown = ax.imshow(sheet, vmin=low, vmax=high, cmap="RdBu_r" if signed else "viridis", interpolation="nearest")
    ax.figure.colorbar(shown, ax=ax, shrink=0.8, label=label).formatter.set_powerlimits((-2, 4))
    ax.set_axis_off()
    return ax


def cotangents(diagnosis: Any, ax: Any = None) -> Any:
    """Norm of each link's cotangent against the training step, of a `Diagnosis`; an unstable stretch is shaded."""
    if not hasattr(diagnosis, "norms"):
        raise TypeError(f"hg.plots.cotangents takes what hg.diagnose returns; got {describe(diagnosis)}.")
    ax = _axes(ax)
    for (link, norms), style in zip(sorted(diagnosis.norms.items(), key=lambda x: x[0] != PARAMS), _styles(), strict=False):
        ax.plot(np.where(norms > 0, norms, np.nan), label=link, **style)
    if diagnosis.onset is not None:
        label = f"{_ONSET[diagnosis.verdict]}: step {diagnosis.onset}"
        ax.axvline(diagnosis.onset, color=_GREY, linestyle="--", label=label)
    if diagnosis.until is not None:
        ax.axvspan(diagnosis.onset, diagnosis.until, color=_GREY, alpha=0.15, linewidth=0)
    ax.set(yscale="log", xlim=(0, len(diagnosis.losses)), title=diagnosis.verdict)
    ax.set(xlabel="training step", ylabel="norm of the cotangent")
    return _finished(ax)


def buffer(decays: Any, steps: int | None = None, ax: Any = None) -> Any:
    """Memory of the information buffer against the step, bits per parameter, and what theory asks for (dashed).

    decays: a number, a schedule (array [steps] or `PerStep`), a list of those, or {label: one of those}; numbers need
    `steps`. Solid: 16-bit words, where entries share their decay (6 bytes more where each has its own). Dashed: the sum of
    log2(1/decay); what is not yet a word waits in the integers.
    """
    decays = natural(decays)
    listed = decays if type(decays) in (list, tuple) else [decays]
    runs = decays if isinstance(decays, Mapping) else dict(enumerate(listed))
    for decay in runs.values():
        if not eqx.is_array_like(decay.values if isinstance(decay, PerStep) else decay):
            raise TypeError(
                f"hg.plots.buffer takes decays, such as 0.9 or result.hypers['momentum']; got {describe(decay)}."
            )
    ax = _axes(ax)
    for (label, decay), style in zip(runs.items(), _styles(), strict=False):
        rho = np.asarray(decay.values if isinstance(decay, PerStep) else decay, np.float64)
        if rho.ndim == 0 and steps is None:
            raise ValueError(f"`steps` is missing: the decay {float(rho)!r} is one number.")
        if rho.ndim > 1 or (rho.ndim == 1 and steps not in (None, len(rho))):
            raise ValueError(f"a decay is a number or an array [steps]; got shape {rho.shape} for steps={steps}.")
        if not rho.size or (steps is not None and steps < 1):
            raise ValueError(f"`steps` must be at least 1: there is nothing to draw of {steps if rho.size else 0} steps.")
        name = label if isinstance(label, str) else f"decay {float(rho):g}" if rho.ndim == 0 else "schedule"
        with jax.enable_x64(True):
            n = numerator(jnp.broadcast_to(rho, (steps or len(rho),)), MOMENTUM_DENOMINATOR)
            entries = DEFERRED.schedule(n, MOMENTUM_DENOMINATOR).entries
            words, ratio = np.asarray(entries.slot + entries.spills), np.asarray(n) / MOMENTUM_DENOMINATOR
        stands_for = (np.abs(ratio - rho) < 1 / MOMENTUM_DENOMINATOR) & (ratio < 1)
        if (wrong := np.broadcast_to(rho, ratio.shape)[~stands_for]).size:
            raise ValueError(
                "a decay is a ratio between 0 and 1, rounded to multiples of 2^-16, of which the buffer keeps what it "
                f"takes; got {wrong[0]:.10g}."
            )
        t = np.arange(1, len(ratio) + 1)
        ax.plot(t, WORD_BITS * words, drawstyle="steps-post", label=name, **style)
        ax.plot(t, np.cumsum(-np.log2(ratio)), color=style["color"], linestyle="--", linewidth=1)
    ax.plot([], [], color=_GREY, linestyle="--", linewidth=1, label="sum of log2(1/decay)")
    ax.set(xlabel="training step", ylabel="bits per parameter", ylim=(0, None))
    return _finished(ax)


def _are_images(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the last axes are an image's rows and columns, or the last axis its pixels: none begins within another."""
    return sizes[-2:] == shape or sizes[-1:] == (math.prod(shape),)


def _per_step(hypers: Any) -> list[tuple[str, np.ndarray]]:
    """(label, values [steps, ...]) of every `PerStep`, in natural units."""
    is_per_step = lambda x: isinstance(x, PerStep)  # noqa: E731
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(natural(hypers), is_leaf=is_per_step):
        if is_per_step(leaf):
            for inner, values in jax.tree_util.tree_leaves_with_path(leaf.values):
                found.append((_label((*path, *inner)), np.asarray(values, np.float64)))
    return found


def _label(path: Any) -> str:
    """['learning_rate']['layer_1'] -> "learning rate, layer 1"."""
    keys = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path)
    return ", ".join(str(k).replace("_", " ") for k in keys)


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1)


def _listed(results: Any) -> Sequence[Any]:
    return [results] if hasattr(results, "history") else list(results)


def _styles() -> Any:
    """Colour and line of one curve after the other, without end."""
    lines = itertools.chain(["-"], itertools.repeat("-."))
    return ({"color": colour, "linestyle": line} for line in lines for colour in COLOURS)


def _axes(ax: Any, size: tuple[float, float] = (6, 4)) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise ImportError("hypergrad.plots needs matplotlib: pip install matplotlib") from e
    return plt.subplots(figsize=size, layout="constrained")[1]


def _finished(ax: Any) -> Any:
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend(framealpha=0.8, edgecolor="none")
    return ax
