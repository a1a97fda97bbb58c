"""The quickstart's pictures."""

import pathlib
from typing import Any

import matplotlib


matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt  # noqa: E402

import hypergrad as hg  # noqa: E402


def draw(folder: pathlib.Path, start: Any, result: hg.Result, side: int) -> list[pathlib.Path]:
    """Write schedules.png, meta_learning.png and penalties.png; returns their paths. start: hyperparameters as stored."""
    figures = {
        "schedules": _schedules(start, result.hypers),
        "meta_learning": _meta_learning(result),
        "penalties": _penalties(result.hypers, side),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def _schedules(start: Any, learned: Any) -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, ax in zip(("learning_rate", "momentum"), panels, strict=True):
        title = name.replace("_", " ")
        hg.plots.schedules(learned[name], ax, start=start[name]).set(ylabel=title, title=f"learned {title}")
    return figure


def _meta_learning(result: hg.Result) -> Any:
    ax = hg.plots.learning(result)
    ax.set(ylabel="validation loss (nats)", title="meta-learning curve, a fresh seed each step")
    return ax.figure


def _penalties(learned: Any, side: int) -> Any:
    penalties = hg.natural(learned)["penalties"]["layer_1"]["weights"].T[:32]
    ax = hg.plots.images(penalties, (side, side), columns=8, label="L2 penalty")
    ax.set_title("learned penalties, an image per unit of layer 1")
    return ax.figure
