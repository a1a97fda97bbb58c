"""Figure 6.4: the hypergradient of a learning rate schedule before any learning.

    python -m experiments.schedule_gradient [--data digits|mnist] [--seeds 100]

In the setting of Figures 6.2 to 6.5, the derivative of the final training loss with respect to the logarithm of each step's
learning rate, at the constant schedule from which learning starts. A single run's hypergradient is noisy, so it is averaged
over seeds (initializations and batches), several of them at once under `jax.vmap`, and shown with its standard error.
"""

import dataclasses
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np
import tyro
from jax import Array

import hypergrad as hg
from experiments import _config, _data, _plots, _record, learning_rate_schedules
from experiments._plots import COLOURS, DASHES, GREY


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    seeds: int | None = None  # 100
    at_once: int | None = None  # 10 under vmap
    steps: int | None = None  # 100
    hidden: tuple[int, ...] | None = None  # 50-50-50
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/schedule_gradient")


PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"seeds": 100, "at_once": 10, "steps": 100, "hidden": (50, 50, 50)},
    "tiny": {"seeds": 4, "at_once": 2, "steps": 3, "hidden": ()},
}


def gradients(config: Config, experiment: learning_rate_schedules.Experiment) -> Any:
    """d (training loss) / d (log learning rate), {layer: {kind: [seeds, steps]}}."""
    start = experiment.start()

    def loss(rates: Any, key: Array) -> Array:
        return experiment.train_loss(experiment.train_fn(hg.natural(start | {"learning_rate": rates}), key))

    many = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
    parts, count = [], math.ceil(config.seeds / config.at_once)
    for i in range(count):
        begin = time.perf_counter()
        parts.append(jax.block_until_ready(many(start["learning_rate"], _keys(config, i))))
        if i % max(1, count // 10) == 0:
            print(f"seeds {i * config.at_once + 1} to {(i + 1) * config.at_once} of {config.seeds}", end=": ")
            print(f"{time.perf_counter() - begin:.2f} s", flush=True)
    layers = jax.tree.map(lambda *x: np.concatenate(x)[: config.seeds], *parts).unconstrained
    return {layer: {kind: np.asarray(g.values, np.float64) for kind, g in of.items()} for layer, of in layers.items()}


def _keys(config: Config, i: int) -> Array:
    return jax.random.split(jax.random.fold_in(jax.random.key(0), i), config.at_once)


def main(config: Config) -> dict[str, Any]:
    begin, config = time.perf_counter(), _config.filled(config, PRESETS)
    shared = {"data": config.data, "steps": config.steps, "hidden": config.hidden}
    setting = _config.filled(learning_rate_schedules.Config(**shared), learning_rate_schedules.PRESETS)
    experiment = learning_rate_schedules.Experiment(setting, learning_rate_schedules.load(config.data))
    found = gradients(config, experiment)
    arguments, options = experiment.arguments(hg.natural(experiment.start()), _keys(config, 0)[0])
    proof = hg.check_reversal(*arguments, **options)
    rows = _rows(config, found)
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, {"schedule_gradient": (_picture(found), _caption(config))})
    seconds = time.perf_counter() - begin
    numbers = {
        "mean": {layer: {kind: g.mean(axis=0) for kind, g in of.items()} for layer, of in found.items()},
        "standard_error": {layer: {kind: _error(g) for kind, g in of.items()} for layer, of in found.items()},
    }
    record = _record.write(
        config.out, "schedule_gradient", config, numbers,
        seeds=range(config.seeds), seconds=seconds, certificate=proof, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return numbers | {"certificate": proof._asdict()}


def _error(g: np.ndarray) -> np.ndarray:
    """Standard error of the mean over seeds."""
    return g.std(axis=0, ddof=1) / np.sqrt(len(g))


def _rows(config: Config, found: Any) -> list[_record.Row]:
    why = f"the thesis averages 50 seeds (its caption says 100), ours {config.seeds}; ± is the standard error"
    if config.data != "mnist":
        why = f"another data set: {config.data}, not MNIST; ± is the standard error"
    rows = []
    recorded = {"layer_1": -0.101, "layer_2": -0.084, "layer_3": -0.108, "layer_4": -0.175}
    for layer, of in sorted(found.items()):
        name, sums = layer.replace("_", " "), of["weights"].sum(axis=1)
        text = f"sum over steps, weights of {name}"
        rows.append(_record.Row("6.4", text, recorded[layer], float(sums.mean()), float(_error(sums)), why))
    mean = np.stack([of["weights"].mean(axis=0) for of in found.values()])
    error = np.stack([_error(of["weights"]) for of in found.values()])
    positive = f"{int((mean > 0).sum())} of {mean.size}"
    text = "weight-layer entries that are positive"
    rows.append(_record.Row("6.4", text, "1 of 400", positive, None, "above 0: raising that step's rate would hurt"))
    significant = f"{int((mean > 2 * error).sum())} of {mean.size}"
    rows.append(_record.Row("6.4", "of these, by more than two standard errors", None, significant, None, "new"))
    weights, biases = (sum(abs(of[kind].sum(axis=1).mean()) for of in found.values()) for kind in ("weights", "biases"))
    text = "weight sums over bias sums, absolute, all layers"
    rows.append(_record.Row("6.4", text, "40 to 120", float(weights / biases), None, "per layer in the thesis"))
    noise = np.median([np.linalg.norm(_error(g)) / np.linalg.norm(g.mean(axis=0)) for g in _weights(found)])
    single = float(noise * np.sqrt(config.seeds))
    rows.append(_record.Row("6.4", "noise over signal, one seed", None, single, None, "new: median of the weight layers"))
    text = f"noise over signal, {config.seeds} seeds"
    rows.append(_record.Row("6.4", text, None, float(noise), None, "new: median of the weight layers"))
    return rows


def _weights(found: Any) -> list[np.ndarray]:
    return [of["weights"] for of in found.values()]


def _picture(found: Any) -> Any:
    figure, axes = _plots.panels(2, size=(5.2, 3.6))
    for ax, kind in zip(axes, ("weights", "biases"), strict=True):
        for i, (layer, of) in enumerate(sorted(found.items())):
            steps, label = np.arange(of[kind].shape[1]), layer.replace("_", " ")
            _plots.band(ax, steps, of[kind], label=label, color=COLOURS[i], linestyle=DASHES[i], error=True)
        ax.axhline(0, color=GREY, linewidth=0.8)
        ax.ticklabel_format(axis="y", scilimits=(-2, 2))
        ax.set(xlabel="training step", ylabel="d loss / d log learning rate (nats)", title=f"learning rates of the {kind}")
    axes[0].legend(fontsize=8)
    return figure


def _caption(config: Config) -> str:
    return f"Hypergradient at the start, mean of {config.seeds} seeds; bands: ± one standard error of the mean"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
