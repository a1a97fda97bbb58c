"""Folders of records: opened in another process, of another run, damaged, or left by training that was killed."""

import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from covering import some_of
from recorded import NET, RATES, SEGMENT, STEPS, assert_same, drawn, options
from tiny import fails

import hypergrad as hg
from hypergrad import _record_files
from hypergrad._safe_files import sealed, unsealed
from hypergrad.run import cuts, disk, rewind


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "STORED", SEGMENT)


OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "steps": (lambda: {"steps": STEPS - 1, "optimizer": hg.SGD(hg.PerStep(RATES[:-1]))}, "the numbers of `steps` differ"),
    "params": (lambda: {"params": jax.tree.map(lambda w: 2 * w, NET.params())}, "`params`, `state` or `statistics`"),
    "optimizer": (lambda: {"optimizer": hg.SGD(hg.PerStep(RATES), 0.06)}, "the hyperparameters of `optimizer` differ"),
    "theta": (lambda: {"theta": NET.theta(value=0.1)}, "the values of `theta` differ"),
    "batches": (lambda: {"batches": drawn(9)}, "the arrays of `batches` or of `loss` differ"),
    "loss": (lambda: {"loss": lambda *a: 2 * NET.loss(*a)}, "what `loss`, `batches` or `optimizer` compute differ"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, pathlib.Path]:
    """By their `states_budget`: folders to copy."""
    folders = {budget: tmp_path_factory.mktemp("recorded") / "run" for budget in (None, "1MiB")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "STORED", SEGMENT)
        for budget, folder in folders.items():
            hg.record(**options(), folder=folder, states_budget=budget)
    return folders


@pytest.mark.parametrize("name", OTHERS)
def test_the_record_of_another_run_is_refused_by_what_differs(name: str, recorded: Any, tmp_path: pathlib.Path) -> None:
    other, fragment = OTHERS[name]
    folder = shutil.copytree(recorded[None], tmp_path / "run")
    with fails(ValueError, "is of another run", fragment, "record in another folder"):
        hg.record(**options() | other(), folder=folder)


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
    "a state, flipped": ("state-4.npz", flipped, "does not match the checksum in record.json"),
    "a state, missing": ("state-4.npz", lambda path: path.unlink(), "is missing"),
    "words, flipped": ("words-*/0-velocity.words", flipped, "was changed or cut off"),
    "words, cut off": ("words-*/0-velocity.words", lambda path: os.truncate(path, path.stat().st_size - 1), "cut off"),
    "words, without the last chunk": ("words-*/0-velocity.words", without_the_last, "lacks digits of the steps from 8"),
    "words, of brackets": ("words-*/0-velocity.words", lambda path: path.write_text("[" * 4000 + "\n"), "no file of words"),
    "words, missing": ("words-*/0-velocity.words", lambda path: path.unlink(), "cannot be read"),
}


@some_of(
    "name",
    DAMAGE,
    "a state, flipped",
    "end.npz, cut off",
    "words, flipped",
    "words, without the last chunk",
    "words, of brackets",
)
def test_a_damaged_record_is_an_error_by_the_file(name: str, recorded: Any, tmp_path: pathlib.Path) -> None:
    pattern, damage, fragment = DAMAGE[name]
    folder = shutil.copytree(recorded["1MiB" if pattern.startswith("state") else None], tmp_path / "run")
    (path,) = folder.glob(pattern)
    damage(path)
    with fails(hg.StorageError, str(path.parent), fragment):
        hg.record(**options(), folder=folder).rewind(0)


def test_an_end_that_was_edited_is_told(tmp_path: pathlib.Path) -> None:
    hg.record(**options(), folder=tmp_path)
    with np.load(tmp_path / "end.npz") as archive:
        arrays = dict(archive)
    next(x for x in arrays.values() if x.dtype == np.int64 and x.size).flat[0] += 1
    np.savez(tmp_path / "end.npz", **arrays)
    with fails(hg.StorageError, "end.npz", "does not match the checksum in record.json"):
        hg.record(**options(), folder=tmp_path)


def test_a_state_of_another_run_is_told(tmp_path: pathlib.Path) -> None:
    """Whoever puts it there gives its checksum, too."""
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, theta in ((own, 0.0), (other, 0.1)):
        hg.record(**options() | {"theta": NET.theta(value=theta)}, folder=folder, states_budget="1MiB")
    for name in ("state-4.npz", "state-8.npz"):
        (own / name).write_bytes((other / name).read_bytes())
    about = unsealed((own / "record.json").read_bytes())
    states = unsealed((other / "record.json").read_bytes())["states"]
    (own / "record.json").write_bytes(sealed(about | {"states": states}))
    with fails(hg.ReversalError, "does not lead back to step 4"):
        hg.record(**options() | {"theta": NET.theta(value=0.0)}, folder=own).rewind(4)


