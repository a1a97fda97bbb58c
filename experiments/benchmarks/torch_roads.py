"""torch's unrolled roads, in a process of another Python, as roads like any other.

Invariant: the worker gets arrays and gives back arrays and seconds; nothing of torch is imported here.
"""

import functools
import json
import pathlib
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.benchmarks.roads import Road
from experiments.benchmarks.workloads import Task


WORKLOADS = ("mlp", "wide_mlp")  # tanh networks: a list of {"w", "b"}
WORKER = pathlib.Path(__file__).parent / "torch_worker.py"
METHODS = {"torch: plain training": "plain", "torch: higher": "higher", "torch: torchopt": "torchopt"}


class Worker:
    """One process per road and task, fed through its standard input; a line asks for a run, a line answers."""

    def __init__(self, python: pathlib.Path, method: str) -> None:
        self.python, self.method = python, method
        self.process: subprocess.Popen[str] | None = None
        self.grown = 0  # bytes, at most in any run so far
        self.folder = tempfile.TemporaryDirectory()

    def __call__(self, task: Task) -> Any:
        """task -> (learning rates -> hypergradient, or the loss of plain training)."""
        self.close()
        file = pathlib.Path(self.folder.name) / "task.npz"
        weights = {f"w{i}": layer["w"] for i, layer in enumerate(task.params)}
        biases = {f"b{i}": layer["b"] for i, layer in enumerate(task.params)}
        x, y = task.data
        np.savez(
            file, x=x, y=y, batch_size=task.batch_size, steps=task.steps, held_out=task.held_out, momentum=0.9, **weights,
            **biases,
        )  # fmt: skip
        command = [str(self.python), str(WORKER), self.method, str(file)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return functools.partial(self._run, self.process)

    def _run(self, process: subprocess.Popen[str], learning_rates: Array) -> Array:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(np.asarray(learning_rates).tolist()) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.method} under {self.python} ended with code {process.wait()}; it says why above")
        answer = json.loads(line)
        self.grown = answer["bytes"]
        return jnp.asarray(answer["result"], jax.dtypes.canonicalize_dtype(float))

    def close(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()
            self.process = None


def roads(python: pathlib.Path) -> list[Road]:
    found = []
    for name, method in METHODS.items():
        worker = Worker(python, method)
        kind = "elsewhere" if method == "plain" else "opponent"
        found.append(Road(name, worker, kind, loop=True, bytes=lambda worker=worker: worker.grown))
    return found
