"""The picture of `gradient_links`: what is left of the difference at each number of bits."""

from typing import Any

import numpy as np

from experiments import _plots
from experiments._plots import COLOURS, DASHES, GREY


def figures(bits: tuple[int, ...], originals: Any, linked: Any) -> dict[str, Any]:
    """originals: rule -> network -> [seeds]; linked: rule -> network -> [bits, seeds]"""
    figure, grid = _plots.panels(len(linked), size=(4.2, 3.4))
    for ax, (rule, of_network) in zip(grid, linked.items(), strict=True):
        for i, (network, losses) in enumerate(of_network.items()):
            off = 100 * (losses.mean(axis=1) / originals[rule][network].mean() - 1)
            ax.plot(bits, off, "o", label=network, color=COLOURS[i], linestyle=DASHES[i], markersize=4)
        ax.axhline(0, color=GREY, linewidth=0.8)
        ax.set(title=rule, xlabel="bits of the gradient link", xticks=np.asarray(bits))
    grid[0].set_ylabel("loss minus that without a link (%)")
    grid[0].legend(fontsize=8)
    return {"bits": (figure, "Validation loss at the end: means over seeds, beside optax's rule without a link")}
