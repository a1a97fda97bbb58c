"""The picture of `language_model`: how the meta-loops went."""

from typing import Any

import hypergrad as hg
from experiments import _plots
from experiments._plots import COLOURS, DASHES


def figures(histories: dict[str, list[hg.MetaStep]]) -> dict[str, Any]:
    figure, axes = _plots.panels(3)
    shown = {"value": "validation loss (nats)", "gradient_norm": "norm of the hypergradient", "growth": "growth backwards"}
    for ax, (field, label) in zip(axes, shown.items(), strict=True):
        for i, (name, history) in enumerate(histories.items()):
            values = [getattr(done, field) for done in history]
            ax.plot([done.step for done in history], values, label=name, color=COLOURS[i], linestyle=DASHES[i])
        ax.set(xlabel="meta-step", ylabel=label, yscale="linear" if field == "value" else "log")
    axes[0].legend(fontsize=8)
    return {"loops": (figure, "Validation loss, norm and growth against meta-step, by where the loop started")}
