"""The pictures of `optuna_comparison`: best so far against seconds and against gradient evaluations."""

from typing import Any

import numpy as np

from experiments import _plots


COLOURS = {
    "Random": _plots.GREY, "TPE": _plots.COLOURS[4], "CMA-ES": _plots.COLOURS[3], "TPE, constants": _plots.COLOURS[1],
    "hg.optimize": _plots.COLOURS[0], "HypergradientSampler": _plots.COLOURS[2],
}  # fmt: skip
DASHES = dict(zip(COLOURS, _plots.DASHES[::-1], strict=False))


def figure(group: Any) -> tuple[Any, str]:
    """group: an `_optuna_report.Group`. (figure, caption)"""
    picture, axes = _plots.panels(2, 2, size=(4.8, 3.0))
    losses = []
    for column, (axis, label) in enumerate({"seconds": "seconds", "evaluations": "gradient evaluations"}.items()):
        limit = group.budgets[axis]
        firsts = [group.cost(run, axis)[0] for runs in group.runs.values() for run in runs]
        x = np.geomspace(min(min(firsts), limit / 2), limit, 100)
        for row, (what, name) in enumerate({"value": "validation", "test": "test"}.items()):
            ax = axes[2 * row + column]
            for method in group.runs:
                low, middle, high = np.percentile(group.curves(method, axis, x, what), [25, 50, 75], axis=0)
                style = {"color": COLOURS[method], "linestyle": DASHES[method]}
                ax.plot(x, middle, label=method, **style)
                ax.fill_between(x, low, high, color=COLOURS[method], alpha=0.15, linewidth=0)
                losses += [low.min(), middle[0]]
            ax.set(xscale="log", yscale="log", xlabel=label if row else "", ylabel=f"{name} loss (nats)")
    for ax in axes:
        ax.set_ylim(0.95 * min(losses), 1.05 * max(losses))
        _plots.plain_log(ax.yaxis)
    handles, labels = axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return picture, f"Best so far, {group.title}: median over seeds, and quartiles"


def hybrid(found: dict[str, Any]) -> tuple[Any, str]:
    """found: {name of a study: {"validation": lowest so far, "by_choice": {choice: (lowest, trials)}}}"""
    picture, (left, right) = _plots.panels(2, size=(5.0, 3.6))
    labels = sorted({label for row in found.values() for label in row["by_choice"]}, reverse=True)
    for (name, row), colour, marker in zip(found.items(), _plots.COLOURS, "os", strict=False):
        left.plot(range(1, len(row["validation"]) + 1), row["validation"], color=colour, label=name, drawstyle="steps-post")
        for label, (lowest, trials) in row["by_choice"].items():
            size = 12 + 6 * trials
            right.scatter(lowest, labels.index(label), s=size, color=colour, marker=marker, alpha=0.7, linewidth=0)
    left.set(yscale="log", xlabel="trial", ylabel="validation loss (nats)", title="best so far")
    _plots.plain_log(left.yaxis)
    left.legend()
    right.set(xscale="log", xlabel="lowest validation loss (nats)", title="by choice; area: number of trials")
    right.set_yticks(range(len(labels)), labels)
    _plots.plain_log(right.xaxis)
    return picture, "Depth, width and optimizer by TPE; constants by TPE, or schedules by their gradient"
