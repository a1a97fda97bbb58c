"""One hypergradient on several devices: what each holds, what they tell each other at a step, and whether bits are the same.

    python -m experiments.benchmarks.devices [--devices 1 2 4 8] [--steps 25] [--rounds 3]

The transformer of the benchmarks, small, by SGD. Data parallel: the batch is divided, the rest is on every device. Fully
sharded (FSDP): parameters are divided over the same devices. Tensor parallel: pairs of devices divide the matrices of the
blocks, the first of two by columns and the second by rows, and the pairs divide the batch. Microbatches: data parallel,
gradients added as integers. In a process of its own for each number of devices, into which XLA divides the CPU: bytes and
traffic are those of real devices, as the compiled program says; seconds are not, since all share the cores.

Columns: bytes a parameter and device of integers and words that the loop carries; of XLA's temporaries; bytes a parameter
that devices send each other at a step, by the program's collectives and by the model in docs/scale.md; milliseconds a step;
the relative difference of the hypergradient from that on one device, and whether its bits are the same.
"""

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hypergrad as hg
from experiments.benchmarks.workloads import Task, batch_of, transformer_task


WAYS: tuple[str, ...] = ("data parallel", "fully sharded", "tensor parallel", "microbatches")
BYTES = {
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s8": 1,
    "u8": 1,
    "pred": 1,
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def small_transformer(steps: int) -> Task:
    return transformer_task(steps, width=64, depth=2, length=16, batch_size=32, examples=64)


def mesh_of(way: str, devices: int) -> Mesh:
    pairs = way == "tensor parallel" and devices > 1
    return Mesh(np.array(jax.devices()[:devices]).reshape(-1, 2 if pairs else 1), ("data", "model"))


def spec_of(way: str, path: Any, x: Any, mesh: Mesh) -> PartitionSpec:
    """How a parameter is divided: not at all, by the first axis that can be, or in columns and rows by turns."""
    if way == "fully sharded":
        axes = [axis for axis, size in enumerate(x.shape) if size % mesh.shape["data"] == 0]
        return PartitionSpec(*[None] * axes[0], "data") if axes else PartitionSpec()
    if way == "tensor parallel" and x.ndim == 2 and "blocks" in (name := jax.tree_util.keystr(path)):
        return PartitionSpec(None, "model") if name.endswith("['in']") else PartitionSpec("model", None)
    return PartitionSpec()


def evaluate(task: Task, way: str, mesh: Mesh, microbatches: int) -> Callable[..., Any]:
    """(rate, parameters, data) -> (value, its derivatives in rate and parameters)."""
    cut = hg.Microbatches(microbatches, "data", mesh) if way == "microbatches" else None

    spread = NamedSharding(mesh, PartitionSpec("data"))

    def value(rate: Any, w: Any, data: Any) -> Any:
        def batches(t: Any) -> Any:
            rows = batch_of(data, task.batch_size, t)
            return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spread), rows)

        loss = lambda w, theta, batch: task.loss(w, batch)  # noqa: E731
        done = hg.train(loss, w, hg.SGD(rate, 0.5), batches, steps=task.steps, microbatches=cut)
        return jnp.mean(done.losses)  # what else were computed here, XLA would round for each number of devices anew

    return jax.value_and_grad(value, argnums=(0, 1))


def measured(way: str, devices: int, steps: int, rounds: int, microbatches: int) -> dict[str, Any]:
    task = small_transformer(steps)
    mesh = mesh_of(way, devices)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    arguments = (
        jnp.float32(0.05),
        jax.tree_util.tree_map_with_path(lambda path, x: put(x, spec_of(way, path, x, mesh)), task.params),
        jax.tree.map(lambda x: put(x, PartitionSpec()), task.data),
    )
    with jax.set_mesh(mesh):
        program = jax.jit(evaluate(task, way, mesh, microbatches)).lower(*arguments).compile()
        value, slopes = jax.block_until_ready(program(*arguments))
        seconds = []
        for _ in range(rounds):
            begin = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds.append(time.perf_counter() - begin)
    count, text = sum(x.size for x in jax.tree.leaves(task.params)), program.as_text()
    flat = np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(slopes)])
    return {
        "carried": carried(text) / count,
        "temporaries": program.memory_analysis().temp_size_in_bytes / count,
        "sent": sent(text) / count,
        "ms": 1e3 * min(seconds) / steps,
        "slopes": flat.tolist(),
        "bits": hashlib.sha256(np.asarray(value).tobytes() + flat.tobytes()).hexdigest(),
    }


def carried(text: str) -> int:
    """Bytes of integers and words in the state of the loop that carries most of them."""
    loops = re.findall(r"= (\(.*?\)) while\(", text)
    return max((sum(n for kind, n in arrays(state) if kind in ("s64", "u16") and n >= 64) for state in loops), default=0)


def sent(text: str) -> int:
    """Bytes that come out of the collectives of the loops: of a step there and a step back, if each is run once."""
    found, in_entry = 0, False
    for line in text.splitlines():
        if line.startswith(("ENTRY", "%")):
            in_entry = line.startswith("ENTRY")
        match = re.match(rf"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if match and not in_entry:
            found += sum(n for _, n in arrays(match[1]))
    return found


def arrays(text: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each that is named."""
    found = [(kind, shape) for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", text) if kind in BYTES]
    return [(kind, BYTES[kind] * math.prod(map(int, filter(None, shape.split(","))))) for kind, shape in found]


def model(way: str, devices: int) -> float:
    """Bytes a parameter that come out of the collectives of a step there and a step back (docs/scale.md): of a gradient; on
    the way back of a gradient and of a matrix's two terms of J^T u; and of the gradient once more that is compared at the
    first step back. Tensor parallel devices send activations, of which there is no model here."""
    if devices == 1:
        return 0.0
    if way == "tensor parallel":
        return math.nan
    sums = 4 * 5 if way != "microbatches" else 16 * 4
    weights = 4 * 4 if way == "fully sharded" else 0  # gathered for each gradient and for the product
    return float(sums + weights)


def in_process(way: str, devices: int, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "experiments.benchmarks.devices", "--one", way, str(devices)]
    command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    command += ["--microbatches", str(arguments.microbatches)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: argparse.Namespace) -> None:
    if arguments.one:
        way, devices = arguments.one
        print(json.dumps(measured(way, int(devices), arguments.steps, arguments.rounds, arguments.microbatches)))
        return
    print(f"{'':16s}{'devices':>8s}{'carried':>9s}{'temporary':>11s}{'sent':>7s}{'model':>7s}{'ms':>8s}{'off':>10s}  bits")
    for way in WAYS:
        first: dict[str, Any] | None = None
        for devices in arguments.devices:
            found = in_process(way, devices, arguments)
            first = first or found
            there, here = np.asarray(first["slopes"]), np.asarray(found["slopes"])
            off = float(np.max(np.abs(here - there)) / np.max(np.abs(there)))
            same = "same" if found["bits"] == first["bits"] else "other"
            print(
                f"{way:16s}{devices:8d}{found['carried']:9.2f}{found['temporaries']:11.1f}{found['sent']:7.1f}"
                f"{model(way, devices):7.1f}{found['ms']:8.2f}{off:10.1e}  {same}",
                flush=True,
            )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "DEVICES"), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
