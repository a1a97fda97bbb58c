"""The pictures of `optimizer_race`: who gains how much, and what the mixture is made of."""

from typing import Any

import numpy as np

from experiments import _plots
from experiments._plots import COLOURS, GREY


_LOOKS = {"searched": ("o", GREY), "searched on": ("s", GREY), "learned": ("D", COLOURS[0])}
_NAMES = {"searched": "constants, 16 trials", "searched on": "constants, 48 trials", "learned": "16 trials, then learned"}


def figures(laps: Any, parts: tuple[str, ...]) -> dict[str, Any]:
    """laps: task -> rule -> [seeds]"""
    found = {"losses": (_losses(laps), "Test losses: means over seeds, and each seed")}
    if all("mixture" in of for of in laps.values()):
        caption = "Shares of three optimizers in the steps of the learned mixture, means over seeds; a third each at first"
        found["mixture"] = (_mixtures({task: of["mixture"] for task, of in laps.items()}, parts), caption)
    return found


def _losses(laps: Any) -> Any:
    figure, grid = _plots.panels(len(laps), size=(4.6, 3.6))
    for ax, (task, of) in zip(grid, laps.items(), strict=True):
        for i, own in enumerate(of.values()):
            for k, (way, (marker, color)) in enumerate(_LOOKS.items()):
                values = [lap.losses[way][1] for lap in own]
                place = i + 0.22 * (k - 1)
                ax.plot(values, [place] * len(values), ".", color=color, markersize=4)
                filled = color if way != "searched on" else "white"
                ax.plot(
                    np.mean(values), place, marker, color=color, markerfacecolor=filled, label=_NAMES[way] if not i else None
                )
        ax.set_yticks(range(len(of)), list(of))
        ax.invert_yaxis()
        ax.set(title=task, xlabel="test loss (nats)")
    grid[0].legend(fontsize=7, loc="lower right")
    return figure


def _mixtures(laps: Any, parts: tuple[str, ...]) -> Any:
    figure, grid = _plots.panels(len(laps), size=(4.2, 3.2))
    for ax, (task, own) in zip(grid, laps.items(), strict=True):
        rates = np.stack([[np.asarray(lap.hypers[part].values) for part in parts] for lap in own])  # [seeds, parts, steps]
        shares = (rates / rates.sum(axis=1, keepdims=True)).mean(axis=0)
        names = [part.removesuffix("_rate") for part in parts]
        ax.stackplot(np.arange(shares.shape[1]), shares, labels=names, colors=COLOURS[: len(parts)], alpha=0.8)
        ax.set(title=task, xlabel="step", ylim=(0, 1), xlim=(0, shares.shape[1] - 1))
    grid[0].set_ylabel("share of the step")
    grid[0].legend(fontsize=8, loc="upper right")
    return figure
