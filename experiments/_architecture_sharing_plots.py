"""The pictures of `architecture_sharing`."""

from typing import Any

import numpy as np

from experiments import _plots
from experiments._characters import DRAWINGS, Alphabet


def draw(
    alphabets: list[Alphabet],
    learned: dict[str, np.ndarray],
    tests: dict[str, list[float]],
    thesis: dict[str, float],
    values: list[list[float]],
) -> dict[str, tuple[Any, str]]:
    """learned: layer -> correlation of the weights of two tasks; tests: kind -> test NLL of each seed; thesis: its tests."""
    captions = {
        "alphabets": "Characters of each alphabet, as they are and turned by 90 degrees: ten tasks.",
        "sharing": "What the weights of two tasks have in common, by layer: A A^T, scaled to ones on its diagonal.",
        "losses": "The validation loss while A is learned (band: one standard deviation), and test losses.",
    }
    figures = _alphabets(alphabets), _matrices(learned, tests), _losses(tests, thesis, values)
    return {name: (figure, captions[name]) for name, figure in zip(captions, figures, strict=True)}


def _alphabets(alphabets: list[Alphabet], count: int = 15) -> Any:
    figure, axes = _plots.panels(1, len(alphabets), size=(7.0, 1.15))
    rng = np.random.default_rng(0)
    for ax, alphabet in zip(axes, alphabets, strict=True):
        chosen = rng.permutation(len(alphabet.images))[:count]
        upright = [alphabet.images[i, rng.integers(DRAWINGS)] for i in chosen]
        turned = [np.rot90(image, -1) for image in upright]
        ax.imshow(np.vstack([np.hstack(upright), np.hstack(turned)]), cmap="gray_r", interpolation="nearest")
        ax.set_title(alphabet.name, fontsize=9)
        ax.set_axis_off()
    return figure


def _matrices(learned: dict[str, np.ndarray], tests: dict[str, list[float]]) -> Any:
    layers, tasks = list(learned), len(next(iter(learned.values())))
    figure, axes = _plots.panels(len(layers), len(tests), size=(2.5, 2.3))
    for row, kind in enumerate(tests):
        for column, layer in enumerate(layers):
            ax = axes[row * len(layers) + column]
            tied = np.ones((tasks, tasks)) if kind == "tied" and column == 0 else np.eye(tasks)
            shown = ax.imshow(learned[layer] if kind == "learned" else tied, vmin=0, vmax=1, cmap="gray_r")
            ax.set(xticks=[], yticks=[])
            if row == 0:
                ax.set_title(layer.replace("_", " ") + {0: ", bottom", len(layers) - 1: ", top"}.get(column, ""))
            if column == 0:
                ax.set_ylabel(f"{kind}\ntest NLL {np.mean(tests[kind]):.2f}")
            if row == len(tests) - 1:
                ax.set_xticks([tasks / 4 - 0.5, 3 * tasks / 4 - 0.5], ["upright", "turned"])
    figure.colorbar(shown, ax=list(axes), shrink=0.5, label="correlation of the weights of two tasks")
    return figure


def _losses(tests: dict[str, list[float]], thesis: dict[str, float], values: list[list[float]]) -> Any:
    figure, (left, right) = _plots.panels(2)
    _plots.band(left, range(len(values[0])), values, color=_plots.COLOURS[0])
    left.set(xlabel="meta-step", ylabel="validation NLL (nats)", title="learning A, a new split each step")
    left.xaxis.get_major_locator().set_params(integer=True)
    _plots.bars(right, tests)
    for i, number in enumerate(thesis.values()):
        right.plot([number] * 2, [i - 0.4, i + 0.4], label=None if i else "thesis, other alphabets", **_plots.THESIS)
    if thesis:
        right.set_ylim(len(tests) + 0.2, -0.6)  # room below the bars
        right.legend(loc="lower left")
    right.set(xlabel="test NLL (nats)")
    return figure
