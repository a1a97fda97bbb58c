"""`run.json`: what run a checkpoint folder holds, and whether it is the one that is to go on.

Invariant: what `read_record` returns has its checksum and its form, and belongs to a run like the one that asks.
"""

import importlib.metadata
import os
import pathlib
import platform
import re
from typing import Any, NamedTuple

import jax

from hypergrad._forms import misfit, natural, number, text
from hypergrad._history import PLACES, RECORD, contradiction
from hypergrad._safe_files import Damaged, Missing, digest, parsed, read, unsealed


RUN = "run.json"
FORMAT = 4  # 1 had no checksums, and no owner; 2 no room by link; 3 no microbatches
_LONGEST = 2**28  # bytes: half a million meta-steps

HYPERS = re.compile(r"hypers-\d{6,9}(-[0-9a-f]{16})?\.npz")
# What is needed for two meta-steps only; the number is that of the meta-steps so far.
PASSING = re.compile(r"(point|run)-(\d{6,9})-[0-9a-f]{16}\.(npz|json)")
_TRACES = re.compile(r"(hypers|point)-\d{6,9}(-\w+)?\.npz|run-\d{6,9}-\w+\.json")  # of format 1 too


def _mapping(x: Any) -> bool:
    return isinstance(x, dict)


def _room(x: Any) -> bool:
    """[name of a link, words per parameter, bits a step]."""
    return (
        isinstance(x, list) and len(x) == 3 and text(x[0]) and natural(x[1]) and x[1] < 2**24
        and number(x[2]) and 0 <= x[2] <= 24
    )  # fmt: skip


_FILE = {
    "name": lambda x: text(x) and bool(HYPERS.fullmatch(x) or PASSING.fullmatch(x)),
    "bytes": lambda x: type(x) is int and x >= 0,
    "sha256": text,
}
_FORM = {
    "format": natural, "identity": _mapping, "update": text, "environment": _mapping, "hypers": [_FILE],
    "points": [{"step": natural, **_FILE}], "steps": [RECORD], "places": PLACES, "stopped_at": natural,
    "capacity": lambda x: natural(x) and x < 2**24,  # words per parameter
    "room": [_room],
}  # fmt: skip


class Run(NamedTuple):
    """What a run is known by. update: a digest of the meta-optimizer's program, to compare between equal versions only."""

    identity: dict[str, Any]
    update: str

    def begun(self) -> dict[str, Any]:
        """A record without meta-steps."""
        nothing = {"hypers": [], "points": [], "steps": [], "places": [], "stopped_at": 0, "capacity": 0, "room": []}
        return {"format": FORMAT, **self._asdict(), "environment": environment(), **nothing}


def file_entry(name: str, content: bytes) -> dict[str, Any]:
    """How a record speaks of a file."""
    return {"name": name, "bytes": len(content), "sha256": digest(content)}


def read_record(folder: pathlib.Path, run: Run) -> tuple[bytes, dict[str, Any]]:
    """(run.json as it stands, what it says); where there is nothing yet, nothing and a record without meta-steps."""
    file, traces = folder / RUN, _traces(folder)  # looked at first: run.json is older than any of them
    try:
        content = read(file, _LONGEST)
    except Missing as problem:
        if traces:
            raise ValueError(
                f"`checkpoint` {folder} has {', '.join(traces[:3])}{', ...' if len(traces) > 3 else ''}, but no {RUN}, that "
                "says what run they are of: it was lost, or the files are not of hg.optimize. Restore it"
                f"{_backup(folder)}, or pass another folder. Nothing was changed."
            ) from problem
        return b"", run.begun()
    except Damaged as problem:
        raise ValueError(f"{file} {problem}. Restore it{_backup(folder)}, or pass another `checkpoint` folder.") from problem
    try:
        record = unsealed(content)
    except Damaged as problem:
        damaged = f"{file} {problem}. Restore it{_backup(folder)}, or pass another `checkpoint` folder."
        raise ValueError(_of_another_kind(file, content) or damaged) from problem
    different = misfit(record.get("format"), lambda x: x == FORMAT, "its format") or _difference_between(record, run)
    if different:
        raise ValueError(
            f"`checkpoint` {folder} holds another run: {different}. Pass another folder, or remove this one to start anew."
        )
    strange = misfit(record, _FORM, "it") or contradiction(record["steps"], record["places"])
    if not strange and len(record["hypers"]) != len(record["steps"]):
        strange = f"it names hypers of {len(record['hypers'])} meta-steps and has {len(record['steps'])}"
    if strange:
        raise ValueError(f"{file} has its checksum, and yet {strange}: hg.optimize did not write it. Pass another folder.")
    return content, record


