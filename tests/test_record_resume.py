"""A run that goes on from a record with other hyperparameters, and what its methods are given."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long
from tiny import BATCHES, PARAMS, SGD, fails, loss

import hypergrad as hg


STEPS, GONE = 6, 3
TWO = {"a": jnp.array([[0.1, 0.2]]), "b": jnp.array([[0.3]])}  # matrices, as Muon asks for


def of_two(w: Any, theta: Any, batch: Any) -> jax.Array:
    del theta
    return jnp.sum((w["a"] * batch - 1.5) ** 2) + jnp.sum((w["b"] + batch) ** 2)


def schedule_free(rate: Any, weight_decay: Any = 0.0) -> Any:
    return hg.ScheduleFreeAdamW(rate, weight_decay=weight_decay)


def changed(before: float, after: float) -> hg.PerStep:
    return hg.PerStep(jnp.array([before] * GONE + [after] * (STEPS - GONE)))


OTHERS: dict[str, tuple[Any, Any, Any]] = {  # recorded, from there on, the two as one
    "rate": (schedule_free(0.01), schedule_free(0.05), schedule_free(changed(0.01, 0.05))),
    "by leaf": (
        schedule_free({"a": 0.01, "b": 0.02}),
        schedule_free(0.05),
        schedule_free({"a": changed(0.01, 0.05), "b": changed(0.02, 0.05)}),
    ),
    "muon": (hg.Muon(0.01), hg.Muon(0.05), hg.Muon(changed(0.01, 0.05))),
}


@pytest.mark.long
@pytest.mark.of_bits
@pytest.mark.parametrize("name", ["rate", long("by leaf"), long("muon")])
def test_sums_over_steps_have_what_held_before(name: str, tmp_path: pathlib.Path) -> None:
    """The weights of an average are made of all rates so far."""
    recorded, late, whole = OTHERS[name]
    batches = hg.stacked(jnp.linspace(-1.0, 1.0, STEPS))
    record = hg.record(of_two, TWO, recorded, batches, folder=tmp_path)
    expected = hg.train(of_two, TWO, whole, batches)
    for found in (record.resume(GONE, optimizer=late), record.resume(GONE, optimizer=whole)):
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)  # the weights are in units of the largest rate
        for x, y in zip(*map(jax.tree.leaves, (found.params, expected.params)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


BESIDE = {**TWO, "rest": jnp.ones((8, 8))}  # a and b are small: where they share all they lie side by side
APART: dict[str, tuple[Any, Any]] = {
    "rates of averages": (schedule_free, {"a": 0.01, "b": 0.02, "rest": 0.01}),
    "decays": (lambda rate: hg.AdamW(rate, weight_decay=0.1), {"a": 0.01, "b": 0.02, "rest": 0.01}),
}


@pytest.mark.parametrize("name", APART)
def test_leaves_that_share_all_from_there_on_and_not_before(name: str, tmp_path: pathlib.Path) -> None:
    rule, before = APART[name]
    batches = hg.stacked(jnp.linspace(-1.0, 1.0, STEPS))
    loss = lambda w, theta, x: of_two(w, theta, x) + jnp.sum((w["rest"] - x) ** 2)  # noqa: E731
    record = hg.record(loss, BESIDE, rule(before), batches, folder=tmp_path)
    whole = rule({key: changed(x, 0.05) for key, x in before.items()})
    expected, found = hg.train(loss, BESIDE, whole, batches), record.resume(GONE, optimizer=rule(0.05))
    for x, y in zip(*map(jax.tree.leaves, (found.params, expected.params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_record_of_a_run_too_small_for_its_grid_warns_as_training_does(tmp_path: pathlib.Path) -> None:
    given = {"loss": lambda *a: 1e-9 * loss(*a), "params": PARAMS, "optimizer": SGD, "batches": BATCHES, "steps": 8}
    small = "too small for its fixed-point grid"
    with pytest.warns(UserWarning, match=small):
        hg.train(**given)
    with pytest.warns(UserWarning, match=small):
        record = hg.record(**given, folder=tmp_path)
    for step in (0, 4, 8):
        with pytest.warns(UserWarning, match=small):
            assert record.resume(step).status.small == record.trained.status.small


def test_nor_does_one_warn_that_is_resumed_where_all_is_learned(tmp_path: pathlib.Path) -> None:
    """Warnings are errors here: gradients of the last steps are of a few quanta, those of the run are not."""
    record = hg.record(loss, PARAMS, hg.SGD(0.5, 0.3), BATCHES, steps=64, folder=tmp_path)
    assert record.resume(60).status.small == record.trained.status.small == -1


@pytest.fixture
def record(tmp_path: pathlib.Path) -> hg.Record:
    return hg.record(loss, PARAMS, SGD, BATCHES, steps=3, folder=tmp_path)


class Setting:
    scale: Any = 1.0


READ: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "loss": lambda s: {"loss": lambda w, theta, x: s.scale * loss(w, theta, x)},
    "batches": lambda s: {"batches": lambda t: s.scale * BATCHES(t)},
}


@pytest.mark.parametrize("name", READ)
def test_what_a_record_is_of_may_not_change_behind_it(name: str, tmp_path: pathlib.Path) -> None:
    """The loss and the batches are traced anew, with what they read from outside."""
    setting = Setting()
    given = {"loss": loss, "params": PARAMS, "optimizer": SGD, "batches": BATCHES, "steps": 3, **READ[name](setting)}
    record = hg.record(**given, folder=tmp_path)
    expected = record.resume(1).params
    setting.scale = 2.0
    for call in (lambda: record.resume(1), lambda: record.hypergradient(lambda run: jnp.sum(run.params["w"]))):
        with fails(ValueError, "changed since it was opened", "compute"):
            call()
    if name == "batches":
        with fails(ValueError, "what `batches` compute", "changed since it was opened"):
            record.resume(1, loss=lambda w, theta, x: 2 * loss(w, theta, x))
    else:
        record.resume(1, loss=loss)
    setting.scale = 1.0
    np.testing.assert_array_equal(record.resume(1).params["w"], expected["w"])


def test_arrays_of_numpy_are_those_of_the_time_of_recording(tmp_path: pathlib.Path) -> None:
    theta = np.asarray([0.1, 0.2], np.float32)
    penalized = lambda w, theta, x: loss(w, None, x) + jnp.sum(theta**2) * jnp.sum(w["w"] ** 2)  # noqa: E731
    record = hg.record(penalized, PARAMS, SGD, BATCHES, theta=theta, steps=3, folder=tmp_path)

    def found() -> tuple[Any, Any]:
        return record.resume(0).params["w"], record.hypergradient(lambda run: jnp.sum(run.params["w"]))["theta"]

    expected = found()
    theta[:] = 5.0
    for x, y in zip(found(), expected, strict=True):
        np.testing.assert_array_equal(x, y)


ASKED: dict[str, Callable[[hg.Record, Any], Any]] = {
    "hg.Record": lambda r, x: r.resume(1, optimizer=hg.SGD(x, 0.9)).params,
    "Record.hypergradient": lambda r, x: r.hypergradient(lambda run: x * jnp.sum(run.params["w"])),
}


@pytest.mark.parametrize("name", ASKED)
def test_files_are_not_read_inside_of_jit(name: str, record: hg.Record) -> None:
    with fails(ValueError, f"{name} works from Python and on files", "outside of jax.jit"):
        jax.jit(lambda x: ASKED[name](record, x))(0.1)


def test_nor_is_what_comes_after_a_step_differentiated(record: hg.Record) -> None:
    with fails(ValueError, "Record.resume works from Python", "hg.train(..., state=record.rewind(step).state)"):
        jax.grad(lambda rate: jnp.sum(record.resume(1, optimizer=hg.SGD(rate, 0.9)).params["w"]))(0.1)
    with fails(ValueError, "Record.resume works from Python"):
        jax.vmap(lambda rate: record.resume(1, optimizer=hg.SGD(rate, 0.9)).params["w"])(jnp.array([0.1, 0.2]))


def test_a_step_may_be_a_number_of_numpy_or_jax(record: hg.Record) -> None:
    for step in (np.int64(2), jnp.int32(2)):
        np.testing.assert_array_equal(record.rewind(step).losses, record.trained.losses[:2])
        np.testing.assert_array_equal(record.resume(step).losses, record.trained.losses)
        assert [k for k, _ in record.steps(np.int64(1), step)] == [2, 1]


def test_batches_from_python_cannot_follow(record: hg.Record) -> None:
    with fails(ValueError, "a record needs `batches` that are a function of t", "hg.host_batches"):
        record.resume(1, batches=hg.host_batches(lambda t: np.ones(2)))


def test_steps_come_backwards(record: hg.Record) -> None:
    with fails(ValueError, "`first` of steps must not be above `last`; got 3 and 1"):
        record.steps(3, 1)


@pytest.mark.parametrize(
    ("function", "error", "got"),
    [
        (lambda run: run.losses, ValueError, "float32[3]. Take its mean or sum"),
        (lambda run: (run.losses[0],), TypeError, "got tuple"),
        long(lambda run: None, TypeError, "got NoneType"),
        long(lambda run: 1, ValueError, "got int32[]"),
    ],
)
def test_a_hypergradient_is_that_of_one_number(function: Any, error: Any, got: str, record: hg.Record) -> None:
    with fails(error, "`function` must return one real float", got):
        record.hypergradient(function)
