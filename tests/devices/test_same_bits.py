"""Microbatches on 1, 2, 4 and 8 devices, and on 1, 2 and 4 processes: the same bits, forwards and backwards."""

import functools
import json
from typing import Any

import pytest
from covering import long
from processes import in_processes, on_devices


OF_DEVICES = """
import json

def on(count, rule, statistics, microbatches, road="jit"):
    mesh = mesh_of(count)
    data, w = put((X, Y), mesh, P(None, "data")), put(START, mesh, P())
    cut = microbatches and (hg.Microbatches(microbatches, mesh=mesh) if count > 1 else microbatches)
    f = jax.value_and_grad(lambda h, w, data: value(h, w, data, cut, rule, statistics), argnums=(0, 1), has_aux=True)
    return bits((jax.jit(f) if road == "jit" else f)(H, w, data))

print(json.dumps([[on(count, *run) for count in counts] for *run, counts in RUNS]))
"""
RUNS: list[Any] = [
    ["SGD", True, 16, "jit", (1, 2, 4, 8)],
    ["Adam", False, 16, "jit", (1, 8)],
    ["SGD", False, 16, "eager", (1, 4)],
    ["Sophia", False, 16, "jit", (1, 8)],
    ["SGD", False, None, "jit", (1, 8)],  # without microbatches the bits are others: it would show
]
SHORT: list[Any] = [["SGD", False, 16, "jit", (1, 4)]]


@pytest.mark.of_bits
@pytest.mark.parametrize("runs", [SHORT, long(RUNS)], ids=["short", "all"])
def test_any_number_of_devices(runs: list[Any]) -> None:
    found = json.loads(on_devices(f"RUNS = {runs!r}\n{OF_DEVICES}", 8))
    for (_, _, microbatches, *_), bits in zip(runs, found, strict=True):
        assert len(set(bits)) == 1 if microbatches else len(set(bits)) == len(bits), bits


OF_SIZES = """
mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("data", "model"))
W = {"layer": X[0, :, :4].reshape(8, 16) / 2, "rest": [rng.normal(size=5000).astype(np.float32) for _ in range(REST)]}

def curved(w, theta, batch):
    y = batch @ w["layer"]
    y = 0.5 * y * (1.0 + jnp.tanh(0.8 * (y + 0.04 * y**3)))  # constants on the left: XLA takes them to the right
    y = y + 0.1 * jax.random.normal(jax.random.key(0), y.shape)  # with a maximum
    return jnp.mean((y - 1.0) ** 2) + sum(jnp.mean(jnp.cos(x)) for x in w["rest"])

def f(rate, w, data):
    done = hg.train(curved, w, hg.SGD(rate, 0.5), hg.stacked(data), microbatches=hg.Microbatches(4, "data", mesh))
    return jnp.mean(done.losses), done.params

with jax.set_mesh(mesh):
    data, w = put(X.reshape(25, 32, 8)[:3], mesh, P(None, "data")), put(W, mesh, P())
    print("bits", bits(jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(jnp.float32(1.0), w, data)))
"""


@pytest.mark.of_bits
@pytest.mark.parametrize("rest", [0, long(9)])
def test_leaves_of_any_size_on_a_mesh_of_two_axes(rest: int) -> None:
    """What all leaves share is added in one order, however they lie; each part is the program that one device compiles."""
    program = f"REST = {rest}\n{OF_SIZES}"
    assert len({on_devices(program, count).splitlines()[-1] for count in (1, 2)}) == 1


OF_PROCESSES = """
mesh = mesh_of(jax.device_count())
data, w = put((X, Y), mesh, P(None, "data")), put(START, mesh, P())
cut = hg.Microbatches(16, mesh=mesh)
f = jax.value_and_grad(lambda h, w, data: value(h, w, data, cut, RULE), argnums=(0, 1), has_aux=True)
print("bits", bits(jax.jit(f)(H, w, data)))
"""


@pytest.mark.long
@pytest.mark.of_bits
@pytest.mark.parametrize(("rule", "processes", "devices"), [("SGD", 2, 2), long("Adam", 2, 2), long("Adam", 4, 1)])
def test_any_number_of_processes(rule: str, processes: int, devices: int) -> None:
    outputs = in_processes(f"RULE = {rule!r}\n{OF_PROCESSES}", processes, devices)
    assert [lines(output, "bits") for output in outputs] == [[alone(rule)]] * processes


@functools.cache
def alone(rule: str) -> str:
    return lines(on_devices(f"RULE = {rule!r}\n{OF_PROCESSES}", 1), "bits")[0]


def lines(output: str, head: str) -> list[str]:
    """Of what a program prints: the runtime prints, too."""
    return [line.partition(" ")[2] for line in output.splitlines() if line.startswith(f"{head} ")]


REVERSED_ELSEWHERE = """
import contextlib, tempfile, warnings
warnings.simplefilter("error")
found = {}
with tempfile.TemporaryDirectory() as folder:
    for count in (8, 2, 1):
        mesh = mesh_of(count)
        data, w = ((X, Y), START) if count == 1 else (put((X, Y), mesh, P(None, "data")), put(START, mesh, P()))
        given = {"theta": H["l2"], "microbatches": 16, "folder": folder + "/run"}
        with jax.set_mesh(mesh) if count == 8 else contextlib.nullcontext():
            record = hg.record(loss, w, hg.SGD(H["rate"]), hg.stacked(data), **given)
        slopes = record.hypergradient(lambda trained: jnp.sum(trained.params["a"] ** 2))
        found[count] = bits((record.trained.params, record.rewind(7).params, slopes["theta"], slopes["params"]))
    direct = jax.grad(lambda l2: jnp.sum(run({**H, "l2": l2}, START, (X, Y)).params["a"] ** 2))(jnp.asarray(H["l2"]))
    assert bits(direct) == bits(slopes["theta"])
assert len(set(found.values())) == 1, found
print("bits same")
"""


@pytest.mark.long
@pytest.mark.of_bits
def test_trained_on_eight_and_reversed_on_two() -> None:
    assert lines(on_devices(REVERSED_ELSEWHERE, 8), "bits") == ["same"]


REFUSED: dict[str, Any] = {
    "axes": ("hg.Microbatches(16, axis='model', mesh=mesh_of(2))", "the mesh has the axes ('data',), and no 'model'"),
    "count": ("hg.Microbatches(4, mesh=mesh_of(8))", "do not divide among the 8 devices along 'data'"),
    "which": ("hg.Microbatches(4, mesh=Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y')))", "which axis of"),
}
REFUSES = """
for cut, text in {calls!r}:
    try:
        run(H, START, (X, Y), eval(cut))
    except ValueError as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(cut)

def divided(w, theta, batch):
    part = lambda x, w: jax.lax.pmean(jnp.mean((x @ w["a"]) ** 2), "data")
    return jax.shard_map(part, mesh=mesh_of(2), in_specs=(P("data"), P()), out_specs=P())(batch[0], w)

try:
    hg.train(divided, START, hg.SGD(0.1), hg.stacked((X, Y)), microbatches=hg.Microbatches(4, mesh=mesh_of(2)))
except ValueError as error:
    assert "divides its work among devices itself (jax.shard_map)" in str(error), str(error)
print("bits refused")
"""


def test_what_cannot_be_spread_is_told() -> None:
    assert lines(on_devices(REFUSES.format(calls=list(REFUSED.values())), 8), "bits") == ["refused"]
