"""The pictures of `curvature_optimizers`: test losses, training curves, and the dampings that were learned."""

from typing import Any

import numpy as np

from experiments import _plots
from experiments._plots import COLOURS, DASHES, GREY


def figures(numbers: Any) -> dict[str, Any]:
    """numbers: problem -> rule -> way -> {"test" [seeds], "curves" [seeds, steps], "points" [seeds]}"""
    return {
        "losses": (_losses(numbers), "Test losses of rules from a grid (grey) and learned: means, and each seed"),
        "curves": (_curves(numbers), "Training losses, means over seeds and eleven steps: the grid's best, and learned"),
        "schedules": (
            _schedules(numbers),
            "Learned rates (full) and dampings (dashed), each seed; dotted: where they began",
        ),
    }


def _losses(numbers: Any) -> Any:
    figure, grid = _plots.panels(len(numbers), size=(4.4, 3.2))
    for ax, (name, of) in zip(grid, numbers.items(), strict=True):
        values = {f"{rule}, {way}": found["test"] for rule, ways in of.items() for way, found in ways.items()}
        _plots.bars(ax, values, grey=[key for key in values if key.endswith("grid")])
        ax.set(title=name, xlabel="test loss (nats)")
    return figure


def _curves(numbers: Any) -> Any:
    figure, grid = _plots.panels(len(numbers), size=(4.6, 3.4))
    for ax, (name, of) in zip(grid, numbers.items(), strict=True):
        for i, (rule, ways) in enumerate(of.items()):
            for way, found in ways.items():
                mean = np.mean(found["curves"], axis=0)
                width = min(11, len(mean))
                smooth = np.convolve(mean, np.ones(width) / width, "valid")
                style = {"color": COLOURS[i % len(COLOURS)], "linestyle": "-" if way == "learned" else DASHES[1]}
                ax.plot(np.arange(len(smooth)) + width // 2, smooth, label=f"{rule}, {way}", **style)
        ax.set(title=name, xlabel="step", yscale="log")
        _plots.plain_log(ax.yaxis)
    grid[0].set_ylabel("training loss (nats)")
    grid[0].legend(fontsize=7)
    return figure


def _schedules(numbers: Any) -> Any:
    learned = {
        f"{name}, {rule}": ways["learned"] for name, of in numbers.items() for rule, ways in of.items() if "learned" in ways
    }
    figure, grid = _plots.panels(len(learned), size=(3.6, 3.2))
    for ax, (title, found) in zip(grid, learned.items(), strict=True):
        for point in found["points"]:
            ax.plot(point["rate"], color=COLOURS[0])
            ax.plot(point["damping"], color=COLOURS[1], linestyle=DASHES[1])
        for start in (1e-2, 10**-1.5):
            ax.axhline(start, color=GREY, linestyle=":")
        ax.set(title=title, xlabel="step", yscale="log")
    return figure
