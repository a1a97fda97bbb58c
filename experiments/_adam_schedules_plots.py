"""Pictures of learned AdamW schedules."""

import pathlib
from typing import Any

import matplotlib


matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt  # noqa: E402


COLOURS = {
    "AdamW, best constant": "#999999",
    "AdamW, cosine with warm-up": "#E69F00",
    "SGD, learned": "#009E73",
    "AdamW, learned": "#0072B2",
}
LABELS = {"learning_rate": "learning rate", "b1": "1 - b1", "b2": "1 - b2", "weight_decay": "weight decay"}


def draw(folder: pathlib.Path, methods: dict[str, Any]) -> list[pathlib.Path]:
    """Write adamw_schedules.png and comparison.png; returns their paths."""
    paths = []
    for name, figure in {"adamw_schedules": _schedules(methods), "comparison": _comparison(methods)}.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def _schedules(methods: dict[str, Any]) -> Any:
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.5), layout="constrained", sharex=True)
    for axes, (field, label) in zip(grid.flat, LABELS.items(), strict=True):
        for method in ("AdamW, best constant", "AdamW, cosine with warm-up", "AdamW, learned"):
            values = methods[method]["hypers"][field].values
            values = 1 - values if label.startswith("1 - ") else values
            style = "--" if method == "AdamW, cosine with warm-up" else "-"
            lines = axes.plot(values.T, color=COLOURS[method], linewidth=1.2, linestyle=style)
            lines[0].set_label(method)
        axes.set(yscale="log", ylabel=label)
    for axes in grid[1]:
        axes.set_xlabel("training step")
    grid[0, 0].legend(frameon=False)
    figure.suptitle("schedules of AdamW, one line per seed")
    return figure


def _comparison(methods: dict[str, Any]) -> Any:
    figure, (curves, meta, dots) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for method, colour in COLOURS.items():
        curves.plot(methods[method]["curves"].mean(axis=0), color=colour, label=method)
        if "values" in methods[method]:
            meta.plot(methods[method]["values"], color=colour, label=method)
        losses = methods[method]["numbers"]["test_loss"]
        dots.plot(losses, [method] * len(losses), "o", color=colour)
    curves.set(xlabel="training step", ylabel="training loss (nats)", yscale="log", title="training, mean over seeds")
    meta.set(xlabel="meta-step", ylabel="validation loss (nats)", title="meta-learning, mean over seeds")
    dots.set(xlabel="test loss (nats)", title="test loss, one dot per seed")
    dots.locator_params(axis="x", nbins=5)
    curves.legend(frameon=False)
    meta.legend(frameon=False)
    return figure
