"""A process that lives long: programs give way, and what one call compiled or closed over does not stay for the next.

The long form is `experiments.benchmarks.long_lived`.
"""

import gc
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of

import hypergrad as hg
from hypergrad import _programs as programs
from hypergrad.adjoints import retry


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of programs that XLA compiles while a test runs."""
    from jax._src import compiler  # nothing public tells

    names: list[str] = []
    original = compiler.backend_compile_and_load

    def noted(backend: Any, module: Any, *args: Any, **options: Any) -> Any:
        names.append(str(module.operation.attributes["sym_name"]))
        return original(backend, module, *args, **options)

    monkeypatch.setattr(compiler, "backend_compile_and_load", noted)
    return names


class Loss:
    """A loss that can be asked whether it still lives, with data that can, too."""

    def __init__(self, seed: int) -> None:
        self.data = np.random.default_rng(seed).normal(size=64).astype(np.float32)

    def __call__(self, w: jax.Array, theta: jax.Array, _: Any) -> jax.Array:
        return jnp.sum((w - self.data[:3]) ** 2) + theta * jnp.mean(self.data * w[0])


def after(loss: Any, rate: Any, theta: Any, adjoint: Any = None) -> jax.Array:
    adjoint = adjoint or hg.Reversible()
    batches = hg.full_batch(jnp.zeros(1))
    return jnp.sum(hg.train(loss, jnp.ones(3), hg.SGD(rate), batches, theta=theta, steps=4, adjoint=adjoint).params)


def optimized(loss: Loss) -> None:
    train = lambda h, _: hg.train(loss, jnp.ones(3), hg.SGD(h["a"]), hg.full_batch(0.0), theta=h["b"], steps=4).params  # noqa: E731
    hg.optimize(train, lambda w: jnp.sum(w**2), {"a": hg.positive(0.1), "b": jnp.float32(0.5)}, meta_steps=2)


def differentiated(loss: Loss, adjoint: Any = None) -> None:
    jax.grad(lambda rate: after(loss, rate, 0.5, adjoint))(0.1)


WAYS: dict[str, Callable[[Loss], Any]] = {
    "hg.optimize": optimized,
    "jax.grad": differentiated,
    "from Python": lambda loss: differentiated(loss, hg.Reversible(driver="host")),
    "hg.Unrolled": lambda loss: differentiated(loss, hg.Unrolled()),
    "hg.check_reversal": lambda loss: hg.check_reversal(
        loss, jnp.ones(3), hg.SGD(0.1), hg.full_batch(0.0), theta=0.5, steps=4
    ),
}


@some_of("way", WAYS, "jax.grad")
def test_a_new_loss_that_computes_the_same_compiles_nothing_and_is_let_go(way: str, compiled: list[str]) -> None:
    for seed in range(2):  # what is compiled once for all
        WAYS[way](Loss(seed))
    compiled.clear()
    losses = []
    for seed in range(2, 5):
        loss = Loss(seed)
        WAYS[way](loss)
        losses.append((weakref.ref(loss), weakref.ref(loss.data)))
        del loss
    gc.collect()
    assert compiled == []
    assert [known() for pair in losses for known in pair] == [None] * 6


def test_programs_give_way_by_the_memory_maps_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the few that a loop uses by turns, and in danger to the most recent one, whatever it takes."""
    monkeypatch.setattr(programs, "_PROGRAMS", type(programs._PROGRAMS)())
    monkeypatch.setattr(programs, "mapped", lambda: len(programs._PROGRAMS) * 0.02)
    made = lambda numbers: [programs.kept(i, lambda i=i: i) for i in numbers]  # noqa: E731
    left = lambda: [key for key, _ in programs._PROGRAMS]  # noqa: E731
    assert made(range(25)) == [*range(25)] and left() == [*range(5, 25)]  # 20 of them have 0.4
    assert programs.kept(5, lambda: "made again") == 5
    made([25])
    assert left() == [*range(7, 25), 5, 25]
    monkeypatch.setattr(programs, "mapped", lambda: 0.5)  # of others: none are made at each call that are used by turns
    made([26])
    assert left() == [*range(12, 25), 5, 25, 26] and len(left()) == programs.FEW
    monkeypatch.setattr(programs, "mapped", lambda: 1.0)
    made([27])
    assert left() == [27]


def test_no_more_programs_are_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_PROGRAMS", type(programs._PROGRAMS)())
    monkeypatch.setattr(programs, "mapped", lambda: 0.0)
    for i in range(programs.KEPT + 5):
        programs.kept(i, lambda i=i: i)
    assert len(programs._PROGRAMS) == programs.KEPT


@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="only Linux tells")
def test_the_share_of_memory_maps_is_measured() -> None:
    limit = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    assert 0 < programs.mapped() < 1
    assert programs.mapped() * limit == pytest.approx(pathlib.Path("/proc/self/maps").read_bytes().count(b"\n"), rel=0.1)


def test_what_an_isolated_loss_was_first_compiled_to_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a pass that does not find the start: all that matters here is what is kept."""
    monkeypatch.setattr(programs, "_PROGRAMS", type(programs._PROGRAMS)())

    class Run:
        retries, isolate, functions = True, False, None

        def isolated(self) -> "Run":
            other = Run()
            other.isolate = True
            return other

    found: Any = type("Back", (), {"found": np.asarray(False)})()
    right: Any = type("Back", (), {"found": np.asarray(True), "_replace": lambda self, **_: self})()
    monkeypatch.setattr(retry, "remembered", lambda run: run)
    monkeypatch.setattr(retry, "remember", lambda run: None)
    attempt = lambda run: programs.kept(("pass", run.isolate), lambda: right if run.isolate else found)  # noqa: E731
    assert retry.known(Run(), attempt) is right  # type: ignore[arg-type]
    assert [key for key, _ in programs._PROGRAMS] == [("pass", True)]
