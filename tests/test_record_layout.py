"""Records of runs whose leaves lie side by side or share schedules, and are resumed or differentiated where they do not."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from recorded import SEGMENT, assert_same
from tiny import fails

import hypergrad as hg
from hypergrad.run import cuts
from hypergrad.run.by_leaf import by_leaf, laid_out


STEPS = 8
PARAMS = {name: jnp.full(4, float(i)) for i, name in enumerate("abcd")} | {"w": jnp.ones((10, 10))}


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "STORED", SEGMENT)


def loss(params: Any, _: Any, x: jax.Array) -> jax.Array:
    return sum(jnp.sum(jnp.cos(v - x)) for v in params.values())


def options(optimizer: Any, **others: Any) -> dict[str, Any]:
    return {"loss": loss, "params": PARAMS, "optimizer": optimizer, "batches": hg.full_batch(jnp.float32(5)), **others}


def rates(momentum: Any = 0.5, **of_leaves: float) -> hg.SGD:
    return hg.SGD(dict.fromkeys(PARAMS, 0.01) | of_leaves, momentum)


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    [long(rates(b=0.02, d=0.02)), long(hg.SGD(0.01, 0.5)), hg.clip(rates(a=0.02, b=0.02), 1e9)],
    ids=["others side by side", "all of them", "clipped"],
)
def test_a_run_is_resumed_with_leaves_laid_otherwise(optimizer: Any, tmp_path: pathlib.Path) -> None:
    """Each leaf goes on from what it was itself."""
    record = hg.record(**options(rates(c=0.02, d=0.02), steps=STEPS), folder=tmp_path)
    there = record.rewind(5)
    assert_same(record.resume(5, steps=5, optimizer=optimizer).params, there.params)
    found = record.resume(5, optimizer=optimizer)
    by_hand = hg.train(**options(optimizer, steps=3) | {"params": there.params}, state=there.state)
    for name in PARAMS:
        np.testing.assert_allclose(found.params[name], by_hand.params[name], rtol=1e-6, err_msg=name)


def test_a_state_by_leaf_is_laid_out_again_bit_for_bit(tmp_path: pathlib.Path) -> None:
    each = hg.SGD(0.01, dict.fromkeys("acdw", 0.5) | {"b": jnp.full(4, 0.25)})
    for i, optimizer in enumerate((hg.Adam(0.01, 0.3), each)):
        record = hg.record(**options(optimizer, steps=STEPS), folder=tmp_path / str(i))
        state = record._state(5)
        jax.tree.map(np.testing.assert_array_equal, laid_out(record._run, by_leaf(record._run, state)), state)


@pytest.mark.long
def test_decays_of_the_past_are_compared_link_by_link(tmp_path: pathlib.Path) -> None:
    """Of a, b and c, two are alike when recorded and two when resumed, and they are not the same two."""
    past = dict.fromkeys(PARAMS, 0.5) | {"c": 0.25}
    record = hg.record(**options(hg.SGD(0.01, past), steps=STEPS), folder=tmp_path)
    with fails(ValueError, "decays (momenta) of the steps before 5", "hg.PerStep"):
        record.resume(5, optimizer=hg.SGD(0.01, past | {"b": 0.25}))
    one_by_one = past | {"b": hg.PerStep(jnp.full(STEPS, 0.5))}
    assert_same(record.resume(5, optimizer=hg.SGD(0.01, one_by_one)).params, record.trained.params)


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    [long(hg.RMSProp(0.01, decay=0.5, momentum=0.5)), rates({"a": 0.5, "b": 0.5} | dict.fromkeys("cdw", 0.25))],
    ids=["of one rule", "of leaves"],
)
def test_equal_numbers_are_differentiated_each_for_itself(optimizer: Any, tmp_path: pathlib.Path) -> None:
    record = hg.record(**options(optimizer, steps=STEPS), folder=tmp_path)
    value = lambda run: sum(jnp.sum(jnp.sin(x)) for x in run.params.values())  # noqa: E731
    found = record.hypergradient(value)["optimizer"]
    arrays = jax.tree.map(jnp.asarray, optimizer)
    expected = jax.grad(lambda rule: value(hg.train(**options(rule, steps=STEPS))))(arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)


@pytest.mark.long
def test_decays_in_another_form_are_told(tmp_path: pathlib.Path) -> None:
    record = hg.record(**options(rates(dict.fromkeys(PARAMS, 0.5)), steps=STEPS), folder=tmp_path)
    with fails(ValueError, "their decays in the form that they had"):
        record.resume(5, optimizer=rates(dict.fromkeys(PARAMS, 0.5) | {"b": jnp.full(4, 0.5)}))


@some_of("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], jax.sharding.AxisType.Explicit)
def test_a_mesh_in_force_makes_no_other_run(kind: Any, tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    on_it = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P()))  # noqa: E731
    of = lambda w, theta, batch: jnp.sum((w - batch) ** 2)  # noqa: E731
    given: Any = (of, on_it(jnp.ones(2)), hg.SGD(0.1), hg.stacked(on_it(jnp.ones((3, 2)))))
    made = hg.record(*given, folder=tmp_path)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(hg.record(*given, folder=tmp_path).rewind(1).params, made.rewind(1).params)
