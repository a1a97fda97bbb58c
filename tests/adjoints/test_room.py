"""Room for digits that is set aside before anybody knows how many there are."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long, some_of
from tiny import fails, final, train

import hypergrad as hg
from hypergrad import _evaluate, _needs
from hypergrad._needs import Need, fitted
from hypergrad.adjoints import capacity, reversible
from hypergrad.exact import WORD_BITS


STEPS = 400
SGD_DEFAULT = STEPS // WORD_BITS  # words: a bit a step


@pytest.fixture
def rooms(monkeypatch) -> list[dict[str, int]]:
    """Words of each parameter that programs set aside, by link, one after the other."""
    found: list[dict[str, int]] = []

    def spied(run: Any, *arguments: Any) -> Any:
        words = capacity.capacities(run, *arguments)
        found.append({link.name: own for link, own in zip(run.blocks[0].chain, words[0], strict=True) if link.decay})
        return words

    monkeypatch.setattr(reversible, "capacities", spied)
    return found


def much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is guessed."""
    for module in (_needs, _evaluate):
        monkeypatch.setattr(module, "MUCH", 1)


def value_of(h: Any, adjoint: Any = None) -> jax.Array:
    h = hg.natural(h)
    optimizer = hg.Adam(0.1, h["b1"], h["b2"]) if "b2" in h else hg.SGD(0.1, h["momentum"])
    return final(optimizer=optimizer, steps=STEPS, adjoint=adjoint or hg.Reversible())


def needed(rho: float) -> int:
    """Words of 16 bits that 400 steps take."""
    return math.floor(STEPS * math.log2(1 / rho) / WORD_BITS)


@pytest.mark.long
def test_much_room_for_digits_is_told(monkeypatch):
    def gradient(momentum, adjoint):
        return jax.jit(jax.grad(lambda m: final(optimizer=hg.Adam(0.1, m), adjoint=adjoint))).lower(momentum)

    monkeypatch.setattr(capacity, "MUCH", 1)
    said = r"decays are traced.*GiB for `mean`.*hg.bounded.*capacity=\{'mean': ...\}.*memory_budget="
    with pytest.warns(UserWarning, match=said):
        gradient(0.9, hg.Reversible())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gradient(0.9, hg.Reversible(capacity=4))
        jax.grad(lambda m: final(optimizer=hg.Adam(0.1, m)))(0.9)  # where it is known
    assert not told


