"""Figure 6.10: where the hypergradient stops being informative.

    python -m experiments.chaos [--data digits|mnist] [--rates 201] [--seeds 32]

The training loss after 50 steps, and its exact derivative with respect to the logarithm of the learning rate, for many
constant learning rates. Up to some rate the two agree and lead downhill. Beyond it training is chaotic: the derivative still
is the derivative, but of a curve that wiggles faster than anyone could step.

Beyond the thesis: the norm of the cotangent along the reverse pass, whose growth per step is the Lyapunov exponent of
training, and both curves averaged over seeds, which shows what averaging can save and what it cannot.
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array

import hypergrad as hg
from experiments import _chaos_plots, _config, _data, _models, _plots, _record
from experiments._data import Data


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    rates: int | None = None  # of the curve of one seed: 201 on MNIST; the thesis has 1,000
    coarse: int | None = None  # of the curves averaged over seeds and of the cotangents: 17
    seeds: int | None = None  # 32
    low: float | None = None  # 0.5 to 2.5 on MNIST, natural logarithms of learning rates
    high: float | None = None
    steps: int | None = None  # 50
    batch_size: int | None = None  # 250, in order
    examples: int | None = None  # 1,000
    hidden: tuple[int, ...] | None = None  # 200-50
    log_init_scale: float = -2.0
    momentum: float = 0.9
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/chaos")


PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "rates": 201, "coarse": 17, "seeds": 32, "low": 0.0, "high": 2.5,
        "steps": 50, "batch_size": 200, "examples": 800, "hidden": (100, 50),
    },
    "mnist": {"low": 0.5, "high": 2.5, "batch_size": 250, "examples": 1000, "hidden": (200, 50)},
    "tiny": {"rates": 4, "coarse": 3, "seeds": 2, "steps": 4, "batch_size": 10, "examples": 20, "hidden": ()},
}  # fmt: skip


class Experiment:
    def __init__(self, config: Config, data: Data) -> None:
        self.config = config
        self.sizes = (data.train.x.shape[1], *config.hidden, 10)
        self.all = tuple(jnp.asarray(x[: config.examples]) for x in data.train)
        self.batches = jax.tree_util.Partial(
            _in_order, tuple(x.reshape(-1, config.batch_size, *x.shape[1:]) for x in self.all)
        )  # fmt: skip
        self.evaluate = jax.jit(jax.value_and_grad(self._loss_of))

    @staticmethod
    def loss(params: Any, theta: None, batch: Any) -> Array:
        return _models.cross_entropy(params, *batch)

    def arguments(self, hypers: Any, key: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        params = _models.init_mlp(key, self.sizes, np.exp(self.config.log_init_scale))
        sgd = hg.SGD(hypers["learning_rate"], self.config.momentum)
        return (self.loss, params, sgd, self.batches), {"steps": self.config.steps}

    def train_fn(self, hypers: Any, key: Array) -> Any:
        arguments, options = self.arguments(hypers, key)
        return hg.train(*arguments, **options, throw=False).params  # NaN where training overflows

    def val_fn(self, params: Any) -> Array:
        return _models.cross_entropy(params, *self.all)

    def _loss_of(self, log_rate: Array, key: Array) -> Array:
        return self.val_fn(self.train_fn({"learning_rate": jnp.exp(log_rate)}, key))


def _in_order(batches: Any, t: Array) -> Any:
    return jax.tree.map(lambda x: x[t % x.shape[0]], batches)


def curves(experiment: Experiment, log_rates: np.ndarray, keys: Array, what: str) -> tuple[np.ndarray, np.ndarray]:
    """(losses, derivatives with respect to the log rate), arrays [keys, rates]."""
    begin, found = time.perf_counter(), []
    for i, log_rate in enumerate(log_rates):
        found.append([experiment.evaluate(jnp.float32(log_rate), key) for key in keys])
        if i % max(1, len(log_rates) // 5) == 0:
            jax.block_until_ready(found)
            print(f"{what}: rate {i + 1} of {len(log_rates)}, {time.perf_counter() - begin:.0f} s", flush=True)
    values = np.asarray(found, np.float64).transpose(2, 1, 0)
    return values[0], values[1]


def diagnoses(experiment: Experiment, log_rates: np.ndarray, key: Array) -> list[hg.Diagnosis]:
    """With the norm of d loss / d (parameters before step t) at each step."""
    print("cotangents along the reverse pass", flush=True)
    hypers = ({"learning_rate": hg.positive(jnp.float32(np.exp(r)))} for r in log_rates)
    train_fn = jax.jit(experiment.train_fn)
    return [hg.diagnose(train_fn, experiment.val_fn, h, key) for h in hypers]


def exponents(norms: np.ndarray) -> np.ndarray:
    """Mean growth of log |cotangent| per step, going backwards, over the whole run: [rates]; NaN where it overflows."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (np.log(norms[:, 0]) - np.log(norms[:, -1])) / (norms.shape[1] - 1)


