"""The pictures of `chaos`: Figure 6.10, and the growth of the cotangent behind it."""

from typing import Any, NamedTuple

import numpy as np

from experiments import _plots
from experiments._plots import COLOURS, DASHES, GREY


class Found(NamedTuple):
    """What `chaos` measures; rates are natural logarithms."""

    rates: np.ndarray  # [fine]
    losses: np.ndarray  # [fine], of one seed
    gradients: np.ndarray  # [fine]
    coarse: np.ndarray  # [coarse]
    all_losses: np.ndarray  # [seeds, coarse]
    all_gradients: np.ndarray  # [seeds, coarse]
    norms: np.ndarray  # [coarse, steps + 1]: of the cotangent of the parameters
    exponents: np.ndarray  # [coarse]: its growth per step, as a logarithm
    verdicts: list[str]  # of `hg.diagnose`, at the coarse rates
    onset: float  # the first rate whose derivative no longer leads to higher rates


def figures(found: Found) -> dict[str, Any]:
    seeds = len(found.all_losses)
    return {
        "curves": (_curves(found), f"Loss and derivative of one seed, and means of {seeds} with their standard errors"),
        "cotangents": (_cotangents(found), "The cotangent along the reverse pass, and its growth per step"),
    }


def _curves(found: Found) -> Any:
    figure, (top, bottom) = _plots.panels(1, 2, size=(7.5, 3.1))
    seeds = len(found.all_losses)
    for ax, one, many in (
        (top, found.losses, found.all_losses),
        (bottom, found.gradients, found.all_gradients),
    ):
        ax.plot(found.rates, one, color=COLOURS[0], linewidth=1, label="one seed")
        _plots.band(ax, found.coarse, many, color=COLOURS[1], linestyle="--", label=f"mean of {seeds} seeds", error=True)
        _mark_onset(ax, found)
    low, high = np.nanpercentile(found.losses, [0, 85])
    top.set(ylabel="training loss (nats)", ylim=(0, 1.1 * high), title="after training at a constant learning rate")
    calm = found.gradients[found.rates < found.onset] if found.onset == found.onset else found.gradients
    largest = 6 * np.nanmax(abs(calm), initial=1e-3)
    bottom.set(ylabel="d loss / d log alpha (nats)", ylim=(-largest, largest), xlabel="log of the learning rate alpha")
    bottom.axhline(0, color=GREY, linewidth=0.8)
    top.legend(loc="upper right")
    return figure


def _cotangents(found: Found) -> Any:
    figure, (left, right) = _plots.panels(2, size=(5.2, 3.6))
    chosen = np.unique(np.linspace(0, len(found.coarse) - 1, 6).astype(int))
    for i, k in enumerate(chosen):
        norms, style = found.norms[k], {"color": COLOURS[i], "linestyle": DASHES[i]}
        left.plot(np.where(norms > 0, norms, np.nan), label=f"log alpha {found.coarse[k]:.2f}", **style)
    left.set(yscale="log", xlabel="training step", ylabel="norm of the cotangent", title="going back: right to left")
    left.legend(fontsize=8)
    right.plot(found.coarse, found.exponents, "o-", color=COLOURS[0], markersize=4, label="one seed")
    bad = [verdict == "exploding" for verdict in found.verdicts]
    right.plot(found.coarse[bad], found.exponents[bad], "s", color=COLOURS[1], markersize=5, label="diagnosed as exploding")
    right.axhline(0, color=GREY, linewidth=0.8)
    _mark_onset(right, found)
    right.set(xlabel="log of the learning rate alpha", ylabel="growth per step (nats)", title="measured Lyapunov exponent")
    right.legend(fontsize=8)
    return figure


def _mark_onset(ax: Any, found: Found) -> None:
    if found.onset == found.onset:
        ax.axvline(found.onset, color=GREY, linestyle="--", linewidth=1, label=f"derivative turns: {found.onset:.2f}")
