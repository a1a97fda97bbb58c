"""Time and memory of one hypergradient, hg.Reversible beside its opponents in raw JAX, interleaved in one process.

    python -m experiments.benchmarks.hypergradient [--steps 1024] [--repeats 5] [--optimizer sgd|adam]

MLP 784-64-64-10 (tanh), batch 100, SGD with momentum 0.9 or Adam, one learning rate per step. Times are medians, as
multiples of the plain float32 training scan in the same round; memory is XLA's temporaries.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import hypergrad as hg
from experiments.benchmarks import opponents
from experiments.benchmarks.opponents import Task


OURS: dict[str, Callable[[Any], Any]] = {"sgd": hg.SGD, "adam": hg.Adam}
RATES = {"sgd": 0.1, "adam": 1e-3}


def mlp_task(
    steps: int,
    sizes: tuple[int, ...] = (784, 64, 64, 10),
    batch_size: int = 100,
    examples: int = 2000,
    rule: str = "sgd",
) -> Task:
    keys = jax.random.split(jax.random.key(0), len(sizes) + 2)
    x = jax.random.normal(keys[0], (examples, sizes[0]))
    y = jnp.argmax(x[:, : sizes[-1]] + jax.random.normal(keys[1], (examples, sizes[-1])), axis=1)
    params = [
        {"w": jax.random.normal(k, (m, n)) / jnp.sqrt(m), "b": jnp.zeros(n)}
        for k, m, n in zip(keys[2:], sizes[:-1], sizes[1:], strict=False)
    ]

    def cross_entropy(params: Any, batch: Any) -> Array:
        x, y = batch
        for layer in params[:-1]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))

    def batch(t: Array) -> Any:
        start = (t * batch_size) % (examples - batch_size + 1)
        return tuple(jax.lax.dynamic_slice_in_dim(a, start, batch_size) for a in (x, y))

    return Task(cross_entropy, params, batch, lambda w: cross_entropy(w, (x, y)), steps, rule)


def trained(task: Task, learning_rates: Array, adjoint: Any = None) -> Any:
    optimizer = OURS[task.rule](hg.PerStep(learning_rates))
    loss = lambda w, _, batch: task.loss(w, batch)  # noqa: E731
    run = hg.train(loss, task.params, optimizer, task.batch, steps=task.steps, adjoint=adjoint or hg.Reversible())
    return run.params


def reversible(task: Task, learning_rates: Array) -> Array:
    return jax.grad(lambda a: task.validation(trained(task, a)))(learning_rates)


def exact_forward(task: Task, learning_rates: Array) -> Array:
    """Training on the grid, without a derivative."""
    return task.validation(trained(task, learning_rates))


ROWS: dict[str, Callable[[Task, Array], Array]] = {
    "plain float training": opponents.plain,
    "exact training": exact_forward,
    "hg.Reversible": reversible,
    "raw unroll": opponents.unrolled,
    "raw remat": opponents.remat,
    "raw sqrt-remat": opponents.sqrt_remat,
    "equinox, 8 checkpoints": opponents.equinox_checkpointed,
}


def measure(
    task: Task, rows: dict[str, Callable[[Task, Array], Array]], repeats: int
) -> list[tuple[str, float, float, float]]:
    """(name, median multiple of the first row, median seconds, MiB of XLA temporaries), rounds interleaved."""
    rates = jnp.full(task.steps, RATES[task.rule])
    compiled = {name: jax.jit(lambda a, f=f: f(task, a)).lower(rates).compile() for name, f in rows.items()}
    memory = {name: c.memory_analysis().temp_size_in_bytes / 2**20 for name, c in compiled.items()}
    results = {name: c(rates) for name, c in compiled.items()}
    gradients = {name: r for name, r in results.items() if r.shape}
    reference = next(iter(gradients.values()))
    for name, g in gradients.items():
        error = jnp.linalg.norm(g - reference) / jnp.linalg.norm(reference)
        if not error < 1e-2:
            raise AssertionError(f"{name} disagrees with the first gradient: relative error {float(error):.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(repeats):
        for name, c in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(c(rates))
            seconds[name].append(time.perf_counter() - begin)
    unit = next(iter(seconds.values()))
    ratio = {name: statistics.median(a / b for a, b in zip(s, unit, strict=True)) for name, s in seconds.items()}
    return [(name, ratio[name], statistics.median(seconds[name]), memory[name]) for name in compiled]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--optimizer", choices=list(OURS), default="sgd")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {arguments.optimizer}, T = {arguments.steps}")
    print(f"{'':24s} {'x plain':>8s} {'seconds':>8s} {'MiB':>8s}")
    for name, ratio, seconds, memory in measure(
        mlp_task(arguments.steps, rule=arguments.optimizer), ROWS, arguments.repeats
    ):
        print(f"{name:24s} {ratio:8.2f} {seconds:8.3f} {memory:8.1f}")


if __name__ == "__main__":
    main()
