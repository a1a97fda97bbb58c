"""Fifty meta-steps of the thesis's schedule task, from nothing: compilation included.

    python -m experiments.benchmarks.schedule_task [--meta-steps 50]

The setting of Figures 6.2 to 6.5: a 784-50-50-50-10 network, 100 steps of 200 images, and 1,608 hyperparameters. MNIST where
HYPERGRAD_DATA names its folder, else scikit-learn's digits, with their 64 pixels.
"""

import argparse
import os
import time
from typing import Any

import jax

import hypergrad as hg
from experiments import _config, learning_rate_schedules


def measure(meta_steps: int, tiny: bool = False) -> dict[str, Any]:
    """Seconds of the whole and of the first meta-step, which compiles."""
    data = "mnist" if "HYPERGRAD_DATA" in os.environ and not tiny else "digits"
    blank = learning_rate_schedules.Config(data=data, tiny=tiny)
    config = _config.filled(blank, learning_rate_schedules.PRESETS)
    jax.clear_caches()
    begin = time.perf_counter()
    experiment = learning_rate_schedules.Experiment(config, learning_rate_schedules.load(config.data))
    result = hg.optimize(
        experiment.train_fn, experiment.train_loss, experiment.start(), meta_steps=meta_steps,
        meta_optimizer=learning_rate_schedules.thesis_rule(config.thesis_rate), key=jax.random.key(1),
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    return {
        "data": config.data,
        "meta_steps": meta_steps,
        "hyperparameters": sum(x.size for x in jax.tree.leaves(experiment.start())) - 1,
        "seconds": seconds,
        "first": result.history[0].seconds,
        "loss": [result.history[0].value, result.history[-1].value],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meta-steps", type=int, default=50)
    found = measure(parser.parse_args().meta_steps)
    print(
        f"{found['data']}: {found['hyperparameters']:,} hyperparameters, {found['meta_steps']} meta-steps in "
        f"{found['seconds']:.1f} s, {found['first']:.1f} s of them the first; loss {found['loss'][0]:.4f}, "
        f"then {found['loss'][1]:.4f}"
    )


if __name__ == "__main__":
    main()
