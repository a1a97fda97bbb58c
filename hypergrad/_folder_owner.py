"""Who may write to a checkpoint folder: one process at a time, whatever has become of the others.

Invariant: after `Owner(folder)` no earlier owner can give a file of the folder another content, or take one away that is
in use, however long it was suspended and wherever it was stopped.

    owner-<token>.json     the claim: which process writes here
    .<name>.<token>.part   a file on its way to its name

Nothing is locked, so nobody waits for one that is stopped. An owner writes a part, looks whether its claim is still there,
and renames. A new owner writes its claim, removes those that it found, then the parts whose claim is gone, and reads only
then. Who was stopped before the look finds no claim, and who was stopped after it no part: no part is written in between.
"""

import contextlib
import os
import pathlib
import platform
import re
import secrets
from typing import Any

from hypergrad._forms import misfit, natural, text
from hypergrad._safe_files import Damaged, Missing, read, sealed, settle, unsealed, write_new


_CLAIM = re.compile(r"owner-([0-9a-f]{16})\.json")
_PART = re.compile(r"\..+\.([0-9a-f]{16})\.part")
_FORM = {"token": text, "host": text, "boot": text, "pid": natural, "started": text}
_LIMIT = 4096  # bytes of a claim
_ATTEMPTS = 20  # to take a folder that several take at once
_here: set[str] = set()  # tokens of this process: a claim that bears its pid and none of them is left over


class Owner:
    """The right to write to a folder, from its making until `release` or until another process has taken it.

    ValueError if somebody has it who is seen working: alive and not stopped, on this machine. A process on another machine
    cannot be seen, and a cluster may have moved the run from there: it is taken from, and finds out when it looks.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.pid = folder, os.getpid()
        for _ in range(_ATTEMPTS):
            self.token = secrets.token_hex(8)
            self.name, self.claim = _name(self.token), sealed({"token": self.token, **_this_process()})
            try:
                if self._take():
                    return
            except BaseException:
                self.release()
                raise
            self.release()
        raise ValueError(f"`checkpoint` {folder} is in use: several processes begin there at once. Begin with one.")

    def _take(self) -> bool:
        """Whether it is ours now; False where another took it in this very moment, before anything was done."""
        _refuse_if_working(self.folder, _claims(self.folder))
        _here.add(self.token)
        try:
            self._write(self.name, self.claim)
        except FileNotFoundError:
            return False
        others = [claim for claim in _claims(self.folder) if claim["token"] != self.token]
        # Two that began at the same moment see each other here, and agree on which of them goes on.
        _refuse_if_working(self.folder, [claim for claim in others if claim["token"] < self.token])
        for claim in others:
            if self._is_held():
                _remove(self.folder / _name(claim["token"]))
        for name in os.listdir(self.folder):
            part = _PART.fullmatch(name)
            if part and not os.path.lexists(self.folder / _name(part[1])):
                _remove(self.folder / name)
        settle(self.folder)
        return self._is_held()

    def _is_held(self) -> bool:
        with contextlib.suppress(Damaged):
            return os.getpid() == self.pid and read(self.folder / self.name, _LIMIT) == self.claim
        return False

    def check(self) -> None:
        """ValueError if the folder is another's by now."""
        if self._is_held():
            return
        others = " and ".join(map(_process_of, _claims(self.folder, strict=False)))
        why = f"{others} has taken it over" if others else f"{self.name} was removed, by a process that ended or by hand"
        raise ValueError(
            f"`checkpoint` {self.folder} is no longer that of this run, process {self.pid} on {platform.node()}: {why}, "
            "while this one was suspended or out of sight. It stops, and has changed nothing there since. When no other "
            "process is at work there, call hg.optimize again to go on from where the folder is."
        )

    def publish(self, name: str, content: bytes) -> None:
        """The file appears whole or not at all, survives a power cut, and appears only if the folder is still ours."""
        self.check()
        self._write(name, content)

    def remove(self, names: list[str]) -> None:
        """Files that bear the tokens of earlier owners or of this one: no later owner uses their names."""
        if names:
            self.check()
        for name in names:
            _remove(self.folder / name)

    def release(self) -> None:
        """No claim is left; that of another is not touched."""
        _here.discard(self.token)
        if os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                _remove(self.folder / self.name)

    def _write(self, name: str, content: bytes) -> None:
        part = self.folder / f".{name}.{self.token}.part"
        try:
            write_new(part, content)
            if name != self.name:
                self.check()
            os.replace(part, self.folder / name)
        except Exception as error:  # a full disk, say; what dies on the way leaves its part to the next owner
            with contextlib.suppress(OSError):
                _remove(part)
            if isinstance(error, FileNotFoundError) and name != self.name:
                self.check()  # the part was taken away, and so was the claim
            raise
        settle(self.folder)


def _claims(folder: pathlib.Path, strict: bool = True) -> list[dict[str, Any]]:
    """Those in the folder. strict: ValueError for one that cannot be read; otherwise it is passed over."""
    found = []
    for name in sorted(filter(_CLAIM.fullmatch, os.listdir(folder) if folder.is_dir() else ())):
        try:
            claim = unsealed(read(folder / name, _LIMIT))
            if problem := misfit(claim, _FORM, "it") or ("" if name == _name(claim["token"]) else "it is renamed"):
                raise Damaged(f"is not a claim: {problem}")
            found.append(claim)
        except Missing:
            continue  # released since
        except Damaged as problem:
            if strict:
                raise ValueError(
                    f"{folder / name} {problem}. It says which process writes to the folder. If none does, remove it."
                ) from problem
    return found


def _refuse_if_working(folder: pathlib.Path, claims: list[dict[str, Any]]) -> None:
    for claim in filter(_is_working, claims):
        who = "another call of hg.optimize in this process" if claim["token"] in _here else _process_of(claim)
        raise ValueError(
            f"`checkpoint` {folder} is in use: {who} is at work there. Wait until it has ended, end it, or pass another "
            f"folder. If it is not at work there, remove {folder / _name(claim['token'])} and call again: if it was after "
            "all, it stops at its next meta-step."
        )


def _name(token: str) -> str:
    return f"owner-{token}.json"


def _process_of(claim: dict[str, Any]) -> str:
    return f"process {claim['pid']} on {claim['host']}"


def _this_process() -> dict[str, Any]:
    """What tells it from all others: a pid is given again, also after the machine has started anew."""
    pid = os.getpid()
    _, started = _state(pid)
    return {"host": platform.node(), "boot": _boot(), "pid": pid, "started": started}


def _is_working(claim: dict[str, Any]) -> bool:
    """Whether it can be seen: on this machine since its last start, the same process, neither dead nor stopped."""
    if claim["pid"] == os.getpid() and claim["token"] not in _here:
        return False
    if (claim["host"], claim["boot"]) != (platform.node(), _boot()):
        return False
    state, started = _state(claim["pid"])
    return started == claim["started"] and state not in ("", "T", "t", "Z", "X", "x")


def _state(pid: int) -> tuple[str, str]:
    """(state as one letter, "" for none: there is no such process; when it started, "" where that is not known)."""
    try:
        # Behind the name, which is in brackets and may hold anything: the state first, the start as the twentieth.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        if os.path.exists("/proc/self/stat") or os.name != "posix":  # on Windows a signal of 0 is no question
            return "", ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "", ""
    except OSError:
        pass  # it is another user's
    return "?", ""


def _boot() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _remove(path: pathlib.Path) -> None:
    path.unlink(missing_ok=True)
