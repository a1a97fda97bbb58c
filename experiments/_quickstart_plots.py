"""The quickstart's pictures."""

import pathlib
from typing import Any

import hypergrad as hg
from experiments import _plots
from experiments._record import Picture


def draw(folder: pathlib.Path, start: Any, result: hg.Result, side: int) -> list[Picture]:
    """Write schedules.png, meta_learning.png and penalties.png. start: hyperparameters as stored."""
    figures = {
        "schedules": (_schedules(start, result.hypers), "learned learning rates and momentum"),
        "meta_learning": (_meta_learning(result), "validation loss against meta-step"),
        "penalties": (_penalties(result.hypers, side), "learned L2 penalties of the first layer"),
    }
    return _plots.save(folder, figures)


def _schedules(start: Any, learned: Any) -> Any:
    figure, axes = _plots.panels(2, size=(5, 4))
    for name, ax in zip(("learning_rate", "momentum"), axes, strict=True):
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
