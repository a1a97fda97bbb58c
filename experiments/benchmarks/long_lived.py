"""A process that lives long: the memory maps that programs take, of those that Linux allows, and whether memory comes back.

    python -m experiments.benchmarks.long_lived [--programs 500] [--trials 200] [--skip-models] [--tree PATH]

The table has the maps that one more program takes in a process where others ran before, for six models: the unroll by
`jax.grad` under `jax.jit`, `hg.Reversible` under `jax.jit` and eagerly, `hg.optimize`. Then many different programs in one
process, eagerly and under `jax.jit`; without limit LLVM ends such a process with "Cannot allocate memory". Then trials, each
with a loss of its own that closes over 4 MB of data. Exit status 1 if a program takes more than three times the unroll's, if
maps keep growing, or if a trial's loss or memory stays.

--tree: the models alone, with the library of another checkout, to compare.
"""

import argparse
import functools
import gc
import itertools
import math
import os
import pathlib
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hypergrad as hg
from experiments.benchmarks import opponents
from experiments.benchmarks.roads import OURS
from experiments.benchmarks.workloads import Task, batch_of, conv_task, mlp_task, transformer_task


STEPS = 32
ROUNDS = 4  # programs of a model: its sizes differ by one, so that nothing is shared that another model would not share too
MOST = 3.0  # times the maps of the unroll


def toy(width: int) -> Task:
    x = jnp.linspace(-1, 1, 20)
    first, second = jax.random.normal(jax.random.key(0), (2, width))
    mse = lambda w, batch: jnp.mean((jnp.tanh(jnp.outer(batch[0], w["a"])) @ w["b"] - batch[1]) ** 2)  # noqa: E731
    return Task(mse, {"a": first, "b": second}, (x, jnp.sin(3 * x)), 20, STEPS, 20)


MODELS: dict[str, Callable[[int], Task]] = {
    "toy, SGD": toy,
    "MLP 784-64-64-10, SGD": lambda i: mlp_task(STEPS, (784, 64 + i, 64, 10)),
    "MLP 784-64-64-10, Adam": lambda i: mlp_task(STEPS, (784, 64 + i, 64, 10), rule="adam"),
    "MLP of seven layers, SGD": lambda i: mlp_task(STEPS, (784, *(32,) * 5, 32 + i, 10)),
    "convolutions, SGD": lambda i: conv_task(STEPS, (8, 16 + i), batch_size=16, examples=64),
    "transformer of two blocks, Adam": lambda i: transformer_task(
        STEPS, width=32, depth=2, length=16, batch_size=4 + i, examples=32
    )._replace(rule="adam", learning_rate=1e-3),
}


def trained(task: Task, rate: Any) -> Any:
    loss = task.loss
    batches = jax.tree_util.Partial(batch_of, task.data, task.batch_size)
    return hg.train(lambda w, _, batch: loss(w, batch), task.params, OURS[task.rule](rate), batches, steps=task.steps).params


def value(task: Task, rate: Any) -> jax.Array:
    return task.validation(trained(task, rate))


def optimized(task: Task, rate: float) -> Any:
    """One meta-step."""
    train = lambda h, key: trained(task, h["rate"])  # noqa: E731
    return hg.optimize(train, task.validation, {"rate": hg.positive(rate)}, meta_steps=1).history[0].value


ROADS: dict[str, Callable[[Task], Callable[[Any], Any]]] = {  # of a task: a function of its rate
    "unroll": lambda task: jax.jit(lambda rate: opponents.unrolled(task, rate * jnp.ones(task.steps))),
    "jit": lambda task: jax.jit(jax.grad(functools.partial(value, task))),
    "eager": lambda task: jax.grad(functools.partial(value, task)),
    "hg.optimize": lambda task: functools.partial(optimized, task),
}


def maps() -> int:
    return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")


def of_model(model: str, road: str) -> float:
    """Maps that one more program takes."""
    counts, functions = [], []
    for i in range(ROUNDS):
        task = MODELS[model](8 + i)
        jax.block_until_ready(task.validation(task.params))  # what users call themselves
        functions.append(ROADS[road](task))  # kept, as a notebook keeps them: with them their programs would go
        before = maps()
        jax.block_until_ready(functions[-1](task.learning_rate))
        counts.append(maps() - before)
    return sum(counts[1:]) / (ROUNDS - 1)


