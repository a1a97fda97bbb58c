"""Who owns a checkpoint folder: for any order of events, whoever commits has read what was committed last."""

import json
import os
import pathlib
import random
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
from covering import every_value

from hypergrad import _folder_owner
from hypergrad._folder_owner import Owner
from hypergrad._safe_files import sealed


class Killed(BaseException):
    """Nothing in the library catches it."""


class World:
    """Processes of which one runs at a time: before each step on disk the seed decides who is next.

    A suspended one is seen as such by the others, and does not run for a while. `broken` are laws that did not hold.
    """

    def __init__(self, seed: int, folder: pathlib.Path, processes: int, deaths: bool) -> None:
        self.rng, self.folder, self.deaths = random.Random(seed), folder, deaths
        self.turn, self.names = threading.Condition(), list(range(1, processes + 1))
        self.running: int | None = None
        self.sleeps = dict.fromkeys(self.names, 0)
        self.ends: dict[int, str] = {}
        self.broken: list[str] = []
        self.ids: dict[int, int] = {}

    def me(self) -> int:
        return self.ids.get(threading.get_ident(), 0)

    def step(self) -> None:
        """A place where the process may be stopped."""
        me = self.me()
        if not me:
            return
        if self.deaths and self.rng.random() < 0.01:
            raise Killed
        if self.rng.random() < 0.05:
            self.sleeps[me] = self.rng.choice([3, 10, 60])
        self.pass_on()
        with self.turn:
            self.turn.wait_for(lambda: self.running == me)

    def pass_on(self) -> None:
        with self.turn:
            left = [name for name in self.names if name not in self.ends]
            awake = [name for name in left if not self.sleeps[name]] or left
            self.sleeps = {name: max(0, n - 1) for name, n in self.sleeps.items()}
            self.running = self.rng.choice(awake) if awake else None
            if self.running:
                self.sleeps[self.running] = 0
            self.turn.notify_all()

    def live(self, me: int) -> None:
        """A process: it takes the folder, and adds to the record four times."""
        self.ids[threading.get_ident()] = me
        with self.turn:
            self.turn.wait_for(lambda: self.running == me)
        end = "killed"
        try:
            owner = Owner(self.folder)
            record = self.record()
            for _ in range(4):
                record = [*record, me]
                owner.publish("run.json", json.dumps(record).encode())
            owner.release()
            end = "finished"
        except ValueError as error:
            end = str(error)
        except Killed:
            pass
        except BaseException as error:
            self.broken.append(f"process {me} ended in {error!r}")
        self.ends[me] = end
        self.pass_on()

    def record(self) -> list[int]:
        path = self.folder / "run.json"
        return json.loads(path.read_text()) if path.exists() else []

    def replace(self, source: Any, target: Any) -> None:
        self.step()
        if pathlib.Path(target).name == "run.json" and os.path.exists(source):
            *before, who = json.loads(pathlib.Path(source).read_text())
            if before != self.record():
                self.broken.append(f"process {who} undid {self.record()} by {before}")
        os.replace(source, target)

    def run(self) -> None:
        threads = [threading.Thread(target=self.live, args=(name,), daemon=True) for name in self.names]
        for thread in threads:
            thread.start()
        self.pass_on()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


class Forgetful(set):
    """Tokens of this very process, as long as several stand for many."""

    def add(self, token: str) -> None:
        pass


def before_each(world: World, function: Callable[..., Any]) -> Callable[..., Any]:
    def stepped(*inputs: Any, **options: Any) -> Any:
        world.step()
        return function(*inputs, **options)

    return stepped


def lived(seed: int, folder: pathlib.Path, patch: pytest.MonkeyPatch, processes: int = 2, deaths: bool = False) -> World:
    world = World(seed, folder, processes, deaths)
    listing = before_each(world, os.listdir)
    files = types.SimpleNamespace(replace=world.replace, listdir=listing, path=os.path, getpid=world.me)
    patch.setattr(_folder_owner, "os", files)
    for name in ("read", "write_new", "_remove"):
        patch.setattr(_folder_owner, name, before_each(world, getattr(_folder_owner, name)))
    patch.setattr(_folder_owner, "settle", lambda folder: None)
    patch.setattr(_folder_owner, "_here", Forgetful())
    patch.setattr(os, "fsync", lambda file: None)
    here = lambda: {"host": "h", "boot": "b", "pid": world.me(), "started": ""}  # noqa: E731
    patch.setattr(_folder_owner, "_this_process", here)
    is_working = lambda claim: claim["pid"] not in world.ends and not world.sleeps[claim["pid"]]  # noqa: E731
    patch.setattr(_folder_owner, "_is_working", is_working)
    tokens = iter(world.rng.sample(range(2**20), 400))
    patch.setattr(_folder_owner.secrets, "token_hex", lambda n: f"{next(tokens):016x}")
    world.run()
    return world


