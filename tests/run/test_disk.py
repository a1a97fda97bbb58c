"""Digits in files: the same hypergradient, and an error by name for whatever happens to the files."""

import errno
import gc
import itertools
import os
import pathlib
import resource
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
from tiny import PARAMS, fails, final

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer
from hypergrad.run import cuts, disk


STEPS, SEGMENT = 12, 4
OPTIMIZER = hg.SGD(0.1, 2**-16)  # a word at every step


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "STORED", SEGMENT)


def gradient(buffer: Any, between: Callable[[], None] = lambda: None, **options: Any) -> Any:
    arguments = {"optimizer": OPTIMIZER, "steps": STEPS, "adjoint": hg.Reversible(buffer=buffer)} | options
    value, pull = jax.vjp(lambda p: final(params=p, **arguments), PARAMS)
    between()
    return pull(jnp.ones_like(value))[0]["w"]


OPTIMIZERS = {"sgd": OPTIMIZER, "adam": hg.Adam(0.01, 0.01, 0.3), "each": hg.SGD({"w": 0.1}, {"w": jnp.array([0.01, 0.6])})}


@pytest.mark.long
@pytest.mark.of_bits
@some_of("name", OPTIMIZERS, "adam")
def test_the_hypergradient_is_that_of_the_device(name: str, tmp_path: pathlib.Path) -> None:
    options = {"optimizer": OPTIMIZERS[name]}
    np.testing.assert_array_equal(gradient(hg.Disk(tmp_path), **options), gradient("device", **options))


@some_of(("place", "bad"), list(itertools.product(["host", "disk"], [0, 5, 11])), ("host", 11), ("disk", 5))
def test_the_step_at_which_a_run_fails_is_that_of_the_run_and_not_of_a_segment(
    place: str, bad: int, tmp_path: pathlib.Path
) -> None:
    broken = lambda params, _, t: jnp.where(t == bad, jnp.nan, jnp.sum(params["w"] ** 2))  # noqa: E731
    with fails(hg.NonFiniteError, f"at step {bad}."):
        gradient(hg.Disk(tmp_path) if place == "disk" else "host", loss=broken, batches=lambda t: t)


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("words-*/*.words"))