def table(tree: str) -> bool:
    """Each count in a process of its own; whether all are small enough."""
    fine = True
    print("maps of one more program" + " " * 10 + "".join(f"{road:>14s}" for road in ROADS), flush=True)
    for model in MODELS:
        counts = {road: float(in_process("--one", model, road, tree=tree)) for road in ROADS}
        ratios = {road: count / counts["unroll"] for road, count in counts.items()}
        shown = [f"{counts['unroll']:14.0f}"] + [f"{counts[r]:6.0f} ({ratios[r]:4.2f})" for r in list(ROADS)[1:]]
        print(f"{model:34s}" + "".join(shown), flush=True)
        fine &= max(ratios.values()) <= MOST
    return fine


def in_process(*arguments: str, tree: str = "") -> str:
    first = f"sys.path.insert(0, {tree!r}); import hypergrad; del sys.path[0]" if tree else ""
    command = ["import sys", first, "from experiments.benchmarks import long_lived", "sys.exit(long_lived.main())"]
    program = [sys.executable, "-c", "; ".join(filter(None, command)), *arguments]
    return subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout


def different() -> Iterator[tuple[str, Task]]:
    """Tasks of which no two have a program in common."""
    losses = {"tanh": jnp.tanh, "silu": jax.nn.silu, "gelu": jax.nn.gelu, "sin": jnp.sin, "softplus": jax.nn.softplus}
    kinds = list(itertools.product(("sgd", "adam"), losses.items()))
    for width, (rule, (name, activation)) in ((width, kind) for width in itertools.count(2) for kind in kinds):
        loss = lambda w, batch, f=activation: jnp.mean((f(jnp.outer(batch[0], w["a"])) @ w["b"] - batch[1]) ** 2)  # noqa: E731
        yield f"{name}, {width} wide, {rule}", toy(width)._replace(loss=loss, rule=rule, learning_rate=0.01)


def one_process(programs: int) -> bool:
    """Whether all programs run, each differentiated eagerly and every other one under jit, and the maps stay bounded."""
    limit = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    most = 0
    for i, (name, task) in enumerate(itertools.islice(different(), programs)):
        roads = ("eager", "jit") if i % 2 else ("eager",)
        slopes = [float(ROADS[road](task)(task.learning_rate)) for road in roads]
        if not all(math.isfinite(slope) for slope in slopes) or max(slopes) - min(slopes) > 1e-4 * (1e-3 + abs(slopes[0])):
            print(f"program {i} ({name}): {slopes}")
            return False
        gc.collect()
        most = max(most, maps())
        if (i + 1) % 25 == 0 or i + 1 == programs:
            print(f"{i + 1:4d} programs: {maps():6d} maps of {limit}, at most {most}", flush=True)
    return most < 0.75 * limit


class Loss:
    """A loss of a trial's own: an object that can be asked whether it still lives."""

    def __init__(self, seed: int) -> None:
        self.data = jnp.asarray(np.random.default_rng(seed).normal(size=2**20), jnp.float32)

    def __call__(self, w: Any, strength: Any, _: Any) -> jax.Array:
        return jnp.sum((w - self.data[:8]) ** 2) + strength * jnp.mean(self.data * w[0])


def trial(seed: int) -> weakref.ref[Loss]:
    loss = Loss(seed)
    train = lambda h, key: hg.train(loss, jnp.zeros(8), hg.SGD(h["rate"]), hg.full_batch(0.0), theta=h["l2"], steps=8).params  # noqa: E731
    hypers = {"rate": hg.positive(0.1), "l2": hg.positive(0.1)}
    hg.optimize(train, lambda w: jnp.sum(w**2), hypers, meta_steps=2)
    return weakref.ref(loss)


def many_trials(trials: int) -> bool:
    """Whether no loss lives on, and the process stays as large as it was after the first tenth."""
    alive, sizes = [], []
    for i in range(trials):
        alive.append(trial(i))
        gc.collect()
        sizes.append(resident())
        if (i + 1) % 25 == 0 or i + 1 == trials:
            living = sum(loss() is not None for loss in alive)
            print(
                f"{i + 1:4d} trials: {living} losses alive, {sizes[-1] / 2**20:.0f} MiB resident, {maps()} maps", flush=True
            )
    growth = sizes[-1] - sizes[trials // 10]
    print(f"grown by {growth / 2**20:.1f} MiB since trial {trials // 10}; their data are {4 * trials} MiB")
    return not any(loss() for loss in alive) and growth < 2**20 * trials / 10


def resident() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--tree", default="", help="a checkout whose library is measured in place of this one")
    parser.add_argument("--skip-models", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ROAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(of_model(*arguments.one))
        return 0
    fine = [arguments.skip_models or table(arguments.tree)]
    if not arguments.tree:
        fine += [one_process(arguments.programs), many_trials(arguments.trials)]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
