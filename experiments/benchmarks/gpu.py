"""What a GPU does: which flags exact reversals need, the exact layer against memory bandwidth, a transformer.

    python -m experiments.benchmarks.gpu [--parts certify buffers layer transformer] [--tiny]

certify: dense, convolutional, attention and embedding models, forward and back and bit for bit, their gradients compiled
beside their derivatives and apart, each set of XLA flags in a process of its own, all at once; and the hypergradient against
that of a rematerialized run. buffers: lost digits on the device and in host memory, inside of one program, against the
steps. layer: nanoseconds per parameter and step, beside the least that the bandwidth of the device allows for what must be
read and written. transformer: 124 million parameters, time and memory of the hypergradient beside training and
checkpointing. It runs on whatever device JAX has.
"""

import dataclasses
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
import tyro
from jax import Array

import hypergrad as hg
from experiments import _record
from experiments.benchmarks import exact_layer, roads, scaling
from experiments.benchmarks._measure import Limits, measure, traced
from experiments.benchmarks.hypergradient import line
from experiments.benchmarks.workloads import Task, conv_task, mlp_task, transformer_task


FLAGS = {
    "none": "",
    "deterministic": "--xla_gpu_deterministic_ops=true",
    "exclude nondeterministic": "--xla_gpu_exclude_nondeterministic_ops=true",
    "exclude nondeterministic, no autotuning": "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_autotune_level=0",
}

# Where gradients are computed, beside their derivatives or apart, and by which options.
WAYS: dict[str, tuple[bool | None, Any]] = {
    "beside": (False, dict),
    "apart": (True, dict),
    "hg.compiler_options": (None, hg.compiler_options),
}

# Bytes that a step must move per parameter, were each array read and written once: the integers of w and v and
# a word, each way; a gradient. On the way back, the two cotangents and the product besides.
FORWARD_BYTES = 2 * (8 + 8 + 2) + 4
BACKWARD_BYTES = FORWARD_BYTES + 2 * 2 * 4 + 4


@dataclasses.dataclass(frozen=True)
class Config:
    parts: tuple[str, ...] = ("certify", "buffers", "layer", "transformer")
    steps: int = 200  # of what is certified
    models: tuple[str, ...] = ("dense", "convolution", "attention", "embedding")  # of what is certified
    long: tuple[int, ...] = (1024, 16384, 131072)  # steps of `buffers`
    counts: tuple[int, ...] = (1_000_000, 10_000_000, 100_000_000)  # parameters of `layer`
    transformer_steps: int = 1000
    seconds: float = 60.0  # of one run of the transformer: longer ones take fewer steps
    roads: tuple[str, ...] = (
        "plain training, scan",
        "hg.Reversible, scan",
        "sqrt-remat",
        "equinox, 8 states",
        "replay tree, 4-ary",
    )  # of the transformer
    fraction: float = 0.6  # of the device's memory that one run may take
    tolerance: float = 0.01  # by how much hypergradients of the transformer may differ: TF32 rounds coarsely
    flags: str | None = None  # a key of FLAGS: what a process of `certify` certifies under
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/gpu")


def embedding_task(steps: int, words: int = 5_000, width: int = 64, length: int = 32, batch_size: int = 64) -> Task:
    """The mean embedding of some words, classified: the gradient adds many rows into the same place."""
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    text = jax.random.randint(k1, (4 * batch_size, length), 0, words // 10)  # few words, so that they repeat
    params = {"table": jax.random.normal(k2, (words, width)), "out": jax.random.normal(k3, (width, 10)) / width**0.5}

    def loss(params: Any, batch: Any) -> Array:
        (text,) = batch
        logits = jnp.tanh(params["table"][text].mean(axis=1)) @ params["out"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, :1] % 10, axis=1))

    return Task(loss, params, (text,), batch_size, steps, batch_size)


def models(config: Config) -> dict[str, Task]:
    if config.tiny:
        return {"dense": mlp_task(4, (6, 4, 3), 4, 20), "embedding": embedding_task(4, 20, 3, 2, 4)}
    made = {
        "dense": functools.partial(mlp_task, config.steps, (784, 512, 512, 10), 500),
        "convolution": functools.partial(conv_task, config.steps, (32, 64)),
        "attention": functools.partial(transformer_task, config.steps, 256, 4, 8, 128, 256),
        "embedding": functools.partial(embedding_task, config.steps),
    }
    return {name: made[name]() for name in config.models}


