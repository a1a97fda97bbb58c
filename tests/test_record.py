"""Records: any step of a finished training, bit for bit, from any process; and folders that are not as they were left."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from problems import network
from tiny import fails

import hypergrad as hg
from hypergrad.run import disk, rewind, spec


STEPS, SEGMENT = 11, 4
NET = network("tanh")


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "STORED", SEGMENT)


RATES = jnp.linspace(0.1, 0.3, STEPS)
OPTIMIZERS: dict[str, Callable[[int], Any]] = {
    "sgd": lambda n: hg.SGD(hg.PerStep(RATES[:n]), 0.05),
    "adam": lambda n: hg.Adam(hg.PerStep(RATES[:n] / 10), 0.3),
    "decays of each weight": lambda n: hg.SGD(0.1, jax.tree.map(lambda w: jnp.full(w.shape, 0.1), NET.params())),
}


def options(name: str = "sgd", steps: int = STEPS, loss: Any = NET.loss, **others: Any) -> dict[str, Any]:
    given = {"loss": loss, "params": NET.params(), "optimizer": OPTIMIZERS[name](steps), "batches": drawn()}
    return given | {"theta": NET.theta(), "steps": steps} | others


def drawn(batch_size: int = 8) -> Callable[[Any], Any]:
    """For runs of any length, unlike `hg.stacked`."""
    batches = NET.batches(STEPS, batch_size)
    return lambda t: batches(t)


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(found, is_leaf=lambda x: x is None), jax.tree.leaves(expected), strict=True)
    for x, y in pairs:
        np.testing.assert_array_equal(x, y)


def numbers(trained: hg.Trained) -> Any:
    return trained.params, trained.losses, {name: x for name, x in trained.state.items() if "weight" not in name}


@pytest.mark.of_bits
@some_of("name", OPTIMIZERS, "sgd")
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


@pytest.mark.long
@pytest.mark.of_bits
def test_links_of_other_shapes_than_the_parameters_are_gone_back_on(tmp_path: pathlib.Path) -> None:
    """Shampoo's roots are not of the shape of a weight."""
    given = options() | {"optimizer": hg.Shampoo(0.01, every=3)}
    record = hg.record(**given, folder=tmp_path)
    assert_same(hg.record(**given, folder=tmp_path).rewind(0).params, NET.params())
    assert_same(record.resume(5).params, record.trained.params)


@pytest.mark.of_bits
def test_statistics_are_gone_back_on_too(tmp_path: pathlib.Path) -> None:
    def stated(params: Any, theta: Any, batch: Any) -> Any:
        return NET.loss(params, theta, batch), jnp.mean(batch[0], axis=0)

    statistics = hg.Statistics(jnp.zeros(NET.data[0].shape[1]), 0.3)
    record = hg.record(**options(loss=stated, statistics=statistics), folder=tmp_path)
    expected = hg.train(**options(loss=stated, statistics=statistics, steps=6))
    assert_same(record.rewind(6).statistics, expected.statistics)


@pytest.mark.of_bits
@some_of("name", ["sgd", "adam"], "sgd")
def test_hypergradients_of_several_functions_without_training_again(name: str, tmp_path: pathlib.Path) -> None:
    record, given = hg.record(**options(name), folder=tmp_path), options(name)
    for function in (lambda run: NET.value(run.params), lambda run: jnp.sum(run.losses) + jnp.sum(run.params["w1"])):
        found = record.hypergradient(function)
        names = ("params", "optimizer", "theta")
        arrays = jax.tree.map(jnp.asarray, {name: given[name] for name in names})
        expected = jax.grad(lambda arrays, function=function: function(hg.train(**given | arrays)))(arrays)
        assert_same({name: found[name] for name in names}, expected)


@pytest.mark.of_bits
def test_resumed_it_ends_as_it_did(tmp_path: pathlib.Path) -> None:
    record = hg.record(**options("adam"), folder=tmp_path)
    for step in (0, 3, SEGMENT, STEPS - 1):
        assert_same(numbers(record.resume(step)), numbers(record.trained))


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


@pytest.mark.parametrize("step", [-1, STEPS + 1, 2.0, True])
def test_what_is_no_step(step: Any, tmp_path: pathlib.Path) -> None:
    record = hg.record(**options(), folder=tmp_path)
    for ask in (record.rewind, record.resume, lambda s: record.steps(s, STEPS), lambda s: record.steps(0, s)):
        with fails(ValueError, f"`step` must be an integer from 0 to {STEPS}; got {step!r}"):
            ask(step)


OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "params": (lambda: {"params": jax.tree.map(lambda w: 2 * w, NET.params())}, "`params`, `state` or `statistics` differ"),
    "optimizer": (lambda: {"optimizer": hg.SGD(hg.PerStep(RATES), 0.06)}, "the hyperparameters of `optimizer` differ"),
    "theta": (lambda: {"theta": NET.theta(value=0.1)}, "the values of `theta` differ"),
    "batches": (lambda: {"batches": drawn(9)}, "the arrays of `batches` or of `loss` differ"),
    "loss": (lambda: {"loss": lambda *a: 2 * NET.loss(*a)}, "what `loss`, `batches` or `optimizer` compute differ"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_record_of_another_run_is_refused_by_what_differs(name: str, tmp_path: pathlib.Path) -> None:
    other, fragment = OTHERS[name]
    hg.record(**options(), folder=tmp_path)
    with fails(ValueError, "is of another run", fragment, "record in another folder"):
        hg.record(**options() | other(), folder=tmp_path)


def test_a_record_from_elsewhere_is_opened_with_a_warning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hg.record(**options(), folder=tmp_path)
    monkeypatch.setattr("jax.__version__", "0.0.1")
    with pytest.warns(UserWarning, match=r"was made elsewhere: jax '.*', now '0.0.1'"):
        record = hg.record(**options(), folder=tmp_path)
    assert_same(record.rewind(0).params, NET.params())


def flipped(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def reworded(path: pathlib.Path) -> None:
    path.write_text(json.dumps({"format": 1}))


def without_the_last(path: pathlib.Path) -> None:
    """Cut off where a chunk ends."""
    content, weights = path.read_bytes(), NET.weights["w1"].size
    before = offset = content.index(b"\n") + 1
    while offset < len(content):
        before, count = offset, int.from_bytes(content[offset + 16 : offset + 24], "little")
        offset += 64 + 2 * weights * count
    os.truncate(path, before)


DAMAGE = {
    "record.json, flipped": ("record.json", flipped, "does not match its own checksum"),
    "record.json, another": ("record.json", reworded, "does not match its own checksum"),
    "end.npz, cut off": ("end.npz", lambda path: os.truncate(path, 1000), "does not match the checksum"),
    "end.npz, missing": ("end.npz", lambda path: path.unlink(), "is missing"),
    "words, flipped": ("words-*/0-velocity.words", flipped, "was changed or cut off"),
    "words, cut off": ("words-*/0-velocity.words", lambda path: os.truncate(path, path.stat().st_size - 1), "cut off"),
    "words, without the last chunk": ("words-*/0-velocity.words", without_the_last, "lacks digits of the steps from 8"),
    "words, missing": ("words-*/0-velocity.words", lambda path: path.unlink(), "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_an_error_by_the_file(name: str, tmp_path: pathlib.Path) -> None:
    pattern, damage, fragment = DAMAGE[name]
    hg.record(**options(), folder=tmp_path)
    (path,) = tmp_path.glob(pattern)
    damage(path)
    with fails(hg.StorageError, str(path.parent), fragment):
        hg.record(**options(), folder=tmp_path).rewind(0)


def test_an_end_that_was_edited_is_told(tmp_path: pathlib.Path) -> None:
    hg.record(**options(), folder=tmp_path)
    with np.load(tmp_path / "end.npz") as archive:
        arrays = dict(archive)
    next(x for x in arrays.values() if x.dtype == np.int64 and x.size).flat[0] += 1
    np.savez(tmp_path / "end.npz", **arrays)
    with fails(hg.StorageError, "end.npz", "does not match the checksum in record.json"):
        hg.record(**options(), folder=tmp_path)


def test_what_rounds_otherwise_is_found_on_the_way_back(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = hg.record(**options(loss=lambda *a: 3 * NET.loss(*a)), folder=tmp_path)
    unstep = rewind.unstep

    def lying(*arguments: Any) -> Any:
        state = unstep(*arguments)
        return [{n: s._replace(value=s.value._replace(high=s.value.high + 1)) for n, s in own.items()} for own in state]

    monkeypatch.setattr(rewind, "unstep", lying)
    with fails(hg.ReversalError, "does not lead back to step", "record again"):
        record.rewind(STEPS - 1)


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from test_record import *

    spec.STORED = SEGMENT
    whole, left = disk.DiskWords.keep, [2]

    def last(*args):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(*args)

    disk.DiskWords.keep = last
    hg.record(**options(), folder=sys.argv[1])
"""

ELSEWHERE = """
    import sys
    sys.path.insert(0, {tests!r})
    from test_record import *

    spec.STORED = SEGMENT
    hg.train = None
    record = hg.record(**options(), folder=sys.argv[1])
    np.savez(sys.argv[2], *jax.tree.leaves(record.rewind(5).params))
"""


def elsewhere(program: str, *arguments: Any) -> int:
    text = textwrap.dedent(program).format(tests=str(pathlib.Path(__file__).parent))
    return subprocess.run([sys.executable, "-c", text, *map(str, arguments)], check=False).returncode


def test_training_that_was_killed_leaves_no_record(tmp_path: pathlib.Path) -> None:
    assert elsewhere(KILLED, tmp_path / "a") == -signal.SIGKILL
    with fails(ValueError, "holds files and no finished record", "Empty it, or name another"):
        hg.record(**options(), folder=tmp_path / "a")


@pytest.mark.of_bits
def test_another_process_goes_back_to_the_same_bits(tmp_path: pathlib.Path) -> None:
    record = hg.record(**options(), folder=tmp_path / "a")
    assert elsewhere(ELSEWHERE, tmp_path / "a", tmp_path / "found.npz") == 0
    with np.load(tmp_path / "found.npz") as found:
        assert_same([found[name] for name in found], jax.tree.leaves(record.rewind(5).params))


def test_training_that_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    diverging = {"optimizer": hg.SGD(1e6, 0.5)}
    with fails(hg.HypergradError, "learning rate"):
        hg.record(**options() | diverging, folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_what_cannot_be_recorded(tmp_path: pathlib.Path) -> None:
    with fails(ValueError, "a function of t", "hg.host_batches"):
        hg.record(**options() | {"batches": hg.host_batches(lambda t: NET.data)}, folder=tmp_path)
    hg.record(**options(), folder=tmp_path / "made")
    for folder in (tmp_path / "made", tmp_path / "new"):
        with fails(ValueError, "outside of jax.jit"):
            jax.jit(lambda p, f=folder: hg.record(**options() | {"params": p}, folder=f).trained.params)(NET.params())
    (tmp_path / "mine.txt").touch()
    with fails(ValueError, "holds files and no finished record"):
        hg.record(**options(), folder=tmp_path)
    assert disk.Disk(tmp_path).folder == str(tmp_path)
