"""One folder, several writers: twins, suspended ones that wake up, ones elsewhere. None undoes what another has done.

The long form is `experiments.benchmarks.damage`.
"""

import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hypergrad as hg


STEPS = 4


def learn(folder: Any, meta_steps: int = STEPS, callbacks: Any = ()) -> hg.Result:
    return hg.optimize(
        lambda x, key: (x - 1 + 0.1 * jax.random.normal(key)) ** 2, jnp.sum, jnp.array([0.5, 2.0]), meta_steps=meta_steps,
        checkpoint=folder, callbacks=callbacks,
    )  # fmt: skip


def digest(result: hg.Result) -> str:
    history = [(done.value, np.asarray(done.hypers).tolist()) for done in result.history]
    return repr([history, np.asarray(result.hypers).tolist()])


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(learn(None))


CHILD = """
import os, signal, sys
import test_checkpoint_writers as t

folder, act = sys.argv[1:]
replace, count = os.replace, 0

def stopping(source, target):  # just before its third commit: its part is written, and its claim was there
    global count
    count += str(target).endswith("run.json")
    if act == "suspended" and count == 4 and str(target).endswith("run.json"):
        os.kill(os.getpid(), signal.SIGSTOP)
    replace(source, target)

def waiting(done):
    if done.step == 1 and act == "waits":
        print("waiting", flush=True)
        sys.stdin.readline()

os.replace = stopping
t.learn(folder, callbacks=[waiting])
"""


class Child:
    """A process that learns into a folder, up to where it stops or waits."""

    def __init__(self, folder: pathlib.Path, act: str) -> None:
        self.folder = folder
        here = str(pathlib.Path(__file__).parent)
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()])])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-c", CHILD, str(folder), act]
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, text=True, **pipes)

    def come_to_a_halt(self) -> None:
        """Without waiting for a time: by its word, or by the end of its being stopped."""
        status = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert status.si_status == signal.SIGSTOP, self.process.communicate()[1]

    def say(self) -> None:
        line = self.process.stdout.readline()
        assert line == "waiting\n", self.process.communicate()[1]

    def go_on(self) -> str:
        """The last line of its errors, when it has ended."""
        self.process.send_signal(signal.SIGCONT)
        _, errors = self.process.communicate("\n", timeout=120)
        return errors.strip().splitlines()[-1] if errors else ""


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Child]]:
    """Begun together: most of their time is that of importing JAX."""
    acts = {"suspended": "suspended", "at work": "waits", "elsewhere": "waits"}
    begun = {name: Child(tmp_path_factory.mktemp(name.replace(" ", "-")), act) for name, act in acts.items()}
    yield begun
    for child in begun.values():
        child.process.kill()
        child.process.communicate()


def lost(child: Child, why: str) -> str:
    """The error of a child that has lost its folder."""
    folder, own = re.escape(str(child.folder)), f"process {child.process.pid} on {platform.node()}"
    return (
        f"ValueError: `checkpoint` {folder} is no longer that of this run, {own}: {why}, while this one was suspended or "
        "out of sight. It stops, and has changed nothing there since. When no other process is at work there, call "
        "hg.optimize again to go on from where the folder is."
    )


REMOVED = r"owner-\w{16}.json was removed, by a process that ended or by hand"


def test_one_suspended_within_a_commit_changes_nothing_when_it_wakes(children: dict[str, Child], expected: str) -> None:
    child = children["suspended"]
    child.come_to_a_halt()
    assert digest(learn(child.folder)) == expected
    before = contents(child.folder)
    assert re.fullmatch(lost(child, REMOVED), child.go_on())
    assert contents(child.folder) == before and digest(learn(child.folder)) == expected


def test_a_folder_where_somebody_is_at_work_is_refused_and_can_be_read(children: dict[str, Child], expected: str) -> None:
    child = children["at work"]
    child.say()
    before = contents(child.folder)
    with pytest.raises(ValueError) as caught:
        learn(child.folder)
    (claim,) = child.folder.glob("owner-*")
    assert str(caught.value) == (
        f"`checkpoint` {child.folder} is in use: process {child.process.pid} on {platform.node()} is at work there. Wait "
        f"until it has ended, end it, or pass another folder. If it is not at work there, remove {claim} and call again: if "
        "it was after all, it stops at its next meta-step."
    )
    assert len(learn(child.folder, meta_steps=1).history) == 1
    assert contents(child.folder) == before
    assert child.go_on() == "" and digest(learn(child.folder)) == expected


def test_a_run_that_moves_to_another_machine_is_lost_to_the_first(
    children: dict[str, Child], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = children["elsewhere"]
    child.say()
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "another")
        with pytest.warns(UserWarning, match="machine .* there and another here. Going on"):
            assert digest(learn(child.folder)) == expected
    before = contents(child.folder)
    assert re.fullmatch(lost(child, REMOVED), child.go_on()) and contents(child.folder) == before


def test_a_run_within_a_run_on_the_same_folder(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="is in use: another call of hg.optimize in this process is at work there"):
        learn(tmp_path, callbacks=[lambda done: learn(tmp_path) and None])
    assert len(learn(tmp_path).history) == STEPS  # the claim is gone
