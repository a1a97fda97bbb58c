"""What each quantity of `hg.curvature` costs beside the gradient, as in Figure 6 of BackPACK.

    python -m experiments.benchmarks.curvature [--only NAME ...] [--rounds 9] [--torch-python PATH] [--out FILE] [--tiny]

On the dense and the convolutional network of the other benchmarks: all quantities by turns in one process, each compiled, in
units of the batch's mean gradient in the same round; medians over rounds. `vmap(grad)` is the plain way to the gradients of
the examples, and what `individual_gradients` has to be no slower than. With `--torch-python`, the path of a Python that has
torch and BackPACK (`pip install torch backpack-for-pytorch` into an environment of its own), BackPACK's on the same networks
stand beside them, in units of torch's gradient.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import hypergrad as hg
from experiments.benchmarks.workloads import Task, conv_task, mlp_task


NETWORKS: dict[str, Callable[[], Task]] = {"dense": lambda: mlp_task(1), "convolutions": lambda: conv_task(1)}
QUANTITIES = (
    "individual_gradients", "squared_norms", "second_moment", "variance", "ggn_diagonal_mc", "kfac", "ggn_diagonal", "kflr",
)  # fmt: skip
REPEATS = 5  # calls in one timing


def roads(task: Task) -> dict[str, Callable[[Any, Any], Any]]:
    """(params, batch) -> what is timed, of one batch."""
    loss, key = (lambda p, theta, b: task.loss(p, b)), jax.random.key(0)

    def each(params: Any, batch: Any) -> Any:
        one = lambda b: jax.grad(task.loss)(params, tuple(x[None] for x in b))  # noqa: E731
        return jax.vmap(one)(batch)

    found: dict[str, Callable[[Any, Any], Any]] = {"gradient": jax.grad(task.loss), "vmap(grad)": each}
    for name in QUANTITIES:
        found[name] = lambda p, b, name=name: hg.curvature.quantities(loss, p, None, b, name, key=key)  # type: ignore[misc]
    found["squared_norms, variance, kfac"] = lambda p, b: hg.curvature.quantities(
        loss, p, None, b, ["squared_norms", "variance", "kfac"], key=key
    )
    return {name: jax.jit(function) for name, function in found.items()}


def measure(task: Task, rounds: int) -> dict[str, float]:
    """Medians of the time over the gradient's of the same round; and the gradient's own in milliseconds."""
    params, batch = task.params, task.batch(jnp.asarray(0))
    programs = roads(task)
    for program in programs.values():
        jax.block_until_ready(program(params, batch))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            begin = time.perf_counter()
            for _ in range(REPEATS):
                jax.block_until_ready(program(params, batch))
            seconds[name].append((time.perf_counter() - begin) / REPEATS)
    base = seconds.pop("gradient")
    ratios = {name: statistics.median(x / y for x, y in zip(s, base, strict=True)) for name, s in seconds.items()}
    return {"gradient (ms)": 1e3 * statistics.median(base), **ratios}


def of_backpack(python: str, network: str, rounds: int) -> dict[str, float]:
    worker = pathlib.Path(__file__).parent / "backpack_worker.py"
    done = subprocess.run([python, str(worker), network, str(rounds)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def table(found: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(found.values())))
    lines = ["| | " + " | ".join(found) + " |", "| --- |" + " --- |" * len(found)]
    return "\n".join(
        [*lines, *(f"| {n} | " + " | ".join(f"{x[n]:.2f}" if n in x else "" for x in found.values()) + " |" for n in names)]
    )


def main(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    tiny = {"dense": lambda: mlp_task(1, (6, 4, 3), 5, 20), "convolutions": lambda: conv_task(1, (2, 2), 4, 16)}
    networks = tiny if arguments.tiny else NETWORKS
    found = {}
    for name in arguments.only or networks:
        found[name] = measure(networks[name](), arguments.rounds)
        if arguments.torch_python:
            found[f"{name}, BackPACK"] = of_backpack(arguments.torch_python, name, arguments.rounds)
    print(table(found))
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(found, file, indent=1)
    return found


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--torch-python", metavar="PATH")
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    parser.add_argument("--tiny", action="store_true", help="on networks of a few weights")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
