"""What many seeds cost: one vmapped evaluation of N seeds against N evaluations one after the other.

    python -m experiments.benchmarks.seeds [--seeds 100] [--rounds 5]

The digits network of the quickstart, all of its hyperparameters; compiled beforehand, rounds interleaved, medians.
"""

import dataclasses
import statistics
import time

import jax
import tyro

import hypergrad as hg
from experiments import _data
from experiments.quickstart import Config as Quickstart
from experiments.quickstart import Experiment


@dataclasses.dataclass(frozen=True)
class Config:
    seeds: int = 100
    rounds: int = 5


def main(config: Config) -> None:
    experiment = Experiment(Quickstart(), _data.load("digits", 0))
    hypers = experiment.hypers(0.5)

    def f(hypers, key):
        return experiment.val_fn(experiment.train_fn(hg.natural(hypers), key))

    one = jax.jit(jax.value_and_grad(f))
    many = jax.jit(jax.vmap(jax.value_and_grad(f), in_axes=(None, 0)))
    keys = jax.random.split(jax.random.key(0), config.seeds)

    def in_turn():
        return [one(hypers, key) for key in keys]

    roads = {"one after the other": in_turn, "vmapped": lambda: many(hypers, keys)}
    seconds = {name: [] for name in roads}
    for road in roads.values():
        jax.block_until_ready(road())
    for _ in range(config.rounds):
        for name, road in roads.items():
            begin = time.perf_counter()
            jax.block_until_ready(road())
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{config.seeds} seeds {name}: {median:.2f} s   ({min(seconds[name]):.2f} to {max(seconds[name]):.2f})")
    print(f"ratio {medians['vmapped'] / medians['one after the other']:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
