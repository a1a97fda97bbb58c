"""A run cut into segments: the hypergradient of `hg.Reversible`, bit for bit, in the memory that it is given."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, of_bits, some_of
from problems import network
from tiny import BATCHES, PARAMS, fails, final, loss

import hypergrad as hg
from hypergrad._problem import Problem
from hypergrad._set_up import set_up
from hypergrad.adjoints import passes, reversible, segments
from hypergrad.adjoints.auto import room, words_of
from hypergrad.adjoints.budget import _bytes_of_state, cut
from hypergrad.adjoints.capacity import capacities
from hypergrad.run.status import nothing_kept
from hypergrad.run.step import initial_state


STEPS = 11
NET = network("tanh")

# (where the last segment begins, how what comes before is cut)
CUTS = {"one": (8, (4,)), "two levels": (8, (2, 2)), "three levels": (8, (2, 2, 2)), "steps": (10, (10,)), "once": (5, (1,))}


def own_decays(dtype: Any) -> Any:
    return jax.tree.map(lambda w: jnp.linspace(0.05, 0.6, w.size, dtype=dtype).reshape(w.shape), NET.params(dtype))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda dtype: hg.SGD(hg.PerStep(jnp.linspace(0.1, 0.3, STEPS, dtype=dtype)), jnp.asarray(0.05, dtype)),
    "decays of each weight": lambda dtype: hg.SGD(0.1, own_decays(dtype)),
    "adam": lambda dtype: hg.Adam(hg.PerStep(jnp.linspace(0.01, 0.02, STEPS, dtype=dtype)), 0.3),
    "clipped": lambda dtype: hg.clip_by_global_norm(hg.SGD(0.2, jnp.asarray(0.5, dtype)), 1.0),
}


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Cut as told, whatever the budget."""

    def choose(first: int, cuts: tuple[int, ...]) -> Any:
        monkeypatch.setattr(reversible, "cut", lambda run, *_: dataclasses.replace(run, first=first, segments=cuts))
        return hg.Reversible(memory_budget="1 GiB")

    return choose


def value(optimizer: Any, theta: Any, adjoint: Any, dtype: Any = jnp.float32, loss: Any = NET.loss) -> Any:
    run = hg.train(loss, NET.params(dtype), optimizer, NET.batches(STEPS), theta=theta, adjoint=adjoint)
    return NET.value(run.params) + jnp.sum(run.losses)


def gradients(name: str, adjoint: Any, dtype: Any = jnp.float32) -> list[Any]:
    arrays = OPTIMIZERS[name](dtype), NET.theta(dtype)
    return jax.tree.leaves(jax.grad(lambda a: value(*a, adjoint, dtype))(arrays))


