"""What a step costs that reads its own part of theta, against how long the run and how large theta is.

    python -m experiments.benchmarks.theta [--rounds 7]

A penalty for each step, marked `hg.PerStep` or read by the step's number in the batch, for runs of 250 to 4,000 steps; and
learned images, of which a step reads a batch of rows, for tables of 500 to 10,000. Microseconds a step of a hypergradient in
theta, both passes, medians over interleaved rounds. What a run pays once for its table (zeros for its cotangent, and the
result) does not grow with the steps: the column "a step more" is the difference between two lengths of run.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import hypergrad as hg
from experiments.benchmarks.seeds import timed


@dataclasses.dataclass(frozen=True)
class Config:
    rounds: int = 7
    steps: tuple[int, ...] = (250, 1000, 4000)
    images: tuple[int, ...] = (500, 2000, 10_000)
    batch: int = 50
    run: int = 500  # steps of a run over images, and four times as many


def penalties(steps: int, kind: str) -> Callable[[], Any]:
    x, y = jax.random.normal(jax.random.key(0), (20, 10)), jax.random.normal(jax.random.key(1), (20,))
    values = jnp.full(steps, 1e-3)

    def loss(w: Any, theta: Any, t: Any) -> Any:
        return jnp.mean((x @ w - y) ** 2) + (theta if kind == "PerStep" else theta[t]) * jnp.sum(w**2)

    def value(values: Any) -> Any:
        theta = hg.PerStep(values) if kind == "PerStep" else values
        return jnp.sum(hg.train(loss, jnp.zeros(10), hg.SGD(0.01, 0.9), lambda t: t, theta=theta, steps=steps).params ** 2)

    return compiled(value, values)


def pixels(images: int, batch: int, steps: int) -> Callable[[], Any]:
    table = jax.random.normal(jax.random.key(0), (images, 784))
    rows = jax.random.randint(jax.random.key(1), (steps, batch), 0, images)

    def loss(w: Any, theta: Any, rows: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(theta[rows] @ w, rows % 10).mean()

    def value(table: Any) -> Any:
        w = hg.train(loss, jnp.zeros((784, 10)), hg.SGD(0.01, 0.9), hg.stacked(rows), theta=table).params
        return jnp.sum(w**2)

    return compiled(value, table)


def compiled(value: Callable[[Any], Any], theta: Any) -> Callable[[], Any]:
    gradient = jax.jit(jax.grad(value), compiler_options=hg.compiler_options())
    return lambda: jax.block_until_ready(gradient(theta))


def medians(runs: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    return {name: statistics.median(times) for name, times in timed(runs, rounds).items()}


def main(config: Config) -> None:
    print(f"{'':28}{'us a step':>12}{'to the first':>14}{'a step more':>14}{'to the first':>14}")
    for kind in ("PerStep", "theta[t]"):
        found = medians({steps: penalties(steps, kind) for steps in config.steps}, config.rounds)
        each = [seconds / steps for steps, seconds in found.items()]
        for steps, seconds in zip(found, each, strict=True):
            print(f"{f'{kind}, {steps} steps':28}{seconds * 1e6:12.1f}{seconds / each[0]:14.2f}")
    lengths = config.run, 4 * config.run
    found = medians({(n, t): pixels(n, config.batch, t) for n in config.images for t in lengths}, config.rounds)
    rows = [
        (found[n, lengths[0]] / lengths[0], (found[n, lengths[1]] - found[n, lengths[0]]) / (lengths[1] - lengths[0]))
        for n in config.images
    ]
    for n, (mean, more) in zip(config.images, rows, strict=True):
        ratios = mean / rows[0][0], more / rows[0][1]
        print(f"{f'{n} learned images':28}{mean * 1e6:12.1f}{ratios[0]:14.2f}{more * 1e6:14.1f}{ratios[1]:14.2f}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