@pytest.mark.long
def test_files_are_as_long_as_the_digits_and_go_when_nobody_needs_them(tmp_path: pathlib.Path) -> None:
    seen = []

    def between() -> None:
        (path,) = files(tmp_path)
        chunks = -(-STEPS // SEGMENT)
        content = path.stat().st_size - len(path.read_bytes().split(b"\n")[0]) - 1
        seen.append((content - chunks * (4 * 8 + 32), path.name))

    gradient(hg.Disk(tmp_path), between)
    words = int(
        hg.train(lambda w, _, b: jnp.sum(w["w"] ** 2), PARAMS, OPTIMIZER, hg.full_batch(0.0), steps=STEPS).buffer_words
    )
    assert seen == [(2 * 2 * (STEPS - 1), "0-velocity.words")] and words == STEPS // 2
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_they_stay_if_asked_to(tmp_path: pathlib.Path) -> None:
    gradient(hg.Disk(tmp_path, keep=True))
    gc.collect()
    assert len(files(tmp_path)) == 1


def flipped(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


FAULTS = {
    "a flipped byte": (flipped, "was changed or cut off", "from 8", "Train again"),
    "a truncated file": (lambda path: os.truncate(path, path.stat().st_size - 1), "was changed or cut off", "from 8"),
    "an empty file": (lambda path: os.truncate(path, 0), "was changed or cut off", "from 8"),
    "a missing file": (lambda path: path.unlink(), "cannot be read: No such file", "must be trained again"),
    "a link": (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "cannot be read"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "cannot be read: it is no file"),
}


@some_of("fault", FAULTS, "a flipped byte", "a missing file", "a pipe")
def test_a_damaged_file_is_an_error_with_its_name(fault: str, tmp_path: pathlib.Path) -> None:
    damage, *fragments = FAULTS[fault]
    with fails(hg.StorageError, "0-velocity.words", *fragments):
        gradient(hg.Disk(tmp_path), lambda: damage(files(tmp_path)[0]))


def test_chunks_of_other_steps_are_told() -> None:
    chunk = disk.sealed(4, 4, np.zeros((1, 2), np.uint16), 2)
    with fails(hg.StorageError, "other steps: from 4, not from 8", "another run"):
        disk.unsealed(pathlib.Path("x"), chunk, 8, (2,))


def test_a_chunk_is_read_whole_where_one_call_gives_less(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads less than 2 GiB at a call."""
    monkeypatch.setattr(disk, "_AT_ONCE", 7)
    np.testing.assert_array_equal(gradient(hg.Disk(tmp_path)), gradient("device"))
    words = disk.DiskWords(tmp_path / "words-0123456789abcdef", {"0-velocity": (5,)}, False)
    words.keep(0, 4, [(np.arange(20, dtype=np.uint16).reshape(4, 5), 4)])
    np.testing.assert_array_equal(words.kept(0)[0][0], np.arange(20).reshape(4, 5))


@pytest.mark.long
def test_a_link_may_have_the_name_of_no_file(tmp_path: pathlib.Path) -> None:
    class Slash(Optimizer):
        rate: Any
        m: Any = 2**-16
        chain = (
            Link("a/b", lambda h, z, g: -g / 2, decay="m"),
            Link("params", lambda h, z: h.rate * getattr(z, "a/b")),
        )

    np.testing.assert_array_equal(*(gradient(b, optimizer=Slash(0.1)) for b in (hg.Disk(tmp_path), "device")))


@pytest.mark.parametrize("index", range(0, 80, 7))
def test_every_byte_of_a_chunk_is_covered(index: int) -> None:
    words = np.arange(8, dtype=np.uint16).reshape(4, 2)
    chunk = bytearray(disk.sealed(4, 4, words, 5))
    found, capacity = disk.unsealed(pathlib.Path("x"), bytes(chunk), 4, (2,))
    np.testing.assert_array_equal(found, words)
    assert capacity == 5 and len(chunk) == 80
    chunk[index] ^= 16
    with pytest.raises(hg.StorageError, match="checksum"):
        disk.unsealed(pathlib.Path("x"), bytes(chunk), 4, (2,))


@pytest.mark.long
def test_a_folder_is_the_same_wherever_the_process_goes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    gradient(hg.Disk("here"), lambda: os.chdir("elsewhere"))
    gc.collect()
    assert not list((tmp_path / "here").iterdir())


def test_files_that_cannot_all_be_opened_leave_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, words = os.open, itertools.count(1)

    def few(path: Any, *flags: Any, **options: Any) -> int:
        if str(path).endswith(".words") and next(words) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *flags, **options)

    monkeypatch.setattr(os, "open", few)
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with fails(hg.StorageError, "cannot be written to: Too many open files"):
        disk.Disk(str(tmp_path)).words({"0-a": (2,), "1-b": (2,)}, 0)
    assert not list(tmp_path.iterdir())
    assert not before or len(os.listdir("/proc/self/fd")) == len(before)


def test_a_process_that_was_forked_removes_no_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = disk.DiskWords(tmp_path / "words-1", {"0-a": (2,)}, keep=False)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    words.close()
    assert len(files(tmp_path)) == 1


def test_a_folder_that_is_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with fails(hg.StorageError, "cannot be written to"):
        gradient(hg.Disk(tmp_path / "file"))


def test_a_disk_that_is_too_small_is_told_before_training(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with fails(hg.StorageError, "take 44 bytes", "has 10 left", "Make room"):
        gradient(hg.Disk(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up(tmp_path: pathlib.Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
    try:
        with fails(hg.StorageError, "0-velocity.words cannot be written: File too large", "Make room"):
            gradient(hg.Disk(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not files(tmp_path)


KILLED = """
    import os, signal, sys
    import jax, jax.numpy as jnp
    import hypergrad as hg
    from hypergrad.run import cuts, disk

    cuts.STORED = 4
    when, name = sys.argv[2].split()
    whole, left = getattr(disk.DiskWords, name), [int(when)]

    def last(*args):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args)

    setattr(disk.DiskWords, name, last)
    loss = lambda w, _, batch: jnp.sum((w - batch) ** 2)
    run = lambda w: hg.train(loss, w, hg.SGD(0.1, 2**-16), hg.full_batch(1.0), steps=12,
                             adjoint=hg.Reversible(buffer=hg.Disk(sys.argv[1]))).params.sum()
    jax.grad(run)(jnp.ones(2))
"""


@some_of("when", ["2 keep", "2 kept"], "2 kept", ids=["on the way out", "on the way back"])
def test_what_a_killed_process_leaves_is_removed_by_the_next_run(when: str, tmp_path: pathlib.Path) -> None:
    quick = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), when], env=quick, check=False)
    assert done.returncode == -signal.SIGKILL and len(files(tmp_path)) == 1
    found = gradient(hg.Disk(tmp_path), lambda: np.testing.assert_equal(len(files(tmp_path)), 1))
    np.testing.assert_array_equal(found, gradient("device"))


@pytest.mark.long
@pytest.mark.of_bits
def test_two_runs_in_one_folder_do_not_meet(tmp_path: pathlib.Path) -> None:
    inner = []
    outer = gradient(hg.Disk(tmp_path), lambda: inner.append(gradient(hg.Disk(tmp_path))))
    np.testing.assert_array_equal(outer, inner[0])


def test_what_is_no_folder() -> None:
    with fails(TypeError, "`folder` of hg.Disk must be a path; got 3"):
        hg.Disk(3)  # type: ignore[arg-type]


def test_it_needs_python_between_segments() -> None:
    with fails(ValueError, "buffer=hg.Disk(folder)", "cannot be traced"):
        jax.jit(lambda p: final(params=p, adjoint=hg.Reversible(buffer=hg.Disk("nowhere"))))(PARAMS)


def test_what_is_not_of_a_run_is_not_removed(tmp_path: pathlib.Path) -> None:
    """Left over is what bears the name of a run and holds what a run writes."""
    for name, file in (("words-en", "lock"), ("words-0123456789abcdef", "lock"), ("words-fedcba9876543210", "lock")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "words-0123456789abcdef" / "thesis.txt").touch()
    gradient(hg.Disk(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"words-en", "words-0123456789abcdef"}