@pytest.mark.long
@of_bits("where", CUTS, "two levels")
def test_its_bits_are_those_of_the_whole_run(where: str, by_hand: Any) -> None:
    for x, y in zip(gradients("sgd", by_hand(*CUTS[where])), gradients("sgd", hg.Reversible()), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.long
@pytest.mark.of_bits
@some_of("name", list(OPTIMIZERS)[1:], "clipped")
def test_of_every_rule(name: str, by_hand: Any) -> None:
    with jax.enable_x64(True):
        found = gradients(name, by_hand(*CUTS["two levels"]), jnp.float64)
        for x, y in zip(found, gradients(name, hg.Reversible(), jnp.float64), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-300)
        for x, y in zip(found, gradients(name, hg.Unrolled(), jnp.float64), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9 * float(jnp.abs(y).max()))


@pytest.mark.long
@pytest.mark.of_bits
@pytest.mark.parametrize("transform", [jax.jit, long(jax.vmap)])
def test_inside_of_jit_and_vmap(transform: Any, by_hand: Any) -> None:
    adjoint, rates = by_hand(*CUTS["one"]), jnp.asarray([0.1, 0.2, 0.3])

    def gradient(adjoint: Any, rate: Any) -> Any:
        return jax.grad(lambda r: value(hg.SGD(r, 0.5), NET.theta(), adjoint))(rate)

    at = (lambda f: jnp.stack([f(r) for r in rates])) if transform is jax.jit else (lambda f: f(rates))
    found, expected = (at(transform(functools.partial(gradient, a))) for a in (adjoint, hg.Reversible()))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.long
@pytest.mark.of_bits
def test_running_statistics_and_values_per_step_of_theta(by_hand: Any) -> None:
    def stated(params: Any, theta: Any, batch: Any) -> Any:
        seen = jnp.mean(batch[0], axis=0)
        return theta["scale"] * NET.loss(params, theta["decay"], batch), seen

    def run(scale: Any, adjoint: Any) -> Any:
        theta = {"scale": hg.PerStep(scale), "decay": NET.theta()}
        options = {"statistics": hg.Statistics(jnp.zeros(NET.data[0].shape[1]), 0.3), "adjoint": adjoint}
        out = hg.train(stated, NET.params(), hg.SGD(0.1), NET.batches(STEPS), theta=theta, **options)
        return NET.value(out.params) + jnp.sum(out.statistics)

    scales = jnp.linspace(0.5, 1.5, STEPS)
    found, expected = (jax.grad(run)(scales, a) for a in (by_hand(*CUTS["two levels"]), hg.Reversible()))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.long
@some_of("level", ["one", "two levels"], "one")
def test_a_replay_that_ends_elsewhere_is_found(level: str, by_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adjoint, honest = by_hand(*CUTS[level]), segments.forward
    trained = passes.replay

    def lying(*args: Any, **options: Any) -> Any:
        end, *seen = honest(*args, **options)
        moved = [{n: s._replace(value=s.value._replace(high=s.value.high + 1)) for n, s in own.items()} for own in end]
        return (moved, *seen)

    def first_time(*args: Any) -> Any:
        monkeypatch.setattr(segments, "forward", honest)
        try:
            return trained(*args)
        finally:
            monkeypatch.setattr(segments, "forward", lying)

    monkeypatch.setattr(passes, "replay", first_time)
    fresh = lambda *a: NET.loss(*a) * 1.5  # noqa: E731
    with fails(hg.ReversalError, "velocity['w1']"):
        jax.grad(lambda r: value(hg.SGD(r, 0.5), NET.theta(), adjoint, loss=fresh))(0.1)


@pytest.mark.parametrize("momentum", [0.02, 0.3])
@pytest.mark.parametrize("steps", [50, 400, 3000])
def test_states_and_words_take_no_more_than_the_budget(momentum: float, steps: int) -> None:
    run, inputs, _ = set_up(Problem(loss, PARAMS, hg.SGD(0.1, momentum), BATCHES, steps=steps))
    with jax.enable_x64(True):
        with fails(ValueError, "memory_budget=1 B is too little", "The smallest that works is") as caught:
            cut(run, inputs, 1, None)
        smallest = int(str(caught.value).split()[-2])
        whole = capacities(run, inputs.h, None)[0][0] * 4
        for budget in np.linspace(smallest, whole, 9).astype(int).tolist():
            found = cut(run, inputs, budget, None)

            def taken(run: Any) -> int:
                rooms = 2 if run.segments else 1  # the way back may begin once more
                return sum(run.segments) * 2 * 8 * 2 + rooms * capacities(run, inputs.h, None)[0][0] * 2 * 2

            assert taken(found) <= budget
            shorter = found.first - math.prod(found.segments)  # and the last segment is as long as it can be
            assert shorter <= 0 or taken(dataclasses.replace(found, first=shorter)) > budget
            assert found.first % math.prod(found.segments) == 0 and 0 <= found.first < steps
        assert not cut(run, inputs, whole, None).first
        with fails(ValueError, f"smallest that works is {smallest} bytes"):
            cut(run, inputs, smallest - 1, None)


def test_states_of_links_of_other_shapes_are_counted_as_they_are() -> None:
    """Of Shampoo on one matrix: each state is as large as its integers."""
    wide = {"w": jnp.zeros((8, 3))}
    square = lambda params, _, batch: jnp.sum((params["w"] - batch) ** 2)  # noqa: E731
    run, inputs, _ = set_up(Problem(square, wide, hg.Shampoo(0.1), hg.full_batch(jnp.ones((8, 3))), steps=9))
    with jax.enable_x64(True):
        state = initial_state(run, inputs.values, nothing_kept(run))
        integers = sum(x.size * 8 for x in jax.tree.leaves(state) if x.dtype == jnp.int64)
    assert _bytes_of_state(run, inputs) == integers > 8 * 24 * 4


@pytest.mark.parametrize("isolate", [None, long(False)])
def test_a_budget_is_kept_to(isolate: bool | None) -> None:
    """What XLA sets aside for the whole derivative: beside the budget what does not grow with lost digits."""
    wide = {"w": jnp.zeros((32, 32))}
    square = lambda params, _, batch: jnp.mean((jnp.tanh(batch @ params["w"]) - batch) ** 2)  # noqa: E731
    problem = Problem(square, wide, hg.SGD(0.1, 0.1), hg.full_batch(jnp.ones((2, 32))), steps=2000)

    def taken(budget: int | None) -> tuple[int, int]:
        adjoint = hg.Reversible(memory_budget=budget, isolate=isolate)
        run, inputs, _ = set_up(problem, adjoint)
        size = room(adjoint, run, inputs, (True,) * len(jax.tree.leaves(inputs[:3]))).device
        return size, words_of(run, inputs)

    whole, words = taken(None)
    for part in (0.3, 0.6, 0.95):
        assert taken(int(part * words))[0] < part * words + 1.2 * (whole - words)


def test_the_smallest_budget_works() -> None:
    optimizer, steps = hg.SGD(0.1, 0.02), 200
    with fails(ValueError, "too little") as caught:
        jax.grad(lambda p: final(params=p, optimizer=optimizer, steps=steps, adjoint=hg.Reversible(memory_budget=1)))(PARAMS)
    smallest = int(str(caught.value).split()[-2])
    found, expected = (
        jax.grad(lambda p, a=a: final(params=p, optimizer=optimizer, steps=steps, adjoint=a))(PARAMS)
        for a in (hg.Reversible(memory_budget=smallest), hg.Reversible())
    )
    np.testing.assert_array_equal(found["w"], expected["w"])


@pytest.mark.long
def test_decays_that_are_traced_need_the_capacity_that_the_error_names() -> None:
    def gradient(capacity: int | None) -> Any:
        adjoint = hg.Reversible(memory_budget=1000, capacity=capacity)
        return jax.jit(jax.grad(lambda m: final(optimizer=hg.SGD(0.1, m), steps=100, adjoint=adjoint)))(0.02)

    with fails(jax.errors.JaxRuntimeError, "needs 18 32-bit words", "capacity=18"):
        gradient(None)
    expected = jax.grad(lambda m: final(optimizer=hg.SGD(0.1, m), steps=100))(0.02)
    np.testing.assert_allclose(gradient(18), expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{"driver": "host"}, {"buffer": "host"}])
def test_what_does_not_go_with_a_budget(options: Any) -> None:
    with fails(ValueError, "`memory_budget` is for digits on the device", "leave out `buffer`"):
        hg.Reversible(memory_budget="1 MiB", **options)


@pytest.mark.parametrize("budget", [0, -1, True, "12", "3 parsecs", 1.5])
def test_what_is_no_budget(budget: Any) -> None:
    with fails(ValueError, "`memory_budget` must be bytes", repr(budget)):
        hg.Reversible(memory_budget=budget)


def test_a_segment_has_room_for_its_hungriest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 64
    momentum = hg.PerStep(jnp.where(jnp.arange(steps) < 48, 0.99, 0.02))
    monkeypatch.setattr(reversible, "cut", lambda run, *_: dataclasses.replace(run, first=48, segments=(3,)))

    def slope(adjoint: Any) -> Any:
        return jax.grad(lambda rate: final(optimizer=hg.SGD(rate, momentum), steps=steps, adjoint=adjoint))(0.1)

    np.testing.assert_array_equal(slope(hg.Reversible(memory_budget="1 GiB")), slope(hg.Reversible()))


def test_another_run_that_comes_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start is met exactly, its losses are nearly the same: only its end tells."""
    steps, honest, trained = 11, segments.steps_within, passes.replay
    monkeypatch.setattr(reversible, "cut", lambda run, *_: dataclasses.replace(run, first=8, segments=(4,)))

    def faster(*args: Any, **options: Any) -> Any:
        if args[3].length != 2:  # the last segment is not replayed
            return honest(*args, **options)
        t, ((stepped, theta), others), entries = honest(*args, **options)
        return t, ((jax.tree.map(lambda x: (1 + 1e-5) * x, stepped), theta), others), entries

    def first_time(*args: Any) -> Any:
        monkeypatch.setattr(segments, "steps_within", honest)
        try:
            return trained(*args)
        finally:
            monkeypatch.setattr(segments, "steps_within", faster)

    monkeypatch.setattr(passes, "replay", first_time)
    follow = lambda w, _, t: jnp.sum((w - jnp.sin(t)) ** 2) / 2  # noqa: E731

    def end(rates: Any) -> Any:
        rule, adjoint = hg.SGD(hg.PerStep(rates), 0.5), hg.Reversible(memory_budget="1 GiB")
        return jnp.sum(hg.train(follow, jnp.array([0.5, -0.5]), rule, lambda t: t, steps=steps, adjoint=adjoint).params)

    with pytest.raises(hg.ReversalError):
        jax.grad(end)(jnp.linspace(0.1, 0.3, steps))


@pytest.mark.long
@pytest.mark.of_bits
def test_what_blocks_have_in_common_has_one_cotangent_a_step(by_hand: Any, tmp_path: Any) -> None:
    """The same as where each block has its own, added up by JAX, bit for bit."""
    params = {name: jnp.full((4, 4), 0.1 * k) for k, name in enumerate("abcde")}
    mean = lambda w, _, x: sum(jnp.mean((jnp.tanh(x @ a) - x) ** 2) * k for k, a in enumerate(w.values()))  # noqa: E731
    batches = hg.full_batch(jnp.linspace(-1, 1, 12).reshape(3, 4))

    def rule(rates: Any, momenta: Any) -> Any:
        return hg.add_decayed_weights(hg.SGD(hg.PerStep(rates), hg.PerStep(momenta)), hg.PerStep(rates))

    def slopes(adjoint: Any) -> Any:
        def end(rates: Any, momenta: Any) -> Any:
            run = hg.train(mean, params, rule(rates, momenta), batches, steps=STEPS, adjoint=adjoint)
            return sum(jnp.sum(x**3) for x in run.params.values()) + jnp.sum(run.losses)

        return jax.grad(end, (0, 1))(jnp.linspace(0.1, 0.3, STEPS), jnp.linspace(0.5, 0.9, STEPS))

    run, inputs, _ = set_up(Problem(mean, params, rule(jnp.ones(STEPS), jnp.full(STEPS, 0.5)), batches, steps=STEPS))
    assert [len(own) for own in run.common] == [3] * 5
    assert len({id(x) for own in inputs.h for x in own.values() if x.shape == (STEPS,)}) == 2
    expected = slopes(hg.Reversible())
    for adjoint in (by_hand(8, (4,)), hg.Reversible(buffer="host"), hg.Reversible(buffer=hg.Disk(str(tmp_path)))):
        jax.tree.map(np.testing.assert_array_equal, slopes(adjoint), expected)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), slopes(hg.Unrolled()), expected)