@pytest.mark.parametrize(
    "budget, fragment", [(1, "holds no state of this run: the smallest that works is"), ("1 potato", "1 potato")]
)
def test_a_budget_that_holds_no_state(budget: Any, fragment: str, tmp_path: pathlib.Path) -> None:
    with fails(ValueError, "states_budget", fragment):
        hg.record(**options(), folder=tmp_path / "a", states_budget=budget)
    assert not (tmp_path / "a").exists()


@pytest.mark.long
def test_what_rounds_otherwise_is_found_on_the_way_back(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = hg.record(**options(loss=lambda *a: 3 * NET.loss(*a)), folder=tmp_path)
    unstep = rewind.unstep

    def lying(*arguments: Any) -> Any:
        state = unstep(*arguments)
        return [{n: s._replace(value=s.value._replace(high=s.value.high + 1)) for n, s in own.items()} for own in state]

    monkeypatch.setattr(rewind, "unstep", lying)
    with fails(hg.ReversalError, "does not lead back to step", "open it where it was made"):
        record.rewind(STEPS - 1)


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from recorded import *
    from hypergrad.run import cuts, disk

    cuts.STORED = SEGMENT
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
    from recorded import *
    from hypergrad.run import cuts

    cuts.STORED = SEGMENT
    hg.train = None
    record = hg.record(**options(), folder=sys.argv[1])
    np.savez(sys.argv[2], *jax.tree.leaves(record.rewind(5).params))
"""


def elsewhere(program: str, *arguments: Any) -> int:
    text = textwrap.dedent(program).format(tests=str(pathlib.Path(__file__).parent))
    return subprocess.run([sys.executable, "-c", text, *map(str, arguments)], check=False).returncode


@pytest.mark.long
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


@pytest.mark.long
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
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with fails(hg.StorageError, "a link to nothing"):
        hg.record(**options(), folder=tmp_path / "link")
    (tmp_path / "mine.txt").touch()
    with fails(ValueError, "holds files and no finished record"):
        hg.record(**options(), folder=tmp_path)
    assert disk.Disk(tmp_path).folder == str(tmp_path)


def test_who_records_second_opens_what_was_finished_first(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It found the folder empty, and the other was quicker."""
    run_of = _record_files.run_of

    def slow(*a: Any) -> Any:
        monkeypatch.setattr(_record_files, "run_of", run_of)
        hg.record(**options(), folder=tmp_path)
        return run_of(*a)

    monkeypatch.setattr(_record_files, "run_of", slow)
    assert_same(hg.record(**options(), folder=tmp_path).rewind(0).params, NET.params())
    assert not (tmp_path / _record_files.CLAIM).exists()


def test_who_records_second_touches_nothing_of_the_first(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = _record_files._keep

    def slow(*a: Any) -> Any:
        monkeypatch.setattr(_record_files, "_keep", keep)
        with fails(ValueError, "another process records there"):
            hg.record(**options(), folder=tmp_path)
        return keep(*a)

    monkeypatch.setattr(_record_files, "_keep", slow)
    assert_same(hg.record(**options(), folder=tmp_path).rewind(0).params, NET.params())


def test_training_that_fails_removes_what_it_wrote_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, mine = _record_files._keep, tmp_path / "words-of-mine"  # as a run with hg.Disk there has one
    monkeypatch.setattr(_record_files, "_keep", lambda *a: (mine.mkdir(), keep(*a)))
    with pytest.raises(hg.RangeError) as caught:
        hg.record(**options() | {"optimizer": hg.SGD(1e9, 0.05)}, folder=tmp_path)
    assert list(tmp_path.iterdir()) == [mine] and "hg.record has the fraction bits" in caught.value.__notes__[0]


def test_a_folder_that_cannot_be_looked_at(tmp_path: pathlib.Path) -> None:
    with fails(hg.StorageError, "cannot be written to: File name too long"):
        hg.record(**options(), folder=tmp_path / ("a" * 300))


@some_of("synced", range(1, 4), 1)
def test_an_interrupt_leaves_nothing_at_whatever_file(synced: int, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    fsync, calls = os.fsync, itertools.count(1)

    def interrupted(descriptor: int) -> None:
        if next(calls) == synced:
            raise KeyboardInterrupt
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hg.record(**options(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
