"""Beyond the thesis: a batch that was never there.

    python -m experiments.unlearning [--data digits|mnist|fashion_mnist] [--steps 10000] [--tiny]

A training run is recorded. Then one batch is to be forgotten: the record is rewound to before it was used, and training goes
on without it, the later batches each a step earlier. The result is compared with a training that never had the batch, by
SHA-256 of parameters, accumulators and running statistics.

Time is that of going back and training on, over that of training from the start, by where the batch was; both were compiled
before. The archive is what the record takes on disk, and beside it what the differences of all states would take as float32,
from which a run can be gone back on too, to rounding.
"""

import dataclasses
import hashlib
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array

import hypergrad as hg
from experiments import _config, _data, _models, _plots, _record
from experiments._plots import COLOURS
from experiments._record import Row


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    steps: int | None = None
    hidden: tuple[int, ...] | None = None
    batch_size: int = 50
    places: tuple[float, ...] | None = None  # of the batch, in parts of the run
    seed: int = 0
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/unlearning")


PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"steps": 10_000, "hidden": (64, 64), "places": (0.1, 0.3, 0.5, 0.7, 0.9)},
    "tiny": {"steps": 10, "hidden": (4,), "places": (0.5, 0.9)},
}

RULES: dict[str, tuple[Any, bool]] = {  # optimizer, whether there are running statistics
    "SGD": (hg.SGD(0.1, 0.9), False),
    "Adam": (hg.Adam(1e-3), False),
    "SGD with running statistics": (hg.SGD(0.1, 0.9), True),
}


class Task:
    """A training run with one rule; `gone`: the step whose batch it never has."""

    def __init__(self, config: Config, data: _data.Data, rule: str) -> None:
        self.config, (self.optimizer, self.normalized) = config, RULES[rule]
        self.x, self.y = (jnp.asarray(part) for part in data.train)
        sizes = (data.train.x.shape[1], *config.hidden, 10)
        scale = {f"layer_{i + 1}": {"weights": n**-0.5, "biases": 0.0} for i, n in enumerate(sizes[:-1])}
        self.params = _models.init_mlp(jax.random.key(config.seed), sizes, scale)

    def loss(self, params: Any, _: Any, batch: Any) -> Any:
        x, y = batch
        if not self.normalized:
            return _models.cross_entropy(params, x, y)
        mean, variance = jnp.mean(x, axis=0), jnp.var(x, axis=0)
        return _models.cross_entropy(params, (x - mean) * jax.lax.rsqrt(variance + 1e-2), y), {"mean": mean, "var": variance}

    def batches(self, gone: int | None = None) -> Callable[[Array], Any]:
        drawn = hg.minibatches((self.x, self.y), self.config.batch_size, jax.random.key(self.config.seed + 1))
        return drawn if gone is None else lambda t: drawn(jnp.where(t < gone, t, t + 1))

    def given(self, gone: int | None = None) -> dict[str, Any]:
        """Of `hg.train` and `hg.record`."""
        zeros = {name: jnp.zeros(self.x.shape[1]) for name in ("mean", "var")}
        return {
            "loss": self.loss,
            "params": self.params,
            "optimizer": self.optimizer,
            "batches": self.batches(gone),
            "steps": self.config.steps - (gone is not None),
            "statistics": hg.Statistics(zeros, 0.9) if self.normalized else None,
        }


def digest(run: hg.Trained) -> str:
    """SHA-256 of the bits of all that was trained."""
    found = hashlib.sha256()
    for x in jax.tree.leaves((run.params, run.state, run.statistics)):
        found.update(np.asarray(x).tobytes())
    return found.hexdigest()


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the seconds that it takes once it is compiled."""
    jax.block_until_ready(function())
    begin = time.perf_counter()
    result = jax.block_until_ready(function())
    return result, time.perf_counter() - begin


@dataclasses.dataclass
class Forgotten:
    """What came of one rule."""

    equal: list[bool]  # by place
    cost: list[float]  # of going back and on, in trainings
    archive: int  # bytes
    bits: float  # of digits, per parameter and step
    differences: int  # bytes


def forget(config: Config, task: Task, folder: pathlib.Path) -> Forgotten:
    record = hg.record(**task.given(), folder=folder)
    equal, cost = [], []
    for place in config.places:
        gone = int(place * config.steps)
        fresh, whole = timed(lambda gone=gone: hg.train(**task.given(gone)))
        rest = {"batches": task.batches(gone), "steps": config.steps - 1}
        again, seconds = timed(lambda gone=gone, rest=rest: record.resume(gone, **rest))
        equal.append(digest(again) == digest(fresh))
        cost.append(seconds / whole)
        print(f"   step {gone:6}: {'every bit' if equal[-1] else 'NOT EQUAL'}, {cost[-1]:.2f} of training again", flush=True)
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    words = [path.stat().st_size for path in folder.rglob("*.words")]
    floats = sum(x.size for x in jax.tree.leaves((record.trained.params, record.trained.state, record.trained.statistics)))
    parameters = sum(x.size for x in jax.tree.leaves(task.params))
    return Forgotten(equal, cost, sum(sizes), 8 * sum(words) / parameters / config.steps, 4 * floats * config.steps)


def main(config: Config) -> dict[str, Any]:
    begin, config = time.perf_counter(), _config.filled(config, PRESETS)
    data = _data.load(config.data, config.seed)
    found: dict[str, Forgotten] = {}
    proofs: dict[str, hg.Certificate] = {}
    for rule in RULES:
        print(rule, flush=True)
        task = Task(config, data, rule)
        with tempfile.TemporaryDirectory() as folder:
            found[rule] = forget(config, task, pathlib.Path(folder))
        proofs[rule] = hg.check_reversal(**task.given())
    rows = _rows(config, found)
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, {"cost": (_picture(config, found), "What it costs to forget a batch")})
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "unlearning", config, {"found": {name: dataclasses.asdict(x) for name, x in found.items()}},
        seeds=[config.seed], seconds=seconds, certificate=proofs, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return {"found": found, "certificate": {name: proof._asdict() for name, proof in proofs.items()}}


def _rows(config: Config, found: dict[str, Forgotten]) -> list[Row]:
    rows = []
    for rule, x in found.items():
        equal = f"{sum(x.equal)} of {len(x.equal)} places"
        rows.append(Row("new", f"{rule}: every bit that of a training without the batch", None, equal, None, "new"))
        for place, cost in ((config.places[0], x.cost[0]), (config.places[-1], x.cost[-1])):
            quantity = f"{rule}: time over training again, batch at {place:.0%} of {config.steps:,} steps"
            rows.append(Row("new", quantity, None, cost, None, "new"))
        rows.append(Row("new", f"{rule}: digits on disk, bits per parameter and step", None, x.bits, None, "new"))
        quantity = f"{rule}: the archive, MiB, and float32 differences of all states"
        rows.append(Row("new", quantity, None, f"{x.archive / 2**20:.3g}, {x.differences / 2**20:.4g}", None, "new"))
    return rows


def _picture(config: Config, found: dict[str, Forgotten]) -> Any:
    figure, (axes,) = _plots.panels(1, size=(5.6, 3.8))
    for colour, (rule, x) in zip(COLOURS, found.items(), strict=False):
        axes.plot([int(p * config.steps) for p in config.places], x.cost, "o-", color=colour, label=rule)
    axes.axhline(1, **_plots.THESIS)
    axes.annotate("training again", (config.steps * config.places[0], 1.02), fontsize=8)
    axes.set(xlabel="step of the batch that is forgotten", ylabel="time, in trainings", ylim=(0, None))
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
