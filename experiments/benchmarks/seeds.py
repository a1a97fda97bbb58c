"""What many seeds cost: one meta-step of `hg.optimize` over N seeds against N meta-steps of one seed.

    python -m experiments.benchmarks.seeds [--seeds 100] [--rounds 5]

The digits network of the quickstart with all of its hyperparameters. Also the evaluation alone, without a meta-loop: N calls
of the jitted hypergradient against one call of it vmapped. Compilation is left out, rounds are interleaved, medians.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
import tyro

import hypergrad as hg
from experiments import _data
from experiments.quickstart import Config as Quickstart
from experiments.quickstart import Experiment


@dataclasses.dataclass(frozen=True)
class Config:
    seeds: int = 100
    rounds: int = 5


def meta_step_seconds(experiment: Experiment, seeds: int, meta_steps: int, rounds: int) -> list[float]:
    """Seconds per round of `meta_steps` meta-steps, as the loop reports them; the first one compiles and is left out."""
    result = hg.optimize(
        experiment.train_fn, experiment.val_fn, experiment.hypers(0.5), seeds_per_step=seeds,
        meta_steps=1 + rounds * meta_steps, meta_optimizer=optax.sgd(0.0),
    )  # fmt: skip
    seconds = [done.seconds for done in result.history[1:]]
    return [sum(seconds[i * meta_steps : (i + 1) * meta_steps]) for i in range(rounds)]


def evaluations(experiment: Experiment, seeds: int) -> dict[str, Callable[[], Any]]:
    hypers, keys = experiment.hypers(0.5), jax.random.split(jax.random.key(0), seeds)
    one = jax.value_and_grad(lambda h, key: experiment.val_fn(experiment.train_fn(hg.natural(h), key)))
    single, batched = jax.jit(one), jax.jit(jax.vmap(one, in_axes=(None, 0)))
    return {
        "jitted, one by one": lambda: [jax.block_until_ready(single(hypers, key)) for key in keys],
        "jitted and vmapped": lambda: jax.block_until_ready(batched(hypers, keys)),
    }


def timed(roads: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[float]]:
    seconds: dict[Any, list[float]] = {name: [] for name in roads}
    for road in roads.values():
        road()
    for _ in range(rounds):
        for name, road in roads.items():
            begin = time.perf_counter()
            road()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def main(config: Config) -> None:
    experiment = Experiment(Quickstart(), _data.load("digits", 0))
    seconds = {
        f"hg.optimize, {config.seeds} meta-steps of 1 seed": meta_step_seconds(experiment, 1, config.seeds, config.rounds),
        f"hg.optimize, 1 meta-step of {config.seeds} seeds": meta_step_seconds(experiment, config.seeds, 1, config.rounds),
        **timed(evaluations(experiment, config.seeds), config.rounds),
    }
    base = {}
    for i, (name, times) in enumerate(seconds.items()):
        base[i // 2] = base.get(i // 2, statistics.median(times))
        ratio = statistics.median(times) / base[i // 2]
        print(f"{name:40s} {statistics.median(times):6.2f} s  ({min(times):.2f} to {max(times):.2f})  ratio {ratio:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
