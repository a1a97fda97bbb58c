"""A step in pieces computes what it computes whole, and what is `alone` is one program wherever it stands."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypergrad import _programs as programs
from hypergrad.run.pieces import alone, compiled


Step = Callable[[Any, Any, Any], Any]
data = jnp.arange(3.0)


def none(fixed: Any, fed: Any, moving: Any) -> Any:
    x, n = moving
    return fixed * x + fed[0], n + 1


def between(fixed: Any, fed: Any, moving: Any) -> Any:
    x, n = moving
    a, b = alone(lambda x, y: (jnp.sin(x) * y, x))(x + 1, fed[0])
    return a + fixed * b, n + 1


def at_both_ends(fixed: Any, fed: Any, moving: Any) -> Any:
    x, n = moving
    (a,) = alone(lambda x: [x * data])(x)
    return alone(jnp.tanh)(a * fixed + fed[0]), n + 1


def twice_with_numbers(fixed: Any, fed: Any, moving: Any) -> Any:
    x, n = moving
    power = alone(lambda x, k: x**k)
    return power(power(x, 2) / fixed, 3), n


def alone_with_what_stays(fixed: Any, fed: Any, moving: Any) -> Any:
    x, n = moving
    return x, alone(lambda f, n: n + f[0].astype(n.dtype))(fed, n)


STEPS = [none, between, at_both_ends, twice_with_numbers, alone_with_what_stays]


def start() -> tuple[Any, Any]:
    return jnp.linspace(0.5, 2, 3), jnp.int32(0)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_pieces_compute_the_whole(step: Step) -> None:
    fixed, fed = jnp.float32(1.5), [jnp.ones(3)]
    run, ours, theirs = compiled(step, fixed, fed, start()), start(), start()
    for _ in range(3):
        ours, theirs = run(fixed, fed, ours), step(fixed, fed, theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


def test_the_last_piece_takes_the_memory_of_what_moves() -> None:
    fixed, fed, moving = jnp.float32(1.5), [jnp.ones(3)], start()
    compiled(between, fixed, fed, moving)(fixed, fed, moving)
    assert not moving[0].is_deleted() and moving[1].is_deleted()  # another piece has read the first
    assert not fixed.is_deleted() and not fed[0].is_deleted()


def test_equal_functions_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    kept = programs.kept
    monkeypatch.setattr(programs, "kept", lambda key, make: kept(key, lambda: made.append(key) or make()))
    scaled = lambda factor: lambda fixed, fed, moving: (alone(lambda x: jnp.cos(x * factor) * data)(moving[0]), moving[1])  # noqa: E731
    for factor, programs_made in ((3.25, 1), (3.25, 1), (4.25, 2)):
        compiled(scaled(factor), jnp.float32(1), [], start())
        assert len(made) == programs_made
