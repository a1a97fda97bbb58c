"""A recorded run gone back on in another process: every 500th state, and what the archive takes.

    python -m experiments.benchmarks.rewind [--data digits|mnist] [--steps 10000] [--every 500]

For SGD and Adam: trains and records; a fresh process opens the record and rewinds to every 500th step; each state is
compared with that of a training which ended there, by SHA-256 of parameters and accumulators.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hypergrad as hg
from experiments import _data, _models


RULES: dict[str, Any] = {"sgd": hg.SGD(0.1, 0.9), "adam": hg.Adam(1e-3)}


def loss(params: Any, _: Any, batch: Any) -> Any:
    return _models.cross_entropy(params, *batch)


def given(data: Any, rule: str, steps: int, hidden: tuple[int, ...] = (64, 64)) -> dict[str, Any]:
    x, y = (jnp.asarray(part) for part in _data.load(data, 0).train)
    sizes = (x.shape[1], *hidden, 10)
    scale = {f"layer_{i + 1}": {"weights": n**-0.5, "biases": 0.0} for i, n in enumerate(sizes[:-1])}
    params = _models.init_mlp(jax.random.key(0), sizes, scale)
    batches = hg.minibatches((x, y), 50, jax.random.key(1))
    return {"loss": loss, "params": params, "optimizer": RULES[rule], "batches": batches, "steps": steps}


def digest(run: hg.Trained) -> str:
    """SHA-256 of parameters and accumulators."""
    links = {name: x for name, x in run.state.items() if "weight" not in name}
    found = hashlib.sha256()
    for leaf in jax.tree.leaves((run.params, links)):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def elsewhere(data: str, rule: str, steps: int, every: int, folder: str) -> dict[str, Any]:
    """What a fresh process finds: {"digests": by step, "seconds": of the whole way back}."""
    options = ["--data", data, "--steps", str(steps), "--every", str(every), "--open", folder, rule]
    command = [sys.executable, "-m", "experiments.benchmarks.rewind", *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def opened(data: str, rule: str, steps: int, every: int, folder: str) -> dict[str, Any]:
    record = hg.record(**given(data, rule, steps), folder=folder)
    record.rewind(steps - 1)  # compiles
    begin = time.perf_counter()
    record.rewind(0)
    seconds = time.perf_counter() - begin
    digests = {str(step): digest(record.rewind(step)) for step in range(0, steps + 1, every)}
    return {"digests": digests, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--open", nargs=2, metavar=("FOLDER", "RULE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.open:
        print(json.dumps(opened(chosen.data, chosen.open[1], chosen.steps, chosen.every, chosen.open[0])))
        return 0
    wrong = 0
    for rule in RULES:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            record = hg.record(**given(chosen.data, rule, chosen.steps), folder=folder)
            recorded = time.perf_counter() - begin
            found = elsewhere(chosen.data, rule, chosen.steps, chosen.every, folder)
            files = sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())
        stops = range(0, chosen.steps + 1, chosen.every)
        expected = {step: digest(hg.train(**given(chosen.data, rule, step))) for step in stops if step}
        same = [found["digests"][str(step)] == expected[step] for step in stops if step]
        wrong += len(same) - sum(same)
        parameters = sum(x.size for x in jax.tree.leaves(record.trained.params))
        bits = 8 * files / parameters / chosen.steps
        print(
            f"{rule}: {sum(same)} of {len(same)} states are those of trainings that ended there; {files / 2**20:.2f} MiB, "
            f"{bits:.4f} bits per parameter and step with the end, where log2(1/decay) is "
            f"{float(record.trained.status.ideal_bits):.4f}; recorded in {recorded:.1f} s with compilation, all the way "
            f"back in {found['seconds']:.1f} s",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