def _difference_between(record: dict[str, Any], run: Run) -> str:
    """What makes it another run, in words; of a record without meta-steps nothing."""
    theirs, versions = record.get("identity"), record.get("environment")
    if not (isinstance(theirs, dict) and isinstance(versions, dict)) or not record.get("steps"):
        return ""
    for name, here in run.identity.items():
        if _ordered(theirs.get(name)) != _ordered(here):
            return _difference(name, theirs.get(name), here)
    here = environment()
    comparable = all(versions.get(name) == here[name] for name in ("jax", "optax"))
    if comparable and record.get("update") != run.update:
        return "meta_optimizer updates differently (another rate, schedule or rule)"
    return ""


def _ordered(entry: Any) -> Any:
    """What is kept of leaves is in their order, which that of two mappings with the same keys need not be."""
    return list(entry.items()) if isinstance(entry, dict) else entry


def _of_another_kind(file: pathlib.Path, content: bytes) -> str:
    """What is wrong with a file that has no checksum because it never had one; "" if it seems to have had one."""
    try:
        entries = parsed(content)
    except Damaged:
        return ""
    if {"identity", "steps"} <= entries.keys() and not {"format", "sha256"} & entries.keys():
        return (
            f"{file} was written by hypergrad when checkpoints had no checksums (format 1; here {FORMAT}). Finish that run "
            "with the version that began it, or pass another `checkpoint` folder."
        )
    if "identity" not in entries:
        return f"{file} is not a record of hg.optimize. Pass another `checkpoint` folder, or remove this one."
    return ""


def _traces(folder: pathlib.Path) -> list[str]:
    """The names of files that a run has when it has made a meta-step."""
    try:
        return sorted(filter(_TRACES.fullmatch, os.listdir(folder)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"`checkpoint` {folder} cannot be read ({error.strerror}). Pass another folder.") from error


def _backup(folder: pathlib.Path) -> str:
    """Where to restore run.json from, as the end of a sentence."""
    for name in sorted((n for n in os.listdir(folder) if n.startswith("run-") and PASSING.fullmatch(n)), reverse=True):
        try:
            steps = len(unsealed(read(folder / name, _LONGEST))["steps"])
        except (Damaged, KeyError, TypeError):
            continue
        return f": {name}, copied to {RUN}, goes on after meta-step {steps - 1}"
    return " from a backup"


def environment() -> dict[str, Any]:
    """What may change the bits of an evaluation, and need not."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")}
    device = jax.devices()[0]
    return {
        **versions,
        "python": platform.python_version(),
        "machine": platform.node(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": f"{device.platform} {device.device_kind}",
    }


def library_version() -> str:
    return importlib.metadata.version("hypergrad-jax")


_PARTS = {"hypers": "hypers", "meta_optimizer": "another meta_optimizer: of its state, "}


def _difference(name: str, there: Any, here: Any) -> str:
    """Two entries of an identity that are not equal, in words."""
    if here == there:
        return f"the leaves of {name} are in another order, {', '.join(there)} there and {', '.join(here)} here"
    if isinstance(here, dict) and isinstance(there, dict):
        key = next(k for k in sorted({*there, *here}) if there.get(k) != here.get(k))
        name, there, here = f"{_PARTS[name]}{key}", there.get(key), here.get(key)
    there, here = ("absent" if x is None else x for x in (there, here))
    return f"{name} is {there} there and {here} here"
