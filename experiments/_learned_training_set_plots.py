"""The pictures of `learned_training_set`."""

from typing import Any

import numpy as np

import hypergrad as hg
from experiments import _plots


def draw(
    ten: np.ndarray,
    hundred: np.ndarray,
    labels: np.ndarray,
    class_errors: list[np.ndarray],
    curves: dict[str, list[np.ndarray]],
    tests: dict[str, list[float]],
    real: Any,
    thesis: float | None,
) -> dict[str, tuple[Any, str]]:
    """ten, hundred: learned images; labels: of the hundred, of all seeds in turn; thesis: its test loss.

    tests: training set -> test loss of each seed; those in `real` are there for comparison.
    """
    captions = {
        "images": "Ten learned images: red is ink above the mean image, blue below.",
        "hundred": "A hundred images, learned with their labels, in the order of the largest class of the label.",
        "labels": "Labels learned from random ones, by their largest class; each class's share of them and its test error "
        "(bars: one standard deviation over seeds).",
        "losses": "Losses along the descent of the thesis (band: one standard deviation), and test losses.",
    }
    figures = (
        _images(ten, "a training set of ten images, 0 to 9"),
        _images(hundred, "a hundred images, by the class of their label"),
        _labels(labels, class_errors),
        _losses(curves, tests, real, thesis),
    )
    return {name: (figure, captions[name]) for name, figure in zip(captions, figures, strict=True)}


def _images(images: np.ndarray, title: str) -> Any:
    side = int(round(images.shape[1] ** 0.5))
    ax = hg.plots.images(images, (side, side), columns=5 if len(images) == 10 else 10, label="pixel, mean image removed")
    ax.set_title(title)
    return ax.figure


def _labels(labels: np.ndarray, class_errors: list[np.ndarray]) -> Any:
    figure, (left, right) = _plots.panels(2)
    largest = labels.argmax(axis=1)
    mean = [labels[largest == c].mean(axis=0) if (largest == c).any() else np.full(10, np.nan) for c in range(10)]
    shown = left.imshow(100 * np.where(np.eye(10), np.nan, mean), cmap="viridis")
    figure.colorbar(shown, ax=left, label="percent of the label")
    left.set(xticks=range(10), yticks=range(10), xlabel="class", ylabel="largest class of the label")
    left.set_title("what else a label says")
    share = np.stack(np.split(labels, len(class_errors))).mean(axis=1)
    for c, (x, y) in enumerate(zip(share.T, np.transpose(class_errors), strict=True)):
        right.errorbar(x.mean(), y.mean(), y.std(), x.std(), fmt="o", color=_plots.COLOURS[0], elinewidth=0.6)
        right.annotate(f"  {c}", (x.mean(), y.mean()), va="bottom")
    right.set(xlabel="share of all labels", ylabel="test error of the class", title="do hard classes get more labels?")
    return figure


def _losses(curves: dict[str, Any], tests: dict[str, list[float]], real: Any, thesis: float | None) -> Any:
    figure, (left, right) = _plots.panels(2, size=(5.0, 3.8))
    for (name, runs), color, dash in zip(curves.items(), _plots.COLOURS, _plots.DASHES, strict=False):
        label = "train, with penalty" if name == "train" else name.removesuffix(", same weights")
        _plots.band(left, range(len(runs[0])), runs, label=label, color=color, linestyle=dash)
    left.set(xlabel="meta-step", ylabel="loss (nats)", title="ten images, plain descent")
    if thesis is not None:
        left.axhline(thesis, label="thesis: test at the end", **_plots.THESIS)
    left.legend()
    _plots.bars(right, tests, grey=real)
    right.set(xlabel="test loss (nats)", ylabel="training images")
    return figure
