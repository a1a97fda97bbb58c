"""Seeds of `hg.optimize`: spread over devices, with the means of one; and not, where training is on several already."""

import json
from typing import Any

import pytest
from processes import on_devices
from test_same_bits import lines


SEEDS = """
import json
from hypergrad import _programs

compiled_on, ahead = [], _programs.ahead

def note(*args, device=None, **options):
    compiled_on.append(None if device is None else device.id)
    return ahead(*args, device=device, **options)

_programs.ahead = note
mesh = mesh_of(jax.device_count())
data = put((X[0], Y[0]), mesh, P("data")) if "DIVIDED" in os.environ else (jnp.asarray(X[0]), jnp.asarray(Y[0]))

parts = {"microbatches": hg.Microbatches(4, mesh=mesh)} if "IN_PARTS" in os.environ else {}

def train_fn(h, key):
    w = {**START, "c": jax.random.normal(key, (24,)) / 5}
    return hg.train(loss, w, hg.SGD(h["rate"]), hg.full_batch(data), theta=h["l2"], steps=20, **parts).params

result = hg.optimize(
    train_fn, lambda w: loss(w, 0.0, data), {"rate": hg.positive(0.05), "l2": hg.positive(0.01)},
    meta_steps=2, seeds_per_step=6,
)
where = [list(x.devices())[0].id for x in jax.tree.leaves(result.hypers)]
print("seen", json.dumps([[[d.value, d.value_error, d.gradient_norm] for d in result.history], compiled_on, where]))
"""


def seen(count: int, **environment: str) -> Any:
    output = on_devices(SEEDS, count, JAX_DISABLE_MOST_OPTIMIZATIONS="1", **environment)
    return json.loads(lines(output, "seen")[0])


@pytest.fixture(scope="module")
def expected() -> Any:
    return seen(1)[0]


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert all(abs(a / b - 1) < 1e-5 for a, b in zip(one, other, strict=True))


@pytest.mark.long
def test_seeds_over_devices(expected: Any) -> None:
    found, compiled_on, where = seen(3)
    assert [x for x in compiled_on if x is not None] == [0, 1, 2] and where == [0, 0]
    assert_close(found, expected)


@pytest.mark.long
def test_seeds_that_are_on_several_devices_already(expected: Any) -> None:
    found, compiled_on, _ = seen(2, DIVIDED="1")
    assert [x for x in compiled_on if x is not None] == [0], "which was not compiled, once it had been traced"
    assert_close(found, expected)


@pytest.mark.long
def test_seeds_whose_microbatches_are_spread_over_devices(expected: Any) -> None:
    """By a mesh that is named alone: no array is on it."""
    found, compiled_on, _ = seen(2, IN_PARTS="yes")
    assert compiled_on[-1] is None
    assert_close(found, expected)
