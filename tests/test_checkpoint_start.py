"""Which start a folder goes on from, and that it stops where its callbacks did."""

import enum
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from covering import long

import hypergrad as hg


class Kind(enum.Enum):
    ONE, TWO = 1, 2


def run(folder: pathlib.Path | None, start: Any, meta_steps: int, scale: float = 1.0, **options: Any) -> hg.Result:
    given = {"meta_optimizer": optax.sgd(0.01 / scale**2), "checkpoint": folder} | options
    function = lambda h, key: jnp.sum((scale * h["x"] - 3.0) ** 2)  # noqa: E731
    return hg.optimize(function, lambda value: value, {"x": start}, meta_steps=meta_steps, **given)


@pytest.mark.parametrize(
    ("there", "here", "scale"),
    [
        (1e-7, 9e-7, 1e6),
        long(jnp.zeros(3), jnp.array([9e-7, -9e-7, 5e-7]), 1e6),
        (jnp.array([1.0, 1e-3]), jnp.array([1.0, 1.02e-3]), 1.0),
        long(jnp.array([0.0, 1e-9]), jnp.array([0.0, 1.1e-9]), 1e9),
    ],
    ids=str,
)
def test_another_start_is_another_run_in_whatever_unit(there: Any, here: Any, scale: float, tmp_path: pathlib.Path) -> None:
    run(tmp_path, there, 2, scale)
    with pytest.raises(ValueError, match="it started from other values of hypers\\['x'\\]"):
        run(tmp_path, here, 3, scale)
    assert len(run(tmp_path, there, 3, scale).history) == 3


def test_what_another_machine_rounds_is_the_same_start(tmp_path: pathlib.Path) -> None:
    run(tmp_path, hg.unit_interval(0.5), 2)
    moved = jax.tree.map(lambda u: u + 3e-8, hg.unit_interval(0.5))
    assert len(run(tmp_path, moved, 3).history) == 3


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (jnp.tanh, jnp.sin),
        (b"a", b"b"),
        ("a", "b"),
        (Kind.ONE, Kind.TWO),
        (functools.partial(jnp.clip, min=0), functools.partial(jnp.clip, min=1)),
    ],
    ids=["function", "bytes", "str", "enum", "partial"],
)
def test_another_fixed_leaf_is_another_run(there: Any, here: Any, tmp_path: pathlib.Path) -> None:
    def go(fixed: Any) -> hg.Result:
        hypers = {"x": 1.0, "fixed": hg.fixed(fixed)}
        return hg.optimize(lambda h, key: h["x"], lambda x: x**2, hypers, meta_steps=2, checkpoint=tmp_path)

    go(there)
    go(there)
    with pytest.raises(ValueError, match="holds another run: hypers\\['fixed'\\] is .* there and .* here"):
        go(here)


@pytest.mark.parametrize("other", [{"kind": "cubic"}, {"positions": [0, 1, 3]}], ids=str)
def test_another_spread_of_the_same_knots_is_another_run(other: dict[str, Any], tmp_path: pathlib.Path) -> None:
    def go(**options: Any) -> hg.Result:
        hypers = {"x": hg.positive(hg.knots(jnp.ones(3), 5, **options))}
        function = lambda h, key: h["x"].values  # noqa: E731
        return hg.optimize(function, lambda x: jnp.sum((x - 2) ** 2), hypers, meta_steps=2, checkpoint=tmp_path)

    go()
    with pytest.raises(ValueError, match=r"holds another run: hypers\['x'\] is .*linear knots over 5 steps there and"):
        go(**other)


def test_more_meta_steps_do_not_pass_a_callback_that_has_stopped(tmp_path: pathlib.Path) -> None:
    stopping = lambda: {"callbacks": [hg.callbacks.EarlyStopping(2, 100.0)]}  # noqa: E731 (nothing is better by 100)
    assert len(run(tmp_path, 1.0, 9, **stopping()).history) == 3 == len(run(None, 1.0, 20, **stopping()).history)
    with pytest.warns(UserWarning, match="EarlyStopping stops this run after 3 of 20. To go on, give it more patience"):
        assert len(run(tmp_path, 1.0, 20, **stopping()).history) == 3
    with pytest.warns(UserWarning, match="it stays so: nothing is made. A call with more than meta_steps=9 goes on"):
        assert len(run(tmp_path, 1.0, 5).history) == 3
    assert len(run(tmp_path, 1.0, 10).history) == 10
