"""What a meta-loop does to ask how much room digits need: nothing that a user notices, whatever the function does."""

import pathlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long
from tiny import final, train

import hypergrad as hg
from hypergrad import _evaluate, _needs
from hypergrad.adjoints import capacity, reversible


STEPS = 100
LOOP: dict[str, Any] = {"meta_steps": 3, "meta_optimizer": optax.adam(0.1), "diagnose": False, "stop_on_growth": False}


def momentum(value: float = 0.9) -> Any:
    return {"m": hg.unit_interval(value)}


def one_run(h: Any, key: Any, **options: Any) -> Any:
    return train(optimizer=hg.SGD(0.1, h["m"]), steps=STEPS, **options).params["w"]


def distance(w: Any) -> jax.Array:
    return jnp.sum((w - 0.3) ** 2)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each program that is traced, the words of its first link."""
    found: list[int] = []

    def spied(*arguments: Any) -> Any:
        rooms = capacity.capacities(*arguments)
        found.append(rooms[0][0])
        return rooms

    monkeypatch.setattr(reversible, "capacities", spied)
    return found


def asked(monkeypatch: pytest.MonkeyPatch, learn: Any) -> tuple[Any, Any]:
    """What it comes to without asking, and with."""
    plain = learn()
    for module in (_needs, _evaluate):
        monkeypatch.setattr(module, "MUCH", 1)
    return plain, learn()


def values(result: hg.Result) -> list[float]:
    return [done.value for done in result.history]


@pytest.mark.long
def test_what_users_print_is_printed_as_often_and_of_trained_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def told(w: Any) -> jax.Array:
        jax.debug.callback(lambda x: seen.append(float(x)), w.sum())
        return distance(w)

    def learn() -> list[float]:
        seen.clear()
        hg.optimize(one_run, told, momentum(), **LOOP)
        jax.effects_barrier()
        return list(seen)

    plain, with_asking = asked(monkeypatch, learn)
    assert with_asking == plain and len(plain) == LOOP["meta_steps"]


@pytest.mark.long
def test_a_check_on_what_was_trained_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check stands between two runs, of which the later's momentum is made of it."""

    def two_runs(h: Any, key: Any) -> Any:
        first = train(optimizer=hg.SGD(0.1, h["m"]), steps=STEPS)
        sound = eqx.error_if(first.losses[0], ~(first.losses[0] > 0), "nothing was trained")
        return one_run({"m": h["m"] * sound / first.losses[0]}, key)

    plain, with_asking = asked(monkeypatch, lambda: hg.optimize(two_runs, distance, momentum(), **LOOP))
    assert values(plain) == values(with_asking)


