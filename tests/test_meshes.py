"""Two devices: what is divided among them gives the derivative of one, or an error that says what does."""

import os
import subprocess
import sys

import pytest


SETTING = """
import jax, jax.numpy as jnp, numpy as np, hypergrad as hg
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("d",))
explicit = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
whole, start = jax.random.normal(jax.random.key(0), (3, 8, 3)), jnp.ones(3)

def on(mesh):
    return jax.device_put(whole, NamedSharding(mesh, P(None, "d"))), jax.device_put(start, NamedSharding(mesh, P()))

def loss(w, _, b):
    return jnp.mean(jnp.tanh(b @ w) ** 2) + jnp.sum(w**2)

def divided(w, _, b):
    part = lambda w, b: jax.lax.pmean(jnp.mean(jnp.tanh(b @ w) ** 2), "d")
    return jax.shard_map(part, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, b) + jnp.sum(w**2)

def run(rate, x, w, loss=loss, **options):
    return hg.train(loss, w, hg.SGD(rate, 0.75), hg.stacked(x), **options).params.sum()

expected = jax.grad(run)(0.1, whole, start)
host = {"adjoint": hg.Reversible(driver="host")}
"""
WORKS = """
for data in (on(mesh), (whole, start)):
    for name, used in (("arrays", loss), ("shard_map", divided)):
        f = lambda rate, **options: run(rate, *data, used, **options)
        slopes = {
            "grad": jax.grad(f)(0.1),
            "jit": jax.jit(jax.grad(f))(0.1),
            "host": jax.grad(lambda rate: f(rate, **host))(0.1),
            "hypergradient": hg.hypergradient(lambda h, key: f(h), lambda v: v, 0.1)[1],
        }
        for way, slope in slopes.items():
            assert abs(slope - expected) < 1e-4, (name, way, slope)
x, w = on(mesh)
assert jnp.allclose(jax.grad(lambda w: run(0.1, x, w))(w), jax.grad(lambda w: run(0.1, whole, w))(start), atol=1e-5)
print("done")
"""
REFUSED = """
x, w = on(explicit)

def in_force():
    with jax.set_mesh(explicit):
        run(0.1, whole, start)

calls = {
    "batches": lambda: jax.grad(run)(0.1, x, start),
    "params": lambda: jax.grad(lambda w: run(0.1, whole, w))(w),
    "hypergradient": lambda: hg.hypergradient(lambda h, key: run(h, x, w), lambda v: v, 0.1),
    "optimizer": lambda: run(jax.device_put(0.1, NamedSharding(explicit, P())), whole, start),
    "in force": in_force,
}
for name, call in calls.items():
    try:
        call()
    except TypeError as e:
        assert "explicit axes ('d',)" in str(e) and "jax.sharding.Mesh(devices, names)" in str(e), (name, str(e))
    else:
        raise AssertionError(name)
assert abs(jax.jit(jax.grad(run))(0.1, x, w) - expected) < 1e-4, "as arguments of jit JAX keeps the types itself"
print("done")
"""


@pytest.mark.parametrize("program", [WORKS, REFUSED], ids=["automatic", "explicit"])
def test_on_two_devices(program: str) -> None:
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", SETTING + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout == "done\n", done.stderr[-3000:]
