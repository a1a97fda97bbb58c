"""One checkout of the library beside another: time and memory of a hypergradient, and what it takes to build its program.

    python -m experiments.benchmarks.trees --trees NAME=PATH NAME=PATH [--rounds 9] [--models NAME ...] [--no-build]

By turns, each measurement in a process of its own: the machine's luck is shared, and a process's own is averaged. The table
has medians and ranges; building is taken apart into tracing, lowering and compiling, beside the unroll's in raw JAX.
`--no-build` leaves that out: half of the time.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import hypergrad as hg
from experiments.benchmarks import opponents
from experiments.benchmarks.roads import optimized
from experiments.benchmarks.workloads import Task, conv_task, mlp_task, transformer_task


SECONDS = 4.0  # of repetitions of one program in one process, after the first


def gru_task(steps: int, width: int = 64, length: int = 28, features: int = 28, examples: int = 512) -> Task:
    """A gated recurrent unit over the rows of an image, and a linear layer."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (examples, length, features))
    y = jax.random.randint(keys[1], (examples,), 0, 10)
    params = {
        "in": jax.random.normal(keys[2], (features, 3 * width)) / jnp.sqrt(features),
        "state": jax.random.normal(keys[3], (width, 3 * width)) / jnp.sqrt(width),
        "bias": jnp.zeros(3 * width),
        "out": jax.random.normal(keys[4], (width, 10)) / jnp.sqrt(width),
    }

    def loss(params: Any, batch: Any) -> Any:
        def cell(state: Any, x: Any) -> Any:
            a, b = jnp.split(x @ params["in"] + params["bias"], [2 * width], axis=-1), state @ params["state"]
            reset, update = jnp.split(jax.nn.sigmoid(a[0] + b[:, : 2 * width]), 2, axis=-1)
            new = jnp.tanh(a[1] + reset * b[:, 2 * width :])
            return update * state + (1 - update) * new, None

        images, labels = batch
        state, _ = jax.lax.scan(cell, jnp.zeros((len(images), width)), jnp.swapaxes(images, 0, 1))
        logits = jax.nn.log_softmax(state @ params["out"])
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=-1))

    return Task(loss, params, (x, y), 64, steps, 64)


def separate_task(leaves: int, steps: int) -> Task:
    """As many vectors, each with a rate of its own: nothing lies side by side."""
    params = [jnp.full(3, 0.01 * i) for i in range(leaves)]
    loss = lambda p, batch: sum(jnp.mean((w - batch[0][i % 3]) ** 2) for i, w in enumerate(p))  # noqa: E731
    return Task(loss, params, (jax.random.normal(jax.random.key(0), (8, 3)),), 4, steps, 4)


def separate_rates(task: Task, rates: Any) -> Any:
    def value(rates: Any) -> Any:
        each = [rates[i % len(rates)] + 0.0 * i for i in range(len(task.params))]
        batches = lambda t: task.batch(t)  # noqa: E731
        loss = lambda w, _, batch: task.loss(w, batch)  # noqa: E731
        adjoint = hg.Reversible(driver="scan", isolate=False)
        return task.validation(hg.train(loss, task.params, hg.SGD(each), batches, steps=task.steps, adjoint=adjoint).params)

    return jax.grad(value)(rates)


MODELS: dict[str, Any] = {
    "mlp": lambda: mlp_task(1024),
    "wide": lambda: mlp_task(256, (784, 256, 256, 10), 500),
    "conv": lambda: conv_task(40),
    "transformer": lambda: transformer_task(25, depth=8),
    "adam": lambda: mlp_task(1024, rule="adam"),
    "gru": lambda: gru_task(64),
    "300 rates": lambda: separate_task(300, 64),
}


def measured(name: str, build: bool = True) -> dict[str, float]:
    """Of one model, in this process."""
    task = MODELS[name]()
    ours = separate_rates if name == "300 rates" else optimized
    found: dict[str, float] = {}
    if build:
        found |= {f"ours: {k}": x for k, x in _built(functools.partial(ours, task), task.rates)[0].items()}
        found |= {f"unroll: {k}": x for k, x in _built(functools.partial(opponents.unrolled, task), task.rates)[0].items()}
    _, compiled = _built(functools.partial(ours, task), task.rates)
    jax.block_until_ready(compiled(task.rates))
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(task.rates))
        times.append(time.perf_counter() - begin)
    found["us a step"] = 1e6 * statistics.median(times) / task.steps
    found["MiB"] = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return found


def _built(function: Any, rates: Any) -> tuple[dict[str, float], Any]:
    """Seconds to trace, lower and compile, from empty caches."""
    jax.clear_caches()
    clock = [time.perf_counter()]
    traced = jax.jit(function, compiler_options=hg.compiler_options()).trace(rates)
    clock.append(time.perf_counter())
    lowered = traced.lower()
    clock.append(time.perf_counter())
    compiled = lowered.compile()
    clock.append(time.perf_counter())
    parts = dict(zip(("trace", "lower", "compile"), (b - a for a, b in zip(clock, clock[1:], strict=False)), strict=True))
    return parts | {"build": clock[-1] - clock[0]}, compiled


def in_tree(path: str, name: str, build: bool = True) -> dict[str, float]:
    """`measured` with the library of another checkout."""
    worker = [sys.executable, str(pathlib.Path(__file__)), "--worker", name, *([] if build else ["--no-build"])]
    done = subprocess.run(worker, env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", metavar="NAME=PATH", default=[])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--worker", metavar="MODEL")
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measured(arguments.worker, not arguments.no_build)))
        return
    trees = dict(x.split("=", 1) for x in arguments.trees)
    for name in arguments.models:
        rows: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
        for i in range(arguments.rounds):
            for tree in trees if i % 2 == 0 else reversed(trees):
                rows[tree].append(in_tree(trees[tree], name, not arguments.no_build))
        print(f"{name}:")
        for key in next(iter(rows.values()))[0]:
            columns = [[row[key] for row in rows[tree]] for tree in trees]
            cells = [
                f"{tree} {statistics.median(c):.4g} ({min(c):.4g} to {max(c):.4g})"
                for tree, c in zip(trees, columns, strict=True)
            ]
            ratios = [statistics.median(b / a for a, b in zip(columns[0], c, strict=True)) for c in columns[1:]]
            print(f"  {key:18s} {'; '.join(cells)}; ratio {', '.join(f'{r:.3f}' for r in ratios)}", flush=True)


if __name__ == "__main__":
    main()
