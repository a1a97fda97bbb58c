"""The pictures of `learning_rate_schedules`: Figures 6.2, 6.3 and 6.5 with bands over seeds."""

from typing import Any

import numpy as np

import hypergrad as hg
from experiments import _plots
from experiments._plots import COLOURS, DASHES, GREY


# Training loss against step and against meta-step, read off the vector graphics of the thesis's Figure 6.3.
THESIS_STEPS = (1, 10, 20, 50, 100)
THESIS_BEFORE = (2.302, 2.276, 2.209, 1.027, 0.534)
THESIS_AFTER = (2.378, 0.531, 0.433, 0.219, 0.125)
THESIS_META = {0: 0.5314, 1: 0.458, 2: 0.393, 3: 0.325, 5: 0.295, 10: 0.256, 20: 0.211, 30: 0.167, 40: 0.133, 50: 0.1235}


def figures(start: Any, before: Any, found: dict[str, Any], sizes: tuple[int, ...]) -> dict[str, Any]:
    """start: hyperparameters as stored; before: their report; found: {rule: what it learned}, the first drawn in full."""
    rule, learned = next(iter(found.items()))
    seeds = f"mean and standard deviation over {len(learned.results)} seeds, {rule} rule"
    return {
        "schedules": (_schedules(start, learned.hypers), f"Learned schedules, {seeds}"),
        "learning": (_learning(before, found), "Training before and after, and loss against meta-step; crosses: thesis"),
        "init_scales": (_init_scales(learned.results, sizes), f"Initial scales against meta-step, {seeds}"),
    }


def _schedules(start: Any, learned: Any) -> Any:
    figure, axes = _plots.panels(3, size=(4.2, 3.4))
    shown = (("learning_rate", "weights"), ("learning_rate", "biases"), ("momentum", "weights"))
    for ax, (name, kind) in zip(axes, shown, strict=True):
        for i, layer in enumerate(sorted(learned[name])):
            values = learned[name][layer][kind].values
            steps = np.arange(values.shape[1])
            label = layer.replace("_", " ")
            _plots.band(ax, steps, values, label=label, color=COLOURS[i], linestyle=DASHES[i])
        constant = float(hg.natural(start)[name]["layer_1"][kind].values[0])
        ax.axhline(constant, color=GREY, linewidth=1, label="start")
        ax.set(xlabel="training step", ylabel=name.replace("_", " "), title=f"{name.replace('_', ' ')} of the {kind}")
    axes[0].legend(fontsize=8)
    return figure


def _learning(before: Any, found: dict[str, Any]) -> Any:
    figure, (left, right) = _plots.panels(2, size=(5, 3.8))
    curves = {"start": before.losses[0]} | {f"learned, {k} rule": v.report.losses.mean(axis=1) for k, v in found.items()}
    for i, (label, losses) in enumerate(curves.items()):
        _plots.band(left, np.arange(1, losses.shape[1] + 1), losses, label=label, color=COLOURS[i], linestyle=DASHES[i])
    for thesis, color in ((THESIS_BEFORE, COLOURS[0]), (THESIS_AFTER, COLOURS[1])):
        left.plot(THESIS_STEPS, thesis, "x", color=color)
    left.plot([], [], "x", color="black", label="thesis (MNIST)")
    left.set(xlabel="training step", ylabel="loss of a batch (nats)", title="training, before and after", yscale="log")
    left.legend(fontsize=8)
    for i, (rule, learned) in enumerate(found.items(), 1):
        for field, what, dash in (("value", "training", "-"), ("monitor", "validation", "--")):
            runs = [[getattr(done, field) for done in r.history] for r in learned.results]
            label = f"{what} images, {rule} rule"
            _plots.band(right, np.arange(len(runs[0])), runs, label=label, color=COLOURS[i], linestyle=dash)
    right.plot(list(THESIS_META), list(THESIS_META.values()), "x", color="black", label="thesis, training (MNIST)")
    right.set(xlabel="meta-step", ylabel="loss after training (nats)", title="a fresh seed each meta-step")
    right.set_ylim(0, None)
    right.legend(fontsize=8)
    return figure


def _init_scales(results: list[hg.Result], sizes: tuple[int, ...]) -> Any:
    figure, axes = _plots.panels(2, size=(5, 3.6))
    natural = [[hg.natural(done.hypers)["init_scale"] for done in r.history] for r in results]
    for ax, kind in zip(axes, ("weights", "biases"), strict=True):
        for i, layer in enumerate(sorted(natural[0][0])):
            runs = np.array([[float(scale[layer][kind]) for scale in run] for run in natural])
            label = layer.replace("_", " ")
            _plots.band(ax, np.arange(runs.shape[1]), runs, label=label, color=COLOURS[i], linestyle=DASHES[i])
        ax.set(xlabel="meta-step", ylabel="initial scale", title=f"initial scale of the {kind}", yscale="log")
        for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis("{x:.2g}")
    for size in sorted(set(sizes[:-1])):
        axes[0].axhline(size**-0.5, color=GREY, linestyle=":", linewidth=1.2)
        axes[0].annotate(f"1 / sqrt({size})", (0, size**-0.5 * 1.02), fontsize=8, color=GREY)
    axes[1].legend(fontsize=8, loc="upper left")
    return figure