@pytest.mark.long
@some_of("spread", ["one", "by step", "by knots", "by weight"], "by step")
def test_a_bounded_decay_takes_what_its_lower_end_would(spread, rooms):
    momentum = {
        "one": 0.9,
        "by step": hg.PerStep(jnp.linspace(0.81, 0.98, STEPS)),
        "by knots": hg.knots(jnp.array([0.81, 0.98]), STEPS),
        "by weight": {"w": jnp.array([0.85, 0.95])},
    }[spread]
    hypers = {"momentum": hg.bounded(momentum, 0.8, 0.99)}
    gradient = jax.grad(value_of)
    found, expected = jax.jit(gradient)(hypers), gradient(hypers)
    assert abs(rooms[0]["velocity"] - needed(0.8)) <= 1 < rooms[0]["velocity"] - rooms[1]["velocity"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


def test_a_bounded_decay_has_room_at_its_lower_end(rooms):
    hypers = {"momentum": hg.bounded(jnp.float32(0.8001), 0.8, 0.99)}
    low = jax.tree.map(lambda u: u - 100, hypers)
    assert float(hg.natural(low)["momentum"]) == np.float32(0.8)
    assert np.isfinite(jax.jit(jax.grad(value_of))(low)["momentum"].unconstrained)
    assert abs(rooms[0]["velocity"] - needed(0.8)) <= 1


def test_what_is_made_of_a_bounded_decay_is_not_bounded(rooms):
    def value(h: Any) -> jax.Array:
        return value_of({"momentum": 1 - hg.natural(h)["momentum"]})

    jax.jit(jax.grad(value))({"momentum": hg.bounded(0.5, 0.45, 0.6)})
    assert rooms == [{"velocity": SGD_DEFAULT}]


@pytest.mark.long
def test_room_by_the_names_of_links(rooms):
    hypers = {"b1": jnp.float32(0.9), "b2": jnp.float32(0.999)}
    gradient = lambda words: jax.jit(jax.grad(lambda h: value_of(h, hg.Reversible(capacity=words))))(hypers)  # noqa: E731
    found, expected = gradient({"mean": 2}), gradient(None)
    assert rooms[0] == {"mean": 4, "square": math.ceil(STEPS / 64)} and rooms[1]["mean"] == SGD_DEFAULT
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    with fails(jax.errors.JaxRuntimeError, "needs 2 32-bit words"):
        gradient({"mean": 1})
    truncated = hg.Truncated(STEPS, capacity={"mean": 2, "square": 1})
    jax.tree.map(np.testing.assert_array_equal, jax.jit(jax.grad(lambda h: value_of(h, truncated)))(hypers), expected)


@pytest.mark.parametrize("words", [-1, True, 1.5, "8", {"mean": -1}, {"mean": 2.0}])
@pytest.mark.parametrize("adjoint", [hg.Reversible, lambda capacity: hg.Truncated(3, capacity)])
def test_what_is_no_room(words, adjoint):
    with fails(ValueError, "count of 32-bit words per parameter", '{"mean": 4}', repr(words)):
        adjoint(capacity=words)


def test_room_for_a_link_that_is_not_there():
    with fails(ValueError, "`capacity` names 'momentum'", "there are velocity"):
        jax.grad(lambda m: value_of({"momentum": m}, hg.Reversible(capacity={"momentum": 3})))(0.9)


def learned(hypers: Any, trained: Any = None, **options: Any) -> hg.Result:
    def train_fn(h: Any, key: jax.Array) -> Any:
        optimizer = hg.AdamW(0.1, h["b1"], h["b2"], 1e-8, h["decay"])
        run = lambda: train(optimizer=optimizer, steps=STEPS)  # noqa: E731
        return (trained or (lambda run: run()))(run).params["w"]

    options = {"meta_steps": 3, "meta_optimizer": optax.adam(0.3), "stop_on_growth": False, "diagnose": False} | options
    return hg.optimize(train_fn, lambda w: jnp.sum((w - 0.3) ** 2), hypers, **options)


def hypers_of(b1: float = 0.9) -> Any:
    return {"b1": hg.unit_interval(b1), "b2": hg.unit_interval(0.99), "decay": hg.positive(0.1)}


def same_histories(found: hg.Result, expected: hg.Result) -> None:
    assert [done.value for done in found.history] == [done.value for done in expected.history]
    jax.tree.map(np.testing.assert_array_equal, found.hypers, expected.hypers)


@pytest.mark.long
def test_a_meta_loop_sets_aside_what_is_needed_where_it_is_much(monkeypatch, rooms):
    expected = learned(hypers_of())
    assert rooms == [{"mean": SGD_DEFAULT, "square": 7, "params": 2}]  # little: as it is guessed
    rooms.clear()
    much(monkeypatch)
    same_histories(learned(hypers_of()), expected)
    for name, rho in (("mean", 0.9), ("square", 0.99), ("params", 0.99)):
        assert needed(rho) <= rooms[1][name] <= needed(rho) * (1 + _needs.MARGIN) + 1
    assert len(rooms) == 2  # traced with a guess, which was not compiled


@pytest.mark.long
def test_room_grows_before_it_is_missed_and_is_given_back(monkeypatch, rooms):
    much(monkeypatch)
    towards = lambda sign: optax.GradientTransformation(  # noqa: E731
        lambda _: (), lambda g, state, _: (jax.tree.map(lambda x: sign * jnp.ones_like(x), g), state)
    )
    result = learned(hypers_of(), meta_optimizer=towards(-1.0), meta_steps=4)
    guess, *means = [room["mean"] for room in rooms]
    assert len(means) == 4 and means == sorted(means) and guess == SGD_DEFAULT  # once a change, none in vain
    for room, done in zip(rooms[1:], result.history, strict=True):
        assert room["mean"] >= needed(float(hg.natural(done.hypers)["b1"]))
        assert done.failed_seeds == 0
    rooms.clear()
    learned(hypers_of(0.5), meta_optimizer=towards(1.0), meta_steps=4)
    means = [room["mean"] for room in rooms[1:]]
    assert 1 < len(means) <= 4 and means[-1] < means[0] / 4


@pytest.mark.long
def test_bounds_hold_in_a_meta_loop_too(monkeypatch, rooms):
    """Where room is little they say more than the guess, and never need to grow."""
    hypers = hypers_of() | {"b1": hg.bounded(0.9, 0.85, 0.95)}
    learned(hypers)
    assert rooms[0]["mean"] - needed(0.85) in (0, 1)


def mapped(run):
    return jax.lax.map(lambda _: run(), jnp.arange(2))


@pytest.mark.long
@pytest.mark.parametrize("inside", [lambda run: jax.jit(run)(), long(mapped)])
def test_a_run_inside_of_a_program_of_the_users(inside, monkeypatch, rooms):
    """What it needs cannot be asked: it has what is guessed, and what was traced to ask is not run in its place."""
    pick = (lambda run: jax.tree.map(lambda x: x[0], inside(run))) if len(inside(lambda: jnp.ones(())).shape) else inside
    expected = learned(hypers_of(), trained=pick)
    much(monkeypatch)
    same_histories(learned(hypers_of(), trained=pick), expected)
    assert rooms[-1]["mean"] == SGD_DEFAULT
    assert len({done.value for done in expected.history}) == 3


@pytest.mark.long
def test_seeds_share_their_room(monkeypatch, rooms):
    much(monkeypatch)
    learned(hypers_of(), seeds_per_step=3, meta_steps=1)
    assert rooms[1]["mean"] <= needed(0.9) * (1 + _needs.MARGIN) + 1


def test_a_function_that_cannot_be_asked_is_not_refused(monkeypatch, rooms):
    """One that fails where nothing is trained."""

    def trained(run: Any) -> Any:
        result = run()
        if _needs.asking():
            raise RuntimeError("no training")
        return result

    much(monkeypatch)
    learned(hypers_of(), trained=trained, meta_steps=1)
    assert [room["mean"] for room in rooms] == [SGD_DEFAULT] * 2


@pytest.mark.long
def test_a_resumed_loop_has_the_room_it_had(monkeypatch, rooms, tmp_path):
    much(monkeypatch)
    expected = learned(hypers_of(), meta_steps=4)
    learned(hypers_of(), meta_steps=2, checkpoint=tmp_path)
    before = rooms[-1]
    rooms.clear()
    same_histories(learned(hypers_of(), meta_steps=4, checkpoint=tmp_path), expected)
    assert rooms[0]["mean"] >= before["mean"]


def test_room_fits_the_most_hungry_of_runs_that_share_a_name():
    need = lambda words, values: Need("mean", values, words, words / 100)  # noqa: E731
    assert fitted((), [need(16, 3), need(32, 3)]) == (("mean", (34, 0.34)),)
    has = (("mean", (34, 0.34)),)
    assert fitted(has, [need(33, 3)]) == has
    assert fitted(has, [need(40, 3)]) == (("mean", (50, 0.5)),)
    assert fitted(has, [need(1, 3)]) == has  # little: not worth a compilation
    assert fitted(has, [need(1, 10**9)]) == (("mean", (2, 0.01 * (1 + _needs.MARGIN))),)
    assert fitted(has, []) == has


@pytest.mark.long
def test_what_is_fixed_need_be_no_array(monkeypatch, rooms):
    much(monkeypatch)
    hypers = hypers_of() | {"name": hg.fixed("text"), "more": hg.fixed(2)}
    found, expected = learned(hypers), learned(hypers_of())
    assert [done.value for done in found.history] == [done.value for done in expected.history]
    assert rooms[1]["mean"] < SGD_DEFAULT


@pytest.mark.long
def test_a_meta_loop_in_a_budget_has_room_for_each_segment(monkeypatch, rooms):
    much(monkeypatch)
    follow = lambda w, _, t: jnp.sum((w - jnp.sin(0.1 * t)) ** 2) / 2  # noqa: E731

    def train_fn(h: Any, key: jax.Array) -> Any:
        optimizer, adjoint = hg.SGD(0.1, h["momentum"]), hg.Reversible(memory_budget=600)
        return hg.train(follow, jnp.array([0.5, -0.5]), optimizer, lambda t: t, steps=3000, adjoint=adjoint).params

    options = {"meta_steps": 3, "meta_optimizer": optax.sgd(0.0), "stop_on_growth": False, "diagnose": False}
    hypers = {"momentum": hg.unit_interval(0.3)}
    result = hg.optimize(train_fn, lambda w: jnp.sum((w - 0.3) ** 2), hypers, **options)
    assert [done.failed_seeds for done in result.history] == [0, 0, 0]
    assert len(rooms) == 2  # with a guess, which was not compiled, and fitted: no buffer was full


def test_room_grows_for_the_bits_of_a_step_alone():
    assert fitted((("mean", (34, 0.34)),), [Need("mean", 3, 20, 0.5)]) == (("mean", (34, 0.625)),)
