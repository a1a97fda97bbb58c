"""Two devices: what is divided among them gives the derivative of one, or an error that says what does."""

import os
import subprocess
import sys

import pytest
from covering import long


SETTING = """
import tempfile
import jax, jax.numpy as jnp, numpy as np, optax, hypergrad as hg
from hypergrad import _programs
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
    return sum(map(jnp.sum, jax.tree.leaves(hg.train(loss, w, hg.SGD(rate, 0.75), hg.stacked(x), **options).params)))

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
EXPLICIT = """
x, w = on(explicit)
layers = lambda w, _, b: loss(w["a"] * w["b"], 0, b) + jnp.mean(w["large"] ** 2)
side_by_side = lambda w: jax.grad(run)(0.1, whole, {"a": w, "b": 2 * w, "large": jnp.tile(w, (10, 1))}, layers)
on_one = side_by_side(start)
with jax.set_mesh(explicit):
    assert abs(side_by_side(w) - on_one) < 1e-4, "known values are laid out otherwise than traced ones"
    divided = jax.device_put(jnp.ones((4, 3)), NamedSharding(explicit, P("d")))
    of = lambda w, _, b: jnp.mean(jnp.tanh(b @ w.T) ** 2) + jnp.sum(w**2)
    slopes = {
        "jit": lambda: jax.jit(jax.grad(run))(0.1, x, w),
        "hypergradient": lambda: hg.hypergradient(lambda h, key: run(h, x, w), lambda v: v, 0.1)[1],
        "grad": lambda: jax.grad(run)(0.1, x, w),
        "whole": lambda: jax.grad(run)(0.1, whole, start),
        "vmap": lambda: jax.jit(jax.vmap(jax.grad(run), (0, None, None)))(jnp.array([0.1, 0.2]), x, w)[0],
        "microbatches": lambda: jax.grad(lambda rate: run(rate, x, w, microbatches=4))(0.1),
        "of a mesh": lambda: jax.grad(lambda rate: run(rate, x, w, microbatches=hg.Microbatches(4, mesh=explicit)))(0.1),
    }
    for way, slope in list(slopes.items())[:WAYS]:
        assert abs(slope() - expected) < 1e-4, way
    done = hg.train(of, divided, hg.SGD(0.1), hg.stacked(x))
    for array in (done.params, done.state["velocity"]):
        assert array.sharding.is_equivalent_to(divided.sharding, 2), array.sharding
    wide = jax.jit(jax.grad(lambda w: hg.train(of, w, hg.SGD(0.1), hg.stacked(x)).losses.sum()))
    assert wide(divided).sharding.is_equivalent_to(divided.sharding, 2)

def under(call):
    def called():
        with jax.set_mesh(explicit):
            call()
    return called

given = {"optimizer": hg.SGD(0.1, 0.75), "batches": hg.stacked(x)}

seed = jax.random.key(0)

def optimized(x, w, l2, **options):
    penalized = lambda w, l2, b: loss(w, 0, b) + jnp.mean(l2 * b[:, 0])
    of = lambda h, key: run(h["rate"], x, w, penalized, theta=h["l2"]) + 0 * jax.random.normal(seed)
    return hg.optimize(of, lambda v: v, {"rate": 0.1, "l2": l2}, meta_optimizer=optax.sgd(0.01), **options)

def learned():
    l2, folder = jax.device_put(jnp.zeros(8), NamedSharding(explicit, P("d"))), tempfile.mkdtemp()
    optimized(x, w, l2, meta_steps=1, checkpoint=folder)
    result = optimized(x, w, l2, meta_steps=2, checkpoint=folder)  # goes on from there
    assert jax.typeof(result.hypers["l2"]) == jax.typeof(l2)
    return float(result.hypers["rate"]), np.asarray(result.hypers["l2"])

def plus(by):  # programs that are alike but for a value that they close over
    return np.asarray(_programs.ahead(lambda w: w + by, w)(w))

def recorded():
    cut = hg.Microbatches(2, mesh=explicit)
    record = hg.record(loss, w, folder=tempfile.mkdtemp(), microbatches=cut, **given)
    states = [record.trained, record.rewind(3), dict(record.steps(1, 3))[3], record.resume(1)]
    assert all(jax.typeof(state.params) == jax.typeof(w) for state in states)
    slope = record.hypergradient(lambda trained: trained.params.sum())["optimizer"].learning_rate
    return [float(state.params.sum()) for state in states], float(slope)

def agree(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)

alike = optimized(whole, start, jnp.zeros(8), meta_steps=2).hypers
loops = {
    "optimize": lambda: agree(learned(), (float(alike["rate"]), np.asarray(alike["l2"]))),
    "constants": lambda: agree([plus(np.ones(3)), plus(np.zeros(3))], [np.asarray(w) + 1, np.asarray(w)]),
    "record": lambda: agree(recorded(), ([float(run(0.1, whole, start))] * 4, float(expected))),
    "check": lambda: agree(hg.check_reversal(loss, w, **given).exact, True),
    "plan": lambda: agree(len(hg.plan(loss, w, measure=False, **given).roads), 4),
    "inverse": lambda: hg.testing.check_inverse(hg.SGD(0.1, 0.75)),
}
for name, loop in list(loops.items())[:LOOPS]:
    under(loop)()

outside = lambda w, _, b: jnp.mean(x) * loss(w, _, b)
calls = {
    "params": (lambda: run(0.1, whole, w), "`params` lies on a mesh with explicit axes ('d',)"),
    "batches": (lambda: jax.grad(run)(0.1, x, start), "jax.set_mesh(mesh)"),
    "a closure": (under(lambda: run(0.1, x, w, outside)), "given to hg.train, reads an array on the mesh"),
    "a closure of another": (under(lambda: hg.check_reversal(outside, w, **given)), "given to hg.check_reversal, reads"),
}
for name, (call, text) in calls.items():
    try:
        call()
    except TypeError as e:
        assert text in str(e), (name, str(e))
    else:
        raise AssertionError(name)
assert abs(jax.jit(jax.grad(run))(0.1, x, w) - expected) < 1e-4, "as arguments of jit JAX keeps the types itself"
print("done")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [
        long(WORKS, id="automatic"),
        pytest.param("WAYS, LOOPS = 2, 1\n" + EXPLICIT, id="explicit"),
        long("WAYS = LOOPS = None\n" + EXPLICIT, id="explicit, in every way"),
    ],
)
def test_on_two_devices(program: str) -> None:
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", SETTING + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout == "done\n", done.stderr[-3000:]
