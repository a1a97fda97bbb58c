"""One checkout of the library beside another: time and memory of a hypergradient, and what it takes to build its program.

    python -m experiments.benchmarks.trees --trees NAME=PATH NAME=PATH [--rounds 9] [--turns 9]
        [--models NAME ...] [--no-build]

In each round every tree has a process, and these run by turns, one hypergradient each: the machine's luck is shared, and a
process's own is averaged over the rounds. The table has medians and ranges, and the median of the ratios of neighbours, with
its quartiles over rounds; building is taken apart into tracing, lowering and compiling, beside the unroll's in raw JAX.
`--no-build` leaves that out: half of the time. With 9 turns a round of the transformer takes twelve minutes of two cores.
What each round found is printed as it ends, on stderr.
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
from experiments.benchmarks.workloads import Task, conv_task, mlp_task, transformer_task


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


def reversed_run(task: Task, optimizer: Any) -> Any:
    """By names that old checkouts have, too."""
    batches = lambda t: task.batch(t)  # noqa: E731
    loss = lambda w, _, batch: task.loss(w, batch)  # noqa: E731
    adjoint = hg.Reversible(driver="scan", isolate=False)
    return task.validation(hg.train(loss, task.params, optimizer, batches, steps=task.steps, adjoint=adjoint).params)


def a_rate_per_step(task: Task, rates: Any) -> Any:
    rule: Any = {"sgd": hg.SGD, "adam": hg.Adam}[task.rule]
    return jax.grad(lambda rates: reversed_run(task, rule(hg.PerStep(rates))))(rates)


def separate_rates(task: Task, rates: Any) -> Any:
    each = lambda rates: [rates[i % len(rates)] + 0.0 * i for i in range(len(task.params))]  # noqa: E731
    return jax.grad(lambda rates: reversed_run(task, hg.SGD(each(rates))))(rates)


MODELS: dict[str, Any] = {
    "mlp": lambda: mlp_task(1024),
    "wide": lambda: mlp_task(256, (784, 256, 256, 10), 500),
    "conv": lambda: conv_task(40),
    "transformer": lambda: transformer_task(25, depth=8),
    "adam": lambda: mlp_task(1024, rule="adam"),
    "gru": lambda: gru_task(64),
    "300 rates": lambda: separate_task(300, 64),
}


def work(name: str, build: bool = True) -> None:
    """Of one model, in this process: a line of what its program takes, then one of seconds for each line that is read."""
    task = MODELS[name]()
    ours = separate_rates if name == "300 rates" else a_rate_per_step
    found: dict[str, float] = {}
    if build:
        found |= {f"ours: {k}": x for k, x in _built(functools.partial(ours, task), task.rates)[0].items()}
        found |= {f"unroll: {k}": x for k, x in _built(functools.partial(opponents.unrolled, task), task.rates)[0].items()}
    _, compiled = _built(functools.partial(ours, task), task.rates)
    run = lambda: jax.block_until_ready(compiled(task.rates))  # noqa: E731
    run()
    found["MiB"] = compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(json.dumps(found), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        run()
        print(json.dumps(1e6 * (time.perf_counter() - begin) / task.steps), flush=True)


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


class Worker:
    """A process that does `work` with the library of another checkout."""

    def __init__(self, path: str, name: str, build: bool = True):
        command = [sys.executable, str(pathlib.Path(__file__)), "--worker", name, *([] if build else ["--no-build"])]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes)
        self.built = self.read()  # before another is built

    def read(self) -> Any:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"a worker ended with status {self.process.wait()}; what it said stands above.")
        return json.loads(line)

    def run(self) -> float:
        """Microseconds a step."""
        print(file=self.process.stdin, flush=True)
        return self.read()

    def end(self) -> None:
        self.process.communicate()


def one_round(trees: list[str], name: str, build: bool, turns: int) -> list[dict[str, list[float]]]:
    """Of every checkout: what its program takes, and microseconds a step at each turn."""
    workers = [Worker(path, name, build) for path in trees]
    times = [[worker.run() for worker in workers] for _ in range(turns)]
    for worker in workers:
        worker.end()
    each = zip(workers, zip(*times, strict=True), strict=True)
    found = [{**{key: [x] for key, x in worker.built.items()}, "us a step": list(own)} for worker, own in each]
    print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def shown(key: str, names: list[str], rounds: list[list[dict[str, list[float]]]]) -> str:
    """One line: medians and ranges of every tree; ratios to the first, by neighbours."""
    columns = [[x for row in rounds for x in row[i][key]] for i in range(len(names))]
    cells = [f"{n} {statistics.median(c):.4g} ({min(c):.4g} to {max(c):.4g})" for n, c in zip(names, columns, strict=True)]
    ratios = []
    for i in range(1, len(names)):
        pairs = [zip(row[0][key], row[i][key], strict=True) for row in rounds]
        each = sorted(statistics.median(b / a if a else 1.0 for a, b in own) for own in pairs)
        quartiles = each[len(each) // 4], each[-1 - len(each) // 4]
        ratios.append("{:.3f} ({:.3f} to {:.3f})".format(statistics.median(each), *quartiles))
    return f"  {key:18s} {'; '.join(cells)}; ratio {', '.join(ratios)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", metavar="NAME=PATH", default=[])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turns", type=int, default=9, help="of every tree in a round")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--worker", metavar="MODEL")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, not arguments.no_build)
        return
    trees = dict(x.split("=", 1) for x in arguments.trees)
    for name in arguments.models:
        paths, build = list(trees.values()), not arguments.no_build
        rounds = [one_round(paths, name, build, arguments.turns) for _ in range(arguments.rounds)]
        print(f"{name}:")
        for key in rounds[0][0]:
            print(shown(key, list(trees), rounds), flush=True)


if __name__ == "__main__":
    main()
