"""Records: any step of a finished training, bit for bit, and what follows from there."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, of_bits
from recorded import NET, OPTIMIZERS, RATES, SEGMENT, STEPS, assert_same, drawn, numbers, options
from tiny import fails

import hypergrad as hg
from hypergrad._record import Record
from hypergrad.optimizers import Link, Optimizer
from hypergrad.run import cuts


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "STORED", SEGMENT)


@of_bits("name", OPTIMIZERS, "sgd")
def test_every_step_is_that_of_a_run_that_ends_there(name: str, tmp_path: pathlib.Path) -> None:
    record = hg.record(**options(name), folder=tmp_path)
    assert_same(numbers(record.trained), numbers(hg.train(**options(name))))
    walked = dict(record.steps(0, STEPS))
    assert list(walked) == list(range(STEPS, -1, -1))
    for step in (SEGMENT - 1, SEGMENT, 2 * SEGMENT + 1):
        expected = hg.train(**options(name, step))
        assert_same(numbers(record.rewind(step)), numbers(expected))
        assert_same(numbers(walked[step]), numbers(expected))
        for weight in set(expected.state) - {link for link in expected.state if "weight" not in link}:
            np.testing.assert_allclose(walked[step].state[weight], expected.state[weight], rtol=1e-5)
    assert_same(walked[0].params, NET.params())


@of_bits(("states", "at"), [(1, [4]), (2, [4, 8]), (9, [4, 8])], (2, [4, 8]))
def test_with_states_kept_on_the_way_only_what_follows_a_step_is_undone(
    states: int, at: list[int], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = hg.record(**options(), folder=tmp_path / "plain")
    size = sum(x.nbytes for x in jax.tree.leaves(plain._end.state))
    record = hg.record(**options(), folder=tmp_path / "kept", states_budget=states * size)
    assert sorted(path.name for path in record.folder.glob("state-*")) == [f"state-{step}.npz" for step in at]
    undone: list[int] = []
    back = Record._back
    monkeypatch.setattr(Record, "_back", lambda self, state, k, *steps: undone.append(k) or back(self, state, k, *steps))
    for step in range(STEPS + 1):
        expected = numbers(plain.rewind(step))
        undone.clear()
        assert_same(numbers(record.rewind(step)), expected)
        nearest = min([kept for kept in at if kept >= step], default=STEPS)
        assert set(undone) == (set(range(step // SEGMENT, -(-nearest // SEGMENT))) if step < nearest else set())
    for (step, found), (same, expected) in zip(record.steps(0, STEPS), plain.steps(0, STEPS), strict=True):
        assert step == same
        assert_same(numbers(found), numbers(expected))
    assert_same(numbers(record.resume(3)), numbers(plain.trained))


@pytest.mark.long
@pytest.mark.of_bits
def test_links_of_other_shapes_than_the_parameters_are_gone_back_on(tmp_path: pathlib.Path) -> None:
    """Shampoo's roots are not of the shape of a weight."""
    given = options() | {"optimizer": hg.Shampoo(0.01, every=3)}
    record = hg.record(**given, folder=tmp_path)
    assert_same(hg.record(**given, folder=tmp_path).rewind(0).params, NET.params())
    assert_same(record.resume(5).params, record.trained.params)


@pytest.mark.long
@pytest.mark.of_bits
def test_statistics_are_gone_back_on_too(tmp_path: pathlib.Path) -> None:
    def stated(params: Any, theta: Any, batch: Any) -> Any:
        return NET.loss(params, theta, batch), jnp.mean(batch[0], axis=0)

    statistics = hg.Statistics(jnp.zeros(NET.data[0].shape[1]), 0.3)
    record = hg.record(**options(loss=stated, statistics=statistics), folder=tmp_path)
    expected = hg.train(**options(loss=stated, statistics=statistics, steps=6))
    assert_same(record.rewind(6).statistics, expected.statistics)


@of_bits("name", ["sgd", "adam"], "sgd")
def test_hypergradients_of_several_functions_without_training_again(name: str, tmp_path: pathlib.Path) -> None:
    record, given = hg.record(**options(name), folder=tmp_path), options(name)
    for function in (lambda run: NET.value(run.params), lambda run: jnp.sum(run.losses) + jnp.sum(run.params["w1"])):
        found = record.hypergradient(function)
        names = ("params", "optimizer", "theta")
        arrays = jax.tree.map(jnp.asarray, {name: given[name] for name in names})
        expected = jax.grad(lambda arrays, function=function: function(hg.train(**given | arrays)))(arrays)
        assert_same({name: found[name] for name in names}, expected)


@pytest.mark.long
@pytest.mark.of_bits
def test_resumed_it_ends_as_it_did(tmp_path: pathlib.Path) -> None:
    record = hg.record(**options("adam"), folder=tmp_path)
    for step in (0, 3, SEGMENT, STEPS - 1):
        assert_same(numbers(record.resume(step)), numbers(record.trained))


@pytest.mark.long
@pytest.mark.of_bits
def test_resumed_on_other_batches_it_is_the_run_that_had_them(tmp_path: pathlib.Path) -> None:
    """A batch left out: what came before it is the same."""
    gone, batches = 6, drawn()
    without = lambda t: batches(jnp.where(t < gone, t, t + 1))  # noqa: E731
    constant = {"optimizer": hg.SGD(0.1, 0.3)}
    record = hg.record(**options() | constant, folder=tmp_path)
    fresh = hg.train(**options(steps=STEPS - 1) | constant | {"batches": without})
    assert_same(numbers(record.resume(gone, batches=without, steps=STEPS - 1)), numbers(fresh))


def test_what_cannot_be_resumed(tmp_path: pathlib.Path) -> None:
    record = hg.record(**options(), folder=tmp_path)
    with fails(ValueError, "decays (momenta) of the steps before 5", "hg.PerStep"):
        record.resume(5, optimizer=hg.SGD(hg.PerStep(RATES), 0.06))
    with fails(ValueError, "accumulators of the recorded run"):
        record.resume(5, optimizer=hg.Adam(0.1))
    with fails(ValueError, "at least the 5 that are behind it"):
        record.resume(5, steps=4, optimizer=hg.SGD(0.1, 0.05))
    with fails(TypeError, "resume", "parms"):
        record.resume(5, parms=NET.params())


@pytest.mark.parametrize("step", [long(-1), STEPS + 1, 2.0, long(True)])
def test_what_is_no_step(step: Any, tmp_path: pathlib.Path) -> None:
    record = hg.record(**options(), folder=tmp_path)
    for ask in (record.rewind, record.resume, lambda s: record.steps(s, STEPS), lambda s: record.steps(0, s)):
        with fails(ValueError, f"`step` must be an integer from 0 to {STEPS}; got {step!r}"):
            ask(step)


@pytest.mark.long
def test_a_rule_that_loses_nothing_has_no_words(tmp_path: pathlib.Path) -> None:
    class Leapfrog(Optimizer):
        rate: Any
        chain = (Link("velocity", lambda h, z, g: -g), Link("params", lambda h, z: h.rate * z.velocity))

    given = options() | {"optimizer": Leapfrog(0.01)}
    record = hg.record(**given, folder=tmp_path)
    assert_same(numbers(record.rewind(3)), numbers(hg.train(**given | {"steps": 3})))
    assert_same(numbers(record.resume(3)), numbers(record.trained))
