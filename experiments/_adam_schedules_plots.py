"""The pictures of `adam_schedules`: the schedules, and how those that are learned compare."""

from typing import Any

import numpy as np

from experiments import _plots
from experiments._plots import COLOURS, DASHES, GREY


STYLES = {
    "AdamW, best constant": {"color": GREY, "linestyle": DASHES[3]},
    "AdamW, cosine with warm-up": {"color": COLOURS[4], "linestyle": DASHES[1]},
    "AdamW, learned": {"color": COLOURS[0], "linestyle": DASHES[0]},
    "SGD, best constant": {"color": COLOURS[3], "linestyle": DASHES[3]},
    "SGD, learned": {"color": COLOURS[2], "linestyle": DASHES[2]},
}
WINDOW = 9  # meta-steps of the running mean: each has an initialization and batches of its own


def figures(methods: dict[str, Any]) -> dict[str, Any]:
    return {
        "schedules": (
            _schedules(methods),
            "Schedules of AdamW; thin: learned, each seed; others: geometric means over seeds",
        ),
        "learning": (_learning(methods), f"Means over seeds; bold against meta-step: running means of {WINDOW}"),
        "losses": (_losses(methods), "Losses on validation and on test images; grey: not learned"),
    }


def shown(field: str, values: Any) -> tuple[Any, str]:
    """(values, label): decays near 1 by what they leave."""
    return (1 - values, f"1 - {field}") if field in ("b1", "b2") else (values, field.replace("_", " "))


def _schedules(methods: dict[str, Any]) -> Any:
    figure, grid = _plots.panels(2, 2, size=(4.8, 3.2))
    for ax, field in zip(grid, ("learning_rate", "b1", "b2", "weight_decay"), strict=True):
        for method in ("AdamW, best constant", "AdamW, cosine with warm-up", "AdamW, learned"):
            values, label = shown(field, methods[method]["hypers"][field].values)
            steps, style = np.arange(1, values.shape[1] + 1), STYLES[method]
            if method == "AdamW, learned":
                ax.plot(steps, values.T, color=style["color"], linewidth=0.6, alpha=0.5)
            ax.plot(steps, np.exp(np.log(values).mean(axis=0)), label=method, **style)
        ax.set(yscale="log", ylabel=label, xlabel="training step")
        _plots.plain_log(ax.yaxis)
    grid[0].legend(fontsize=8, loc="lower left")
    return figure


def _learning(methods: dict[str, Any]) -> Any:
    figure, (training, meta) = _plots.panels(2, size=(5, 3.8))
    for method, found in methods.items():
        style, losses = STYLES[method], found["curves"].mean(axis=0)
        training.plot(np.arange(1, len(losses) + 1), losses, label=method, linewidth=1.2, **style)
        if "values" in found:
            _running(meta, np.asarray(found["values"]), method, style)
    training.set(xlabel="training step", ylabel="loss of a batch (nats)", yscale="log", title="training")
    _plots.plain_log(training.yaxis)
    meta.set(xlabel="meta-step", ylabel="validation loss (nats)", title="a fresh seed each meta-step")
    training.legend(fontsize=8)
    meta.legend(fontsize=8)
    return figure


def _losses(methods: dict[str, Any]) -> Any:
    figure, axes = _plots.panels(2, size=(5, 2.7))
    grey = [method for method in methods if "values" not in methods[method]]
    for ax, part in zip(axes, ("validation", "test"), strict=True):
        _plots.bars(ax, {method: found["numbers"][f"{part}_loss"] for method, found in methods.items()}, grey)
        ax.set(xlabel=f"{part} loss (nats)")
    axes[1].set_yticklabels([])
    return figure


def _running(ax: Any, values: Any, label: str, style: dict[str, Any]) -> None:
    """Each value thin, and the running mean."""
    ax.plot(values, color=style["color"], linewidth=0.6, alpha=0.5)
    window = min(WINDOW, len(values))
    mean = np.convolve(values, np.ones(window) / window, mode="valid")
    ax.plot(np.arange(len(mean)) + (window - 1) / 2, mean, label=label, **style)
