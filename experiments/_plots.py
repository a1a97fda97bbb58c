"""What the experiments' pictures share: matplotlib without a display, bands over seeds, saving."""

import pathlib
from typing import Any

import matplotlib


matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt  # noqa: E402
import matplotlib.ticker  # noqa: E402
import numpy as np  # noqa: E402

import hypergrad as hg  # noqa: E402
from experiments._record import Picture  # noqa: E402


COLOURS = hg.plots.COLOURS
GREY = "#767676"
THESIS = {"color": "black", "linestyle": ":", "linewidth": 1.2}  # a number of the thesis, wherever one is drawn
# Curves that cross are told apart by their dashes too.
DASHES: tuple[Any, ...] = ("-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (3, 1, 1, 1, 1, 1)))


def panels(columns: int, rows: int = 1, size: tuple[float, float] = (4.6, 3.4)) -> tuple[Any, Any]:
    """(figure, array of axes [rows * columns]); size: of one panel, in inches."""
    figure, axes = plt.subplots(
        rows, columns, figsize=(columns * size[0], rows * size[1]), layout="constrained", squeeze=False
    )  # fmt: skip
    return figure, axes.ravel()


def band(ax: Any, x: Any, runs: Any, *, label: str | None = None, color: str, error: bool = False, **style: Any) -> Any:
    """The mean of runs [seeds, points] as a line, and a band: +- one standard deviation, or error of the mean if `error`."""
    runs = np.asarray(runs, np.float64)
    mean = runs.mean(axis=0)
    (line,) = ax.plot(x, mean, label=label, color=color, **style)
    if len(runs) > 1:
        width = runs.std(axis=0, ddof=1) / (np.sqrt(len(runs)) if error else 1)
        ax.fill_between(x, mean - width, mean + width, color=color, alpha=0.22, linewidth=0)
    return line


def bars(ax: Any, values: dict[str, Any], grey: Any = ()) -> None:
    """A bar for the mean of each, and a circle for each seed; those named in `grey` are there for comparison."""
    for i, (name, seeds) in enumerate(values.items()):
        ax.barh(i, np.mean(seeds), color=GREY if name in grey else COLOURS[0], height=0.6)
        ax.plot(seeds, [i] * len(seeds), "o", color="black", markersize=4, markerfacecolor="none")
    ax.set_yticks(range(len(values)), list(values))
    ax.invert_yaxis()
    ax.set_title("bars: means; circles: seeds")


def plain_log(axis: Any) -> None:
    """Ticks 1, 2, 5, 10, ... of a logarithmic axis, written as they are."""
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def save(folder: pathlib.Path, figures: dict[str, tuple[Any, str]]) -> list[Picture]:
    """Write {name: (figure, caption)} to folder/name.png and close them."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, (figure, caption) in figures.items():
        pictures.append(Picture(folder / f"{name}.png", caption))
        figure.savefig(pictures[-1].path, dpi=120)
        plt.close(figure)
    return pictures


def announce(record: pathlib.Path, pictures: list[Picture], seconds: float) -> None:
    """The last line of every script."""
    print(f"{seconds:.1f} s; wrote {record} and {', '.join(p.path.name for p in pictures)} beside it")
