"""Programs on several devices, into which XLA divides a CPU, and in processes that speak over the loopback."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator


SETTING = """
import hashlib, os, sys
import jax, jax.numpy as jnp, numpy as np
if "PROCESSES" in os.environ:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ["COORDINATOR"], int(os.environ["PROCESSES"]), int(os.environ["PROCESS"]), heartbeat_timeout_seconds=10
    )
import hypergrad as hg
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def mesh_of(n, axis="data"):
    return Mesh(np.array(jax.devices()[:n]), (axis,))

def put(tree, mesh, spec):
    sharding = NamedSharding(mesh, spec)
    one = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    return jax.tree.map(one, jax.tree.map(np.asarray, tree))

def bits(tree):
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))).hexdigest()

rng = np.random.default_rng(0)
X = rng.normal(size=(40, 32, 5)).astype(np.float32)
Y = np.sin(X.sum(-1))
START = {
    "a": rng.normal(size=(5, 24)).astype(np.float32) / 2,
    "b": np.zeros(24, np.float32),
    "c": rng.normal(size=24).astype(np.float32) / 2,
}

def layer(w, x):
    return jnp.tanh(x @ w["a"] + w["b"])

def loss(w, theta, batch):
    x, y = batch
    return jnp.mean((layer(w, x) @ w["c"] - y) ** 2) + theta * jnp.sum(w["a"] ** 2)

def with_statistics(w, theta, batch):
    return loss(w, theta, batch), jnp.mean(layer(w, batch[0]), axis=0)

RULES = {"SGD": hg.SGD, "Adam": lambda rate: hg.Adam(rate, eps=1e-4), "Sophia": lambda rate: hg.Sophia(rate, gamma=1.0)}

def run(h, w, data, microbatches=16, rule="SGD", statistics=False, **options):
    if statistics:
        options["statistics"] = hg.Statistics(jnp.zeros(24), 0.9)
    f = with_statistics if statistics else loss
    return hg.train(f, w, RULES[rule](h["rate"]), hg.stacked(data), theta=h["l2"], microbatches=microbatches, **options)

def value(h, w, data, *args, **options):
    done = run(h, w, data, *args, **options)
    more = 0.0 if done.statistics is None else jnp.sum(done.statistics**2)
    return jnp.sum(done.params["a"] ** 2) + jnp.sum(done.losses) + more, (done.params, done.losses, done.statistics)

H = {"rate": np.float32(0.05), "l2": np.float32(0.01)}
"""


def on_devices(program: str, count: int, **environment: str) -> str:
    """What a program prints in a process with so many devices; SETTING goes before it."""
    done = subprocess.run(**_command(program, count, environment), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def in_processes(program: str, count: int, devices: int = 1, **environment: str) -> list[str]:
    """What it prints in each of so many processes, of so many devices each, all of which end well."""
    with started(program, count, devices, **environment) as processes:
        outputs = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [output for output, _ in outputs]


@contextlib.contextmanager
def started(program: str, count: int, devices: int = 1, **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for i in range(count):
        own = {"PROCESSES": str(count), "PROCESS": str(i), "COORDINATOR": address, **environment}
        command = _command(program, devices, own)
        processes.append(subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _command(program: str, devices: int, environment: dict[str, str]) -> dict:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {
        "args": [sys.executable, "-c", SETTING + program],
        "env": {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **environment},
    }