def certify(config: Config) -> dict[str, Any]:
    """{flags: what was found of each model, or what went wrong}, each in a process of its own."""
    found: dict[str, Any] = {}
    command = [sys.executable, "-m", "experiments.benchmarks.gpu", "--steps", str(config.steps)]
    command += ["--models", *config.models, *(["--tiny"] if config.tiny else [])]
    processes = {}
    for name, flags in FLAGS.items():
        own = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        given: dict[str, Any] = {"env": os.environ | own, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes[name] = subprocess.Popen([*command, "--flags", name], **given)
    for name, process in processes.items():
        out, said = process.communicate()
        found[name] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if process.returncode:
            found[name].append({"failed": said[-500:]})
        print(f"flags: {name}", *found[name], sep="\n  ", flush=True)
    return found


def certified(task: Task) -> dict[str, str]:
    """One model under the flags of this process: gradients beside their derivatives, apart, and as the library compiles."""
    reference, found = run(next(road for road in roads.ROADS if road.name == "remat"), task), {}
    for how, (isolate, options) in WAYS.items():
        try:
            gradient = run(reversed_by(hg.Reversible(driver="scan", isolate=isolate))._replace(options=options), task)
            found[how] = f"exact, relative error {distance(gradient, reference):.1e}"
        except (hg.ReversalError, jax.errors.JaxRuntimeError) as error:
            text = next((x for x in str(error).splitlines() if "did not return" in x), str(error)[:200])
            found[how] = text[:100]
    return found


def reversed_by(adjoint: hg.Reversible) -> roads.Road:
    return roads.Road(repr(adjoint), functools.partial(roads.reversed_by, adjoint), "ours")


def run(road: roads.Road, task: Task) -> Array:
    program, arguments = traced(road, task)
    return jax.block_until_ready(program.lower().compile()(*arguments))


def distance(found: Array, expected: Array) -> float:
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def buffers(config: Config) -> list[dict[str, Any]]:
    """Of each number of steps and place for lost digits: seconds, bytes on the device and in host memory, by XLA; how far
    the hypergradient is from that with digits on the device: by what two programs round otherwise."""
    rows = []
    for steps in (4, 8) if config.tiny else config.long:
        gradients: list[Array] = []
        for buffer in ("device", "host"):
            program, arguments = traced(reversed_by(hg.Reversible(driver="scan", buffer=buffer)), scaling.network(steps))
            compiled = program.lower().compile()
            gradients.append(jax.block_until_ready(compiled(*arguments)))
            begin = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            seconds, size = time.perf_counter() - begin, compiled.memory_analysis()
            row = {"steps": steps, "buffer": buffer, "seconds": seconds, "device": size.temp_size_in_bytes}
            rows.append(row | {"host": size.host_temp_size_in_bytes, "apart": distance(gradients[-1], gradients[0])})
            print(f"  {rows[-1]}", flush=True)
    return rows


def bandwidth(size: int, rounds: int = 10) -> float:
    """Bytes per second, read and written, of an addition to a float array of this many entries."""
    add = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(add(jnp.zeros(size)))
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(add(x))
        seconds.append(time.perf_counter() - begin)
    return 2 * 4 * size / statistics.median(seconds)


def layer(config: Config) -> dict[str, Any]:
    counts = (100,) if config.tiny else config.counts
    speed = bandwidth(max(*counts, 100 if config.tiny else 250_000_000))  # more than a cache holds
    least = {"forward": 1e9 * FORWARD_BYTES / speed, "forward and back": 1e9 * (FORWARD_BYTES + BACKWARD_BYTES) / speed}
    found: dict[str, Any] = {"bandwidth": speed, "least": least, "nanoseconds": {}}
    print(f"bandwidth {speed / 1e9:,.0f} GB/s; the least, in ns per parameter and step: {least}")
    for count in counts:
        found["nanoseconds"][count] = exact_layer.measure(count, 1 if config.tiny else 5, short=4, long=16)
        print(f"{count:,} parameters: {found['nanoseconds'][count]}", flush=True)
    return found


def transformer(config: Config) -> dict[str, Any]:
    """Roads that keep few enough states, compiled whole; those that would need more memory take fewer steps. All of them by
    `hg.compiler_options()`: the gradient of an embedding must have its bits twice."""
    task = transformer_task(config.transformer_steps, 768, 12, 12, 256, 25_000, 8)
    if config.tiny:
        task = transformer_task(4, 4, 1, 2, 3, 5, 2, 6)
    # Rates in the range of what a transformer of this size is trained with, since the loss must stay finite.
    task = task._replace(learning_rate=0.01)
    statistic = jax.devices()[0].memory_stats() or {}
    limits = Limits(1, config.seconds, bytes=config.fraction * statistic.get("bytes_limit", 5e9))
    chosen = [road._replace(options=hg.compiler_options) for road in roads.ROADS if road.name in config.roads]
    rows = measure(task, chosen, limits, config.tolerance, show=print)
    for row in rows:
        print(line(row))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"parameters": task.parameters, "roads": [dataclasses.asdict(row) for row in rows], "peak": peak}


PARTS = {"certify": certify, "buffers": buffers, "layer": layer, "transformer": transformer}


def main(config: Config) -> None:
    if config.flags is not None:
        for name, task in models(config).items():
            print(json.dumps({"model": name} | certified(task)), flush=True)
        return
    for name in config.parts:
        begin = time.perf_counter()
        print(f"\n{name}, on {jax.devices()[0].device_kind}", flush=True)
        numbers = PARTS[name](config)
        path = _record.write(config.out, name, config, numbers, seconds=time.perf_counter() - begin)
        print(f"wrote {path}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
