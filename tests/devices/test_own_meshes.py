"""Losses and callers that have a mesh of their own: the derivative of one device, or an error that says what does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import on_devices
from test_same_bits import lines
from tiny import fails

import hypergrad as hg


ROWS = jax.random.normal(jax.random.key(0), (4, 8, 3))
W = {"a": jnp.ones((3, 4)) / 4, "b": jnp.ones(4) / 4}


def value(rate: Any, w: Any, rows: Any, **options: Any) -> Any:
    loss = lambda w, _, x: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - 1) ** 2)  # noqa: E731
    return hg.train(loss, w, hg.SGD(rate), hg.stacked(rows), **options).losses[-1]


SPECS = {"whole": (P(), P()), "rows": (P(), P("d")), "columns": (P(None, "d"), P())}
WAYS: dict[str, Any] = {
    "grad": jax.grad(value),
    "jit": jax.jit(jax.grad(value)),
    "parts": jax.grad(lambda *a: value(*a, microbatches=4)),
}


@some_of(("spec", "way"), [(spec, way) for spec in SPECS for way in WAYS], ("columns", "grad"), ("rows", "jit"))
def test_a_mesh_of_one_explicit_device(spec: str, way: str) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    lies = dict(zip("ab", SPECS[spec], strict=True))
    w = {key: jax.device_put(x, NamedSharding(mesh, lies[key])) for key, x in W.items()}
    rows = jax.device_put(ROWS, NamedSharding(mesh, P() if spec == "columns" else P(None, "d")))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(WAYS[way](0.1, w, rows), jax.grad(value)(0.1, W, ROWS), rtol=1e-5)


@pytest.mark.parametrize("way", ["grad", long("jit")])
def test_divided_parameters_on_an_explicit_mesh_ask_for_it_in_force(way: str) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    with fails(TypeError, "`params['a']` lies on a mesh with explicit axes ('d',)", "jax.set_mesh(mesh)"):
        WAYS[way](0.1, W | {"a": jax.device_put(W["a"], NamedSharding(mesh, P(None, "d")))}, ROWS)


OWN = """
mesh = mesh_of(4)
rates, rows = jnp.linspace(0.02, 0.2, 4), X[:4, None, :8].repeat(3, 1)

def slope(rate, rows, **options):
    quadratic = lambda w, _, x: jnp.mean(jnp.tanh(x @ w) ** 2) + jnp.sum(w**2)
    return jax.grad(lambda r: jnp.sum(hg.train(quadratic, jnp.ones(5), hg.SGD(r), hg.stacked(rows), **options).params))(rate)

def each(microbatches):
    one = lambda rate, rows: slope(rate[0], rows[0], microbatches=microbatches)[None]
    return jax.shard_map(one, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=False)(rates, rows)

for count in COUNTS:  # devices of a shard_map train for themselves, whether or not they divide the count
    found, wanted = each(count), np.array([slope(rate, own, microbatches=count) for rate, own in zip(rates, rows)])
    print("own", np.abs(found - wanted).max() < 1e-5)
try:
    each(hg.Microbatches(4, mesh=mesh))
except ValueError as error:
    print("own", "inside of a jax.shard_map" in str(error))

laid = NamedSharding(mesh, P("data"))
for where in (laid, P("data")):
    constrained = lambda w, theta, batch: loss(w, theta, jax.lax.with_sharding_constraint(batch, where))
    with jax.set_mesh(mesh):
        try:
            cut = hg.Microbatches(8, mesh=mesh)
            hg.train(constrained, START, hg.SGD(0.1), hg.stacked((X, Y)), theta=0.1, microbatches=cut)
        except ValueError as error:
            print("own", "each device computes its own, whole. Write the loss of rows, without" in str(error))

def train_fn(put, h, key):
    w = jax.tree.map(lambda x: x + 0.01 * jax.random.normal(key, x.shape), START)
    return hg.train(loss, w, hg.SGD(h), hg.full_batch(put((X[0], Y[0]))), theta=0.1, steps=4).params

ways = lambda x: x, lambda x: jax.lax.with_sharding_constraint(x, laid), lambda x: jax.device_put(x, laid)
for put in ways[: len(COUNTS) + 1]:
    result = hg.optimize(
        lambda *a: train_fn(put, *a), lambda w: jnp.sum(w["a"] ** 2), hg.positive(0.1), meta_steps=1, seeds_per_step=2
    )
    print("value", result.history[0].value)
"""


@pytest.mark.parametrize("counts", [(2,), long((2, 4, 8))], ids=["short", "all"])
def test_what_has_a_mesh_of_its_own(counts: tuple[int, ...]) -> None:
    output = on_devices(f"COUNTS = {counts}\n{OWN}", 4, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert lines(output, "own") == ["True"] * (len(counts) + 3)
    values = [float(x) for x in lines(output, "value")]
    assert len(values) > 1
    np.testing.assert_allclose(values, values[0], rtol=1e-5)
