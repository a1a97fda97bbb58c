"""Kill a meta-loop at random moments, with SIGKILL, and let it go on: is its history that of a loop left alone?

    python -m experiments.benchmarks.kill_and_resume [--rounds 20] [--kills 2]

Each round is a process that learns hyperparameters of the digits network into a checkpoint folder. It is killed `kills`
times and started again; the last time it may finish. What it then has is compared, every number but the seconds, with a loop
left alone. The moments are drawn from the round's seed: half of them before a process has written its first meta-step,
compilation included, the others within 0.02 seconds of some meta-step.
"""

import dataclasses
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import tyro

import hypergrad as hg
from experiments import _data
from experiments.quickstart import Config as Quickstart
from experiments.quickstart import Experiment


@dataclasses.dataclass(frozen=True)
class Config:
    rounds: int = 20
    kills: int = 2
    meta_steps: int = 200
    child: pathlib.Path | None = None  # the folder to learn in: what a round starts


def learn(folder: pathlib.Path, meta_steps: int) -> hg.Result:
    experiment = Experiment(Quickstart(steps=30, hidden=(16, 16)), _data.load("digits", 0))
    return hg.optimize(
        experiment.train_fn, experiment.val_fn, experiment.hypers(0.5), meta_steps=meta_steps, checkpoint=folder,
        callbacks=[hg.callbacks.JsonLines(folder.with_suffix(".jsonl"))],
    )  # fmt: skip


def digest(folder: pathlib.Path) -> list[Any]:
    """Everything that the folder and its log remember, but for times and for which process wrote it."""
    record = json.loads((folder / "run.json").read_text())
    del record["sha256"]
    names = {point.pop("name"): f"point {point['step']}" for point in record["points"]}
    lines = [json.loads(line) for line in folder.with_suffix(".jsonl").read_text().splitlines()]
    for step in (*record["steps"], *lines):
        del step["seconds"]
    arrays = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            arrays[names.get(path.name, path.name)] = [file[name].tobytes() for name in file.files]
    return [record, lines, arrays]


def meta_steps(folder: pathlib.Path) -> int:
    """How many are complete."""
    run = folder / "run.json"
    return len(json.loads(run.read_text())["steps"]) if run.exists() else 0


def wait_for(process: subprocess.Popen[bytes], folder: pathlib.Path, done: int, seconds: float = math.inf) -> None:
    """Until `done` meta-steps are complete, the process has ended, or so many seconds have passed."""
    end = time.perf_counter() + seconds
    while process.poll() is None and meta_steps(folder) < done and time.perf_counter() < end:
        time.sleep(0.002)


def start(folder: pathlib.Path, config: Config) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __spec__.name, "--child", str(folder), "--meta-steps", str(config.meta_steps)]
    return subprocess.Popen(command)


def main(config: Config) -> None:
    if config.child is not None:
        learn(config.child, config.meta_steps)
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        begin = time.perf_counter()
        process = start(root / "alone", config)
        wait_for(process, root / "alone", 1)
        compiled = time.perf_counter() - begin
        process.wait()
        alone, expected = time.perf_counter() - begin, digest(root / "alone")
        print(f"jax {jax.__version__}: {config.meta_steps} meta-steps, left alone, in {alone:.1f} s", flush=True)
        same, last = 0, config.meta_steps - 2
        for number in range(config.rounds):
            rng, folder, reached = random.Random(number), root / f"round-{number}", []
            for _ in range(config.kills):
                done, process = meta_steps(folder), start(folder, config)
                if rng.random() < 0.5:  # while it compiles, or as soon as it has compiled
                    wait_for(process, folder, done + 1, rng.uniform(0, compiled))
                else:
                    wait_for(process, folder, rng.randint(min(done + 1, last), last))
                    time.sleep(rng.uniform(0, 0.02))
                process.kill()
                process.wait()
                reached.append(meta_steps(folder))
            start(folder, config).wait()
            equal = digest(folder) == expected
            same += equal
            verdict = "same" if equal else "OTHER"
            print(f"round {number:2d}: killed after {reached} complete meta-steps, {verdict}", flush=True)
        print(f"{same} of {config.rounds} have the history of the loop left alone")
        if same < config.rounds:
            sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
