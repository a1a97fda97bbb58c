"""`hg.Auto` where Python has a part in the run: what it takes is run as by its own name, or is not taken."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import fails, final, loss, train

import hypergrad as hg
from hypergrad.adjoints import auto


ROWS = np.linspace(-1, 1, 40, dtype=np.float32).reshape(20, 2)
FROM_PYTHON = hg.host_batches(list(ROWS))
STEPS = 400
LARGE = {"w": jnp.full(64, 0.1)}


@pytest.fixture
def _only_others_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in one piece takes 50,000 bytes, and any other road next to nothing."""
    monkeypatch.setattr(auto, "room", lambda adjoint, *_: auto.Room(50000 if adjoint == hg.Reversible() else 8))


def convolved(params, theta, batch):
    row = jnp.tanh(params["w"])[None, None, :3]
    return jnp.sum(jax.lax.conv_general_dilated(batch, row, (1,), "SAME") ** 2) + jnp.sum(params["w"] ** 2)


@pytest.mark.usefixtures("_only_others_fit")
def test_batches_from_python_train_on_each_or_are_refused():
    slope = jax.grad(lambda rate: final(batches=FROM_PYTHON, steps=20, optimizer=hg.SGD(rate, 0.1), adjoint=hg.Auto(500)))
    with fails(ValueError, "no road fits into memory_budget=500 B", "by hg.Reversible(). The smallest") as caught:
        slope(0.1)
    assert "Checkpointed" not in str(caught.value)
    roomy = jax.grad(lambda rate: final(batches=FROM_PYTHON, steps=20, optimizer=hg.SGD(rate, 0.1), adjoint=hg.Auto(10**9)))
    named = jax.grad(lambda rate: final(batches=FROM_PYTHON, steps=20, optimizer=hg.SGD(rate, 0.1)))
    assert roomy(0.1) == named(0.1)


class Handed(hg.Unrolled):
    """A road that leaves to another what it was set up for, as `hg.Auto` does."""

    driver_name = None


@pytest.mark.parametrize("stored", [hg.Unrolled(), hg.Checkpointed()], ids=["Unrolled", "Checkpointed"])
def test_a_scan_refuses_batches_from_python_whoever_asks(stored, monkeypatch):
    monkeypatch.setattr(auto, "ROADS", (stored,))
    monkeypatch.setattr(Handed, "run", lambda self, run, inputs: stored.run(run, inputs))
    with fails(ValueError, "hg.host_batches loads from Python while training runs, which a scan cannot"):
        train(batches=FROM_PYTHON, steps=20, adjoint=Handed())


@pytest.mark.usefixtures("_only_others_fit")
def test_a_run_that_is_cut_outside_of_jit_is_what_it_is_by_its_own_name(monkeypatch):
    """A convolution on several cores: the host repeats the step, unless the run is cut."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    taken = []
    run = hg.Reversible.run
    monkeypatch.setattr(hg.Reversible, "run", lambda self, *rest: taken.append(self) or run(self, *rest))

    def slope(adjoint):
        given = {"loss": convolved, "params": LARGE, "batches": hg.full_batch(jnp.ones((1, 1, 8))), "steps": STEPS}
        return jax.grad(lambda rate: final(**given, optimizer=hg.SGD(rate, 0.01), adjoint=adjoint))(0.01)

    found = slope(hg.Auto(40000))
    by_name = taken[-1]
    assert by_name.memory_budget is not None
    assert found == slope(by_name)


@pytest.mark.usefixtures("_only_others_fit")
def test_a_plan_of_batches_from_python_names_what_can_load_them():
    arguments = loss, LARGE, hg.SGD(jnp.float32(0.1), 0.01), hg.host_batches([np.zeros(64, np.float32)] * STEPS)
    options = {"measure": False, "memory_budget": 40000}
    roads = [road.adjoint for road in hg.plan(*arguments, **options).roads]
    assert roads == [hg.Reversible(), hg.Reversible(buffer="host")]
    with fails(ValueError, "hg.host_batches loads from Python, which hg.Reversible(memory_budget=8000) cannot"):
        hg.plan(*arguments, measure=False, adjoint=hg.Reversible(memory_budget=8000))
