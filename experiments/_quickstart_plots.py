"""The quickstart's pictures."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib


matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # told apart by colour-blind eyes too


def draw(folder: pathlib.Path, start: Any, learned: Any, history: Sequence[Any], side: int) -> list[pathlib.Path]:
    """Write schedules.png, meta_learning.png and penalties.png; returns their paths."""
    figures = {
        "schedules": _schedules(start, learned),
        "meta_learning": _meta_learning(history),
        "penalties": _penalties(learned, side),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def _schedules(start: Any, learned: Any) -> Any:
    figure, (rates, momenta) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for colour, (name, schedule) in zip(COLOURS, learned["learning_rate"].items(), strict=False):
        rates.plot(schedule.values, color=colour, label=name.replace("_", " "))
    first = next(iter(start["learning_rate"].values())).values
    rates.plot(first, color="grey", linestyle="--", label="start")
    rates.set(xlabel="training step", ylabel="learning rate", title="learned learning rates")
    momenta.plot(learned["momentum"].values, color=COLOURS[0], label="learned")
    momenta.plot(start["momentum"].values, color="grey", linestyle="--", label="start")
    momenta.set(xlabel="training step", ylabel="momentum", title="learned momentum")
    for axes in (rates, momenta):
        axes.legend(frameon=False)
    return figure


def _meta_learning(history: Sequence[Any]) -> Any:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([s.step for s in history], [s.value for s in history], color=COLOURS[0])
    axes.set(xlabel="meta-step", ylabel="validation loss (nats)", title="meta-learning curve, a fresh seed each step")
    return figure


def _penalties(learned: Any, side: int) -> Any:
    images = np.asarray(learned["penalties"]["layer_1"]["weights"]).T.reshape(-1, side, side)[:32]
    low, high = np.percentile(images, [2, 98])
    figure, grid = plt.subplots(4, 8, figsize=(9, 5), layout="constrained")
    for axes, image in zip(grid.flat, images, strict=False):
        shown = axes.imshow(image, vmin=low, vmax=high, cmap="viridis")
        axes.set_axis_off()
    figure.colorbar(shown, ax=grid, label="L2 penalty", shrink=0.8)
    figure.suptitle("learned penalties of the first layer, one image per hidden unit")
    return figure