def main(config: Config) -> dict[str, Any]:
    begin, config = time.perf_counter(), _config.filled(config, PRESETS)
    # In the order of the file, as in the thesis; the digits' file is ordered by writer.
    experiment = Experiment(config, _data.load(config.data, 0 if config.data == "digits" else None, centred=False))
    keys = jax.random.split(jax.random.key(0), config.seeds)
    fine, coarse = (np.linspace(config.low, config.high, n) for n in (config.rates, config.coarse))
    (losses,), (gradients,) = curves(experiment, fine, keys[:1], "one seed")
    all_losses, all_gradients = curves(experiment, coarse, keys, f"{config.seeds} seeds")
    diagnosed = diagnoses(experiment, coarse, keys[0])
    norms = np.stack([d.norms["params"] for d in diagnosed])
    arguments, options = experiment.arguments({"learning_rate": float(np.exp(1.0))}, keys[0])
    proof = hg.check_reversal(*arguments, **options)
    found = _chaos_plots.Found(
        fine, losses, gradients, coarse, all_losses, all_gradients, norms, exponents(norms),
        [d.verdict for d in diagnosed], _onset(fine, gradients),
    )  # fmt: skip
    rows = _rows(config, found)
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, _chaos_plots.figures(found))
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "chaos", config, found._asdict(),
        seeds=range(config.seeds), seconds=seconds, certificate=proof, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return found._asdict() | {"certificate": proof._asdict()}


def _onset(log_rates: np.ndarray, gradients: np.ndarray) -> float:
    """The first rate at which the hypergradient is positive or undefined: there it no longer leads to higher rates."""
    wrong = ~(gradients <= 0)
    return float(log_rates[np.argmax(wrong)]) if wrong.any() else float("nan")


def _rows(config: Config, found: _chaos_plots.Found) -> list[_record.Row]:
    init = f"another initialization, and {config.rates} rates instead of 1,000; see the spread over seeds below"
    if config.data != "mnist":
        init = f"another data set: {config.data}, not MNIST, and a smaller network"
    rates, losses, gradients = found.rates, found.losses, found.gradients
    rows = []

    def add(quantity: str, thesis: Any, ours: float, why: str = init, spread: float | None = None) -> None:
        if np.isfinite(ours):  # what lies outside of the rates looked at is left out
            rows.append(_record.Row("6.10", quantity, thesis, ours, spread, why))

    def at(values: np.ndarray, rate: float) -> float:
        return float(values[np.argmin(abs(rates - rate))]) if config.low <= rate <= config.high else float("nan")

    for rate, recorded in ((0.5, 0.0288), (1.0, 0.0096), (1.5, 0.0043)):
        add(f"loss at log alpha {rate}", recorded, at(losses, rate))
    add("smallest loss", 0.00244, float(np.nanmin(losses)))
    add("smallest loss, its log alpha", 1.659, float(rates[np.nanargmin(losses)]))
    for rate, recorded in ((0.5, -0.062), (1.0, -0.021)):
        add(f"derivative at log alpha {rate}", recorded, at(gradients, rate))
    add("first change of sign of the derivative, log alpha", 1.475, found.onset)
    large = np.flatnonzero(abs(gradients) > 0.2)
    add("first derivative above 0.2, log alpha", 1.483, float(rates[large[0]]) if large.size else float("nan"))
    below = (rates > config.low) & (rates < min(1.4, found.onset if found.onset == found.onset else 1.4))
    differences = np.gradient(losses, rates)
    off = float(np.max(abs(differences - gradients)[below])) if below.any() else float("nan")
    spacing = f"central differences of the curve, {rates[1] - rates[0]:.3f} apart; the thesis's are 0.002 apart"
    add("derivative against differences below 1.4, largest gap", 3e-6, off, spacing)
    for low, high, recorded in ((1.6, 1.8, 114.0), (2.0, 2.25, 1.3e5)):
        inside = (rates >= low) & (rates <= high) & np.isfinite(gradients)
        largest = float(np.max(abs(gradients[inside]))) if inside.any() else float("nan")
        add(f"largest derivative, log alpha {low} to {high}", recorded, largest, f"{init}: heavy tails")
    alarms = [rate for rate, verdict in zip(found.coarse, found.verdicts, strict=True) if verdict == "exploding"]
    add("hg.diagnose first says exploding, log alpha", None, float(alarms[0]) if alarms else float("nan"), "new")
    n, mean = config.seeds, found.all_losses.mean(axis=0)
    each = f"new: of {n} seeds at {config.coarse} rates each; ± is the standard deviation"
    turns = np.array([_onset(found.coarse, g) for g in found.all_gradients])
    for quantity, values in (
        ("smallest loss of each seed", np.nanmin(found.all_losses, axis=1)),
        ("smallest loss of each seed, its log alpha", found.coarse[np.nanargmin(found.all_losses, axis=1)]),
        ("first change of sign of each seed, log alpha", turns[np.isfinite(turns)]),
    ):
        if len(values) > 1:
            add(quantity, None, float(values.mean()), each, float(values.std(ddof=1)))
    best = int(np.nanargmin(mean))
    error = found.all_losses[:, best].std(ddof=1) / np.sqrt(n)
    add(f"smallest mean loss of {n} seeds", None, float(mean[best]), "new; ± is the standard error", float(error))
    add(f"smallest mean loss of {n} seeds, its log alpha", None, float(found.coarse[best]), "new")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
