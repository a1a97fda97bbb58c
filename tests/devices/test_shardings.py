"""What belongs to a parameter lies where it lies: integers, words and cotangents, as the compiled program says."""

import pytest
from processes import on_devices
from test_same_bits import lines


LAYERS = """
import collections, math, re

WIDTH = 64

def mlp(w, theta, batch):
    x, y = batch
    for layer in w["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ w["out"] - y) ** 2) + theta * sum(jnp.sum(layer["w"] ** 2) for layer in w["layers"])

STEPS = 48  # in which words are stored
keys = jax.random.split(jax.random.key(0), 4)
LAYER = lambda key: {"w": jax.random.normal(key, (WIDTH, WIDTH)) / 8, "b": jnp.zeros(WIDTH)}
WHOLE = {"layers": [LAYER(key) for key in keys[:2]], "out": jax.random.normal(keys[2], (WIDTH,)) / 8}
ROWS = jax.random.normal(keys[3], (32, WIDTH))

def placed(mesh, spec_of):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec_of(x))), WHOLE)

def compiled(mesh, spec_of, rows, dtype=jnp.float32, adjoint=hg.Reversible()):
    def f(h, w, rows):
        batches = hg.full_batch((rows, jnp.sin(rows[:, 0])))
        done = hg.train(mlp, w, hg.SGD(h["rate"], 0.5), batches, theta=h["l2"], steps=STEPS, adjoint=adjoint)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(done.params))
    cast = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
    w, rows = cast(placed(mesh, spec_of)), jax.device_put(cast(ROWS), NamedSharding(mesh, rows))
    h = cast({"rate": 0.05, "l2": 1e-3})
    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(h, w, rows).compile()
        return program, program(h, w, rows)

BYTES = {"s64": 8, "u16": 2}

def carried(program):
    # Bytes a device of integers and words that the largest loop carries.
    found = [0]
    for state in re.findall(r"= (\\(.*?\\)) while\\(", program.as_text()):
        parts = re.findall(r"(s64|u16)\\[([\\d,]+)\\]", state)
        sizes = [BYTES[kind] * math.prod(map(int, shape.split(","))) for kind, shape in parts]
        found.append(sum(size for size in sizes if size >= 64))
    return max(found)

def close(found, expected, tolerance):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        scale = np.max(np.abs(b)) + 1e-30
        assert np.max(np.abs(np.asarray(a) - np.asarray(b))) < tolerance * scale, (a, b)

one, flat, square = mesh_of(1), mesh_of(8), Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
everywhere = lambda x: P()
"""
KEPT = (
    LAYERS
    + """
alone, expected = compiled(one, everywhere, P())
fsdp, found = compiled(flat, lambda x: P("data"), P("data"))
close(found, expected, 1e-5)
ratio = carried(alone) / carried(fsdp)
assert abs(ratio / 8 - 1) < 0.05, ratio
gathered = re.findall(r"= s64\\[([\\d,]+)\\]\\S* all-gather", fsdp.as_text())
assert all(math.prod(map(int, shape.split(","))) <= 64 for shape in gathered), gathered
for x, w in zip(jax.tree.leaves(found[1][1]), jax.tree.leaves(placed(flat, lambda x: P("data"))), strict=True):
    assert x.sharding.shard_shape(x.shape) == w.sharding.shard_shape(w.shape), (x.sharding, w.sharding)
print("shardings kept")
"""
)
PARALLEL = (
    LAYERS
    + """
alone, expected = compiled(one, everywhere, P())
_, data = compiled(flat, everywhere, P("data"))
columns = lambda x: P(None, "model") if x.ndim == 2 else P()
program, tensor = compiled(square, columns, P("data"))
halves, rest = 2 * WIDTH**2 / 2, 3 * WIDTH
assert abs(carried(alone) / carried(program) * (halves + rest) / (2 * halves + rest) - 1) < 0.05, carried(program)
close(data, expected, 1e-5)
close(tensor, expected, 1e-5)
with jax.enable_x64(True):
    of = lambda adjoint: compiled(square, columns, P("data"), jnp.float64, adjoint)[1]
    close(of(hg.Reversible()), of(hg.Unrolled()), 1e-9)
print("parallel equal")
"""
)


@pytest.mark.long
def test_integers_and_words_lie_with_their_parameters() -> None:
    assert lines(on_devices(KEPT, 8, JAX_DISABLE_MOST_OPTIMIZATIONS="1"), "shardings") == ["kept"]


@pytest.mark.long
def test_data_and_tensor_parallel() -> None:
    assert lines(on_devices(PARALLEL, 8, JAX_DISABLE_MOST_OPTIMIZATIONS="1"), "parallel") == ["equal"]


PLANNED = (
    LAYERS
    + """
def found(mesh, spec_of, rows, adjoint):
    # Bytes of a device: as planned, as the program takes them, and the smallest budget.
    w, rows = placed(mesh, spec_of), jax.device_put(ROWS, NamedSharding(mesh, rows))
    def given(rate, w, rows):
        batches = hg.full_batch((rows, jnp.sin(rows[:, 0])))
        return {"loss": mlp, "params": w, "optimizer": hg.SGD(rate, 0.5), "batches": batches, "theta": 1e-3, "steps": STEPS}
    def end(rate, w, rows, adjoint=adjoint):
        return sum(jnp.sum(x) for x in jax.tree.leaves(hg.train(**given(rate, w, rows), adjoint=adjoint).params))
    (road,) = hg.plan(**given(jnp.asarray(0.05), w, rows), adjoint=adjoint).roads
    with jax.set_mesh(mesh):  # leaves that may be divided do not lie side by side
        taken = jax.jit(jax.grad(end)).lower(0.05, w, rows).compile().memory_analysis().temp_size_in_bytes
    assert abs(road.device / taken - 1) < 0.05, (adjoint, road.device, taken)
    try:
        jax.grad(end)(0.05, w, rows, hg.Reversible(memory_budget=1))
    except ValueError as error:
        return road.device, int(re.search(r"smallest that works is (\\d+) bytes", str(error))[1])

for adjoint in (hg.Reversible(), hg.Unrolled()):
    whole, least = found(one, everywhere, P(), adjoint)
    part, eighth = found(flat, lambda x: P("data"), P("data"), adjoint)
    assert part < whole / 2 and eighth == least / 8, (whole, part, least, eighth)
print("plan of each")
"""
)


@pytest.mark.long
def test_a_plan_and_a_budget_are_of_one_device() -> None:
    assert lines(on_devices(PLANNED, 8, JAX_DISABLE_MOST_OPTIMIZATIONS="1"), "plan") == ["of each"]