@pytest.mark.long
def test_a_decay_made_of_another_runs_results_is_guessed(monkeypatch: pytest.MonkeyPatch, words: list[int]) -> None:
    def two_runs(h: Any, key: Any) -> Any:
        losses = train(optimizer=hg.SGD(0.1, h["m"]), steps=STEPS).losses
        return one_run({"m": h["m"] * losses[1] / losses[0]}, key)

    plain, with_asking = asked(monkeypatch, lambda: hg.optimize(two_runs, distance, momentum(), **LOOP))
    assert values(plain) == values(with_asking)
    assert max(words) == -(-STEPS // 16)


@pytest.mark.parametrize("jit", [long(True), False])
def test_what_else_is_compiled_asks_nothing(jit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line search traces the function once more; without jit, the function compiles itself."""
    train_fn = one_run if jit else lambda h, key: jax.jit(one_run)(h, key)
    options = LOOP | {"meta_optimizer": optax.lbfgs() if jit else optax.adam(0.1), "jit": jit}
    guess = 2 * 2 * -(-STEPS // 16)  # bytes of two parameters
    for module in (_needs, _evaluate):
        monkeypatch.setattr(module, "MUCH", guess + 1 if jit else guess)
    assert np.isfinite(values(hg.optimize(train_fn, distance, momentum(), **options))).all()


@pytest.mark.parametrize(
    "momenta", [long(np.full(STEPS, 0.9)), np.r_[np.full(STEPS - 20, 0.9), np.full(20, 0.4)]], ids=["one", "two"]
)
def test_the_last_steps_have_the_room_that_they_need(
    momenta: np.ndarray, monkeypatch: pytest.MonkeyPatch, words: list[int]
) -> None:
    hypers = {"m": hg.unit_interval(hg.PerStep(jnp.asarray(momenta, jnp.float32)))}
    train_fn = lambda h, key: one_run(h, key, adjoint=hg.Truncated(40))  # noqa: E731
    plain, with_asking = asked(monkeypatch, lambda: hg.optimize(train_fn, distance, hypers, **LOOP | {"meta_steps": 1}))
    assert values(plain) == values(with_asking)
    assert len(words) == 3  # once; then with a guess, which was not compiled, and fitted


def test_a_bound_holds_where_it_is_rounded() -> None:
    """0.9 is 0.8984 in bfloat16, of which 8,000 steps lose a word more."""
    hypers = jax.tree.map(lambda u: jnp.asarray(u - 50, jnp.bfloat16), {"m": hg.bounded(0.95, 0.9, 0.99)})
    gradient = jax.jit(jax.grad(lambda h: final(optimizer=hg.SGD(0.1, hg.natural(h)["m"]), steps=8000)))
    assert jnp.isfinite(gradient(hypers)["m"].unconstrained)


@pytest.mark.long
def test_links_that_capacity_does_not_name_are_asked(monkeypatch: pytest.MonkeyPatch, words: list[int]) -> None:
    adjoint = hg.Reversible(capacity={"square": 1})
    hypers = {"m": hg.unit_interval(0.9), "b2": hg.unit_interval(0.99)}
    train_fn = lambda h, key: train(optimizer=hg.Adam(0.1, h["m"], h["b2"]), steps=STEPS, adjoint=adjoint).params["w"]  # noqa: E731
    plain, with_asking = asked(monkeypatch, lambda: hg.optimize(train_fn, distance, hypers, **LOOP))
    assert values(plain) == values(with_asking)
    assert words[-1] < words[0] == -(-STEPS // 16)


def test_an_adjoint_with_room_by_link_is_a_value() -> None:
    one, other = hg.Reversible(capacity={"a": 1, "b": 2}), hg.Reversible(capacity={"b": 2, "a": 1})
    assert one == other and hash(one) == hash(other) != hash(hg.Reversible())
    assert (
        eqx.filter_jit(lambda adjoint: one_run({"m": 0.9}, None, adjoint=adjoint))(hg.Truncated(3, {"velocity": 3})).size
        == 2
    )
    with pytest.raises(ValueError, match="by the names of links"):
        hg.Reversible(capacity={1: 2, "b": 3})


@pytest.mark.long
def test_starts_are_asked_with_what_is_fixed_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_fn(h: Any, key: Any) -> Any:
        return one_run({"m": h["m"] * (0.5 if isinstance(h["kind"], str) else h["kind"])}, key)

    starts = [momentum() | {"kind": hg.fixed(kind)} for kind in (0.5, "slow")]
    learn = lambda: hg.restarts(train_fn, distance, starts, **LOOP)  # noqa: E731
    plain, with_asking = asked(monkeypatch, learn)
    assert [values(x) for x in plain] == [values(x) for x in with_asking]


@pytest.mark.long
def test_restarts_resume_with_the_room_of_each(tmp_path: pathlib.Path) -> None:
    """The second outgrows what is guessed: 0.01 loses more than a bit a step."""
    starts = [momentum(0.9), momentum(0.01)]
    learn = lambda steps, **options: hg.restarts(one_run, distance, starts, **LOOP | {"meta_steps": steps}, **options)  # noqa: E731
    expected = learn(3)
    learn(2, checkpoint=tmp_path)
    found = learn(3, checkpoint=tmp_path)
    assert [values(x) for x in found] == [values(x) for x in expected]


@pytest.mark.long
def test_a_road_that_fits_a_budget_is_found_where_values_are_known_inside_of_a_program() -> None:
    gradient = jax.grad(lambda m: final(optimizer=hg.SGD(0.1, m), steps=20, adjoint=hg.Auto(10**9)))
    np.testing.assert_allclose(jax.jit(gradient)(0.9), gradient(0.9), rtol=1e-6)