NAMED = re.compile("`checkpoint` .* is (in use|no longer that of this run)(?:: several|[:,] process)")


@every_value("processes, deaths", [2, 3, 4], [False, True])
def test_whoever_commits_has_read_what_was_committed_last(processes: int, deaths: bool, tmp_path: pathlib.Path) -> None:
    ended = set()
    for seed in range(40):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            world = lived(seed, folder, patch, processes, deaths)
        assert not world.broken, (seed, world.broken)
        for end in world.ends.values():
            assert end in ("finished", "killed") or NAMED.match(end), (seed, end)
            ended.add(named[1] if (named := NAMED.match(end)) else end)
        finished = [name for name, end in world.ends.items() if end == "finished"]
        assert deaths or world.record()[-1] in finished, (seed, world.ends)  # so one has finished
    assert ended == {"finished", "in use", "no longer that of this run"} | ({"killed"} if deaths else set())


def without_a_second_look(self: Owner, name: str, content: bytes) -> None:
    """A lie: the claim is looked for before the part is written, as one would."""
    part = self.folder / f".{name}.{self.token}.part"
    if name != self.name:
        self.check()
    _folder_owner.write_new(part, content)
    _folder_owner.os.replace(part, self.folder / name)


def test_the_law_catches_a_lie(tmp_path: pathlib.Path) -> None:
    broken = []
    for seed in range(200):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Owner, "_write", without_a_second_look)
            broken += lived(seed, folder, patch).broken
    assert any("undid" in law for law in broken), broken[:3]


REMOVED = r"owner-\w{16}.json was removed, by a process that ended or by hand"


def test_one_suspended_says_who_is_at_work_in_its_place(tmp_path: pathlib.Path) -> None:
    first = Owner(tmp_path)
    started = _folder_owner._this_process()["started"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_folder_owner, "_state", lambda pid: ("T", started))
        second = Owner(tmp_path)
    with pytest.raises(ValueError, match=rf"of this run, process .*: process {os.getpid()} on .* has taken it over, while"):
        first.publish("run.json", b"")
    second.check()
    assert [path.name for path in tmp_path.iterdir()] == [second.name]
    first.release()  # of its own claim alone
    assert [path.name for path in tmp_path.iterdir()] == [second.name]
    second.release()


def test_who_loses_its_claim_by_hand_stops(tmp_path: pathlib.Path) -> None:
    owner = Owner(tmp_path)
    owner.publish("a", b"1")
    (tmp_path / owner.name).unlink()
    with pytest.raises(ValueError, match=f"no longer that of this run, .*: {REMOVED}, while this one was suspended"):
        owner.publish("a", b"2")
    with pytest.raises(ValueError, match="no longer that of this run"):
        owner.remove(["a"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"1"}


@pytest.mark.parametrize(
    ("change", "works"),
    [
        ({}, True),
        ({"started": "1"}, False),  # its pid was given again
        ({"boot": "another"}, False),
        ({"host": "another"}, False),
        ({"pid": 2**31 - 1}, False),
    ],
    ids=str,
)
def test_who_is_at_work(change: dict[str, Any], works: bool) -> None:
    parent = os.getppid()
    claim = {**_folder_owner._this_process(), "pid": parent, "started": _folder_owner._state(parent)[1], "token": "0" * 16}
    assert _folder_owner._is_working({**claim, **change}) == works


def test_a_claim_of_this_very_process_from_before_it_became_another_program() -> None:
    assert not _folder_owner._is_working({**_folder_owner._this_process(), "token": "0" * 16})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is damaged or was edited: it does not match its own checksum"),
        (sealed({"token": "0" * 16}), "is not a claim: it lacks 'boot'"),
        (sealed({"token": 1, "host": "", "boot": "", "pid": 1, "started": ""}), r"is not a claim: it\['token'\] is 1"),
        (sealed({"token": "1" * 16, "host": "", "boot": "", "pid": 1, "started": ""}), "is not a claim: it is renamed"),
        (b" " * 5000, "has 5000 bytes, where at most 4096 are expected"),
    ],
    ids=["empty", "part", "number", "renamed", "long"],
)
def test_a_claim_that_is_none_is_named(content: bytes, problem: str, tmp_path: pathlib.Path) -> None:
    claim = tmp_path / f"owner-{'0' * 16}.json"
    claim.write_bytes(content)
    with pytest.raises(ValueError, match=f"{claim.name} {problem}. It says which process writes to the folder. If none"):
        Owner(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {claim.name: content}
    claim.unlink()
    Owner(tmp_path).release()
