"""The pictures of `performance`: time and memory against the number of steps, measured and predicted."""

from typing import Any

import numpy as np

from experiments import _plots
from experiments._plots import COLOURS, DASHES, GREY


DRAWN = {
    "hg.Reversible, scan": "hg.Reversible",
    "unroll": "unroll",
    "remat": "remat",
    "sqrt-remat": "sqrt-remat",
    "equinox, 8 states": "equinox, 8 states",
    "equinox, default": "equinox, default",
    "replay tree, 4-ary": "replay tree, 4-ary",
}


def curves(numbers: dict[str, Any]) -> dict[str, Any]:
    found = numbers["curves"]
    network = "-".join(map(str, numbers["sizes"]))
    return {
        "memory": (
            _memory(found),
            f"Temporary memory of one hypergradient against the number of steps, network {network}, batch "
            f"{numbers['batch']}; points measured, lines predicted",
        ),
        "time": (
            _time(found),
            "Time of one hypergradient against the number of steps, the same network; lines predicted from gradient "
            "evaluations at the price of plain training",
        ),
    }


def _memory(found: dict[str, Any]) -> Any:
    figure, (ax,) = _plots.panels(1, size=(7.4, 4.6))
    for i, (name, label) in enumerate(DRAWN.items()):
        _points_and_line(ax, i, label, found[name], "bytes", "predicted_bytes", 2**-20)
    ax.set(xlabel="steps", ylabel="XLA temporaries (MiB)", title="memory")
    return _finished(figure, ax)


def _time(found: dict[str, Any]) -> Any:
    figure, (ax,) = _plots.panels(1, size=(7.4, 4.6))
    plain = found["plain training, scan"]
    unit = plain["seconds"][-1] / plain["steps"][-1]  # seconds of a gradient, where a run is longest
    ax.plot(plain["steps"], plain["seconds"], "s", color=GREY, markersize=5, label="plain training")
    for i, (name, label) in enumerate(DRAWN.items()):
        road = found[name] | {"predicted": [unit * x for x in found[name]["predicted_time"]]}
        _points_and_line(ax, i, label, road, "seconds", "predicted", 1.0)
    ax.set(xlabel="steps", ylabel="seconds", title="time")
    return _finished(figure, ax)


def _points_and_line(ax: Any, i: int, label: str, road: dict[str, Any], measured: str, predicted: str, scale: float) -> None:
    color = (*COLOURS, "black")[i]
    steps = np.asarray(road["steps"])
    ax.plot(steps, scale * np.asarray(road[measured]), "os^vDPX"[i], color=color, markersize=6, label=label)
    ax.plot(steps, scale * np.asarray(road[predicted]), color=color, linestyle=DASHES[i % len(DASHES)], linewidth=1.3)


def _finished(figure: Any, ax: Any) -> Any:
    ax.set(xscale="log", yscale="log")
    ax.set_xscale("log", base=2)
    _plots.plain_log(ax.yaxis)
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    ax.grid(which="major", color="#dddddd", linewidth=0.6)
    return figure
