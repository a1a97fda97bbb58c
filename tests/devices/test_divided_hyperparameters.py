"""Hyperparameters that are divided among devices and processes: learned, kept in a folder, and gone on with elsewhere."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from processes import in_processes, on_devices
from test_same_bits import lines


LEARNS = """
import json
mesh = mesh_of(jax.device_count())
data, w = put((X, Y), mesh, P(None, "data")), put(START, mesh, P())
rows = lambda x: put(x, mesh, P("data"))
l2 = rows(np.linspace(0.001, 0.02, 24, dtype=np.float32))

def penalized(w, theta, batch):
    x, y = batch
    return jnp.mean((layer(w, x) @ w["c"] - y) ** 2) + jnp.sum(theta * w["c"] ** 2)

def train_fn(h, key):
    return hg.train(penalized, w, hg.SGD(h["rate"]), hg.stacked(data), theta=h["l2"]).params

def val_fn(params):
    return jnp.mean((layer(params, X[0]) @ params["c"] - Y[0]) ** 2)

start = {"rate": hg.positive(0.05), "l2": hg.bounded(l2, 0.0, 1.0)}
steps, folder = int(os.environ["STEPS"]), os.environ["FOLDER"]

def looks(done):  # the first process alone, which must not wait for the others
    if jax.process_index() == 0:
        done.record(), done.at_bounds, repr(done)

result = hg.optimize(train_fn, val_fn, start, meta_steps=steps, checkpoint=folder, callbacks=[looks])
again = hg.optimize(train_fn, val_fn, start, meta_steps=steps, checkpoint=folder)
learned, kept = (x.hypers["l2"].unconstrained for x in (result, again))
assert learned.sharding.is_equivalent_to(l2.sharding, 1) and kept.sharding.is_equivalent_to(l2.sharding, 1)
assert all((a.data == b.data).all() for a, b in zip(learned.addressable_shards, kept.addressable_shards, strict=True))
values = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(hg.natural(result.hypers)["l2"])
print("seen", json.dumps([[[done.value, done.gradient_norm] for done in result.history], np.asarray(values).tolist()]))
"""


def seen(outputs: list[str]) -> list[Any]:
    return [json.loads(lines(output, "seen")[0]) for output in outputs]


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of one device, never stopped."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return seen([on_devices(LEARNS, 1, FOLDER=str(folder), STEPS="3", **QUICK)])[0]


QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.mark.long
def test_begun_by_two_processes_and_ended_by_one(expected: Any, tmp_path: pathlib.Path) -> None:
    options = {"FOLDER": str(tmp_path / "run"), **QUICK}
    in_processes(LEARNS, 2, STEPS="2", **options)
    with np.load(tmp_path / "run" / "hypers-000001.npz") as file:
        assert sorted(x.shape for x in file.values()) == [(), (), (24,), (24,)], "whole, and those of the step before"
    assert_close(seen([on_devices(LEARNS, 4, STEPS="3", **options)])[0], expected)


@pytest.mark.long
def test_begun_by_one_and_ended_by_four_processes(expected: Any, tmp_path: pathlib.Path) -> None:
    options = {"FOLDER": str(tmp_path / "run"), **QUICK}
    on_devices(LEARNS, 2, STEPS="1", **options)
    for found in seen(in_processes(LEARNS, 4, STEPS="3", **options)):
        assert_close(found, expected)
