"""Files in a checkpoint folder that somebody made who knows how, or who means harm: named, not followed, and of no cost."""

import io
import os
import pathlib
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from folders import DONE, WANTED, begun, edit, learn, named

from experiments.benchmarks import damage
from hypergrad import _folder_owner
from hypergrad._safe_files import digest


ONE_BACK = rf"Going on from the point before: meta-step {DONE - 1} is made again\."


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return damage.digest(learn(None))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return begun(tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(base: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(base, tmp_path / "folder")


def of_format_1(record: Any) -> Any:
    return {k: v for k, v in record.items() if k not in ("format", "hypers", "points")}


def step(**change: Any) -> Callable[[Any], Any]:
    return lambda record: record["steps"][1].update(change)


STATUS = {
    "code": 0, "step": -1, "place": -1, "magnitude": 0.0, "words": 0, "bits": 0.0, "ideal_bits": 0.0, "isolated": False,
    "small": -1, "quanta": 0.0, "faint": 0.0, "places": 0,
}  # fmt: skip
FORGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "format 5": (lambda r: r.update(format=5), "holds another run: its format is 5"),
    "no capacity": (lambda r: r.pop("capacity") and None, "it lacks 'capacity': hg.optimize did not write it"),
    "more": (lambda r: r.update(more=1), "it has a strange entry 'more'"),
    "memory": (lambda r: r.update(capacity=2**30), r"it\['capacity'\] is 1073741824"),
    "room": (lambda r: r.update(room=[["mean", 2**30, 0.1]]), r"it\['room'\]\[0\] is \['mean', 1073741824, 0.1\]"),
    "text": (step(value="abc"), r"it\['steps'\]\[1\]\['value'\] is 'abc'"),
    "huge": (step(value=10**400), r"it\['steps'\]\[1\]\['value'\] is 1000"),
    "truth": (step(failed_seeds=True), r"it\['steps'\]\[1\]\['failed_seeds'\] is True"),
    "order": (step(step=0), r"its meta-steps are numbered \[0, 0, 2, 3\]"),
    "fewer hypers": (lambda r: r["hypers"].pop() and None, "it names hypers of 3 meta-steps and has 4"),
    "no list": (lambda r: r.update(points={}), r"it\['points'\] is \{\}, not a list"),
    "no mapping": (lambda r: r["hypers"].insert(1, 7), r"it\['hypers'\]\[1\] is 7, not a mapping"),
    "outside": (lambda r: r["hypers"][1].update(name="../a"), r"it\['hypers'\]\[1\]\['name'\] is '../a'"),
    "status": (step(status={"code": 1}), r"it\['steps'\]\[1\]\['status'\] is \{'code': 1\}"),
    "place": (step(status=STATUS), r"the status .* speaks of a place that is not there"),
    "single": (step(status={**STATUS, "bits": 1e300}), r"it\['steps'\]\[1\]\['status'\] is"),
}


@pytest.mark.parametrize("way", FORGED)
def test_a_forged_record_is_named(way: str, folder: pathlib.Path) -> None:
    """One with its checksum, as somebody makes it who knows how."""
    change, text = FORGED[way]
    edit(folder, change)
    with pytest.raises(ValueError, match=text) as caught:
        learn(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is damaged or was edited"),
        (b"{}", "is not a record of hg.optimize. Pass another `checkpoint` folder, or remove this one"),
        (b"[" * 100_000, "is damaged or was edited"),
        (b"\xff\xfe{}", "is damaged or was edited"),
        (b'{"identity": ' + b"9" * 5000 + b"}", "is damaged or was edited"),
        (b'{"step": 3}\n{"step": 4}', "is damaged or was edited"),
    ],
    ids=["empty", "mapping", "deep", "no UTF-8", "long", "lines"],
)
def test_a_run_json_that_is_none_is_named(content: bytes, text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / 'run.json'} {text}"):
        learn(tmp_path)
    assert damage.contents(tmp_path) == {"run.json": content}


def test_a_folder_from_before_checksums_is_refused(folder: pathlib.Path) -> None:
    edit(folder, of_format_1, seal=False)
    with pytest.raises(
        ValueError, match=r"run.json was written by hypergrad when checkpoints had no checksums \(format 1; here"
    ):
        learn(folder)


# What costs memory, or leads out of the folder.


def forged(folder: pathlib.Path, content: bytes) -> None:
    """The last point replaced, and its checksum in run.json too."""
    path = named(folder, "point-*")
    path.write_bytes(content)
    edit(folder, lambda record: record["points"][-1].update(bytes=len(content), sha256=digest(content)))


def bomb(megabytes: int = 64) -> bytes:
    """Few bytes that inflate to many, under a header that says so."""
    head, file = io.BytesIO(), io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": (megabytes * 2**20,)}
    np.lib.format.write_array_header_1_0(head, header)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("point_0.npy", "w") as entry:
        entry.write(head.getvalue())
        for _ in range(megabytes):
            entry.write(bytes(2**20))
    return file.getvalue()


def compressed(content: bytes) -> bytes:
    """The same arrays."""
    file = io.BytesIO()
    with np.load(io.BytesIO(content)) as arrays:
        np.savez_compressed(file, **dict(arrays))
    return file.getvalue()


def renamed(content: bytes) -> bytes:
    file = io.BytesIO()
    with np.load(io.BytesIO(content)) as arrays:
        np.savez(file, *arrays.values())
    return file.getvalue()


def pickled(content: bytes) -> bytes:
    """An array of objects in the place of the first, which would run a program when loaded."""

    class Deadly:
        def __reduce__(self) -> Any:
            return os._exit, (1,)

    file = io.BytesIO()
    with np.load(io.BytesIO(content)) as arrays:
        np.savez(file, **{**arrays, "point_0": np.array([Deadly()])})
    return file.getvalue()


def of_other_shape(content: bytes) -> bytes:
    file = io.BytesIO()
    with np.load(io.BytesIO(content)) as arrays:
        np.savez(file, **{**arrays, "point_1": np.zeros((3, 2), "<f4")})
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda content: bomb(), r"is said to have \d+ bytes, which is too many"),
        (compressed, "is compressed, which hypergrad does not do"),
        (renamed, "holds other arrays"),
        (pickled, r"holds object\[1\] in place of float32\[2\] as point_0"),
        (of_other_shape, r"holds float32\[3, 2\] in place of uint16\[\] as point_1"),
        (lambda content: b"PK", "is no npz of these arrays"),
        (lambda content: b"", "is no npz of these arrays"),
        (lambda content: content[:-30], "is no npz of these arrays"),
        (lambda content: content.replace(b"NUMPY", b"NUMBY"), "is no npz of these arrays"),
    ],
    ids=["bomb", "compressed", "renamed", "pickled", "shape", "head", "empty", "cut", "magic"],
)
def test_a_forged_point_is_not_used(make: Any, text: str, folder: pathlib.Path, expected: list[Any]) -> None:
    forged(folder, make(named(folder, "point-*").read_bytes()))
    with pytest.warns(UserWarning, match=rf"point-00000{DONE}-\w+.npz {text}.*{ONE_BACK}"):
        assert damage.digest(learn(folder)) == expected


def test_a_bomb_takes_no_memory(folder: pathlib.Path) -> None:
    named(folder, "point-*").write_bytes(bomb())
    learn(None, 1)
    with pytest.warns(UserWarning, match=ONE_BACK):
        tracemalloc.start()
        try:
            learn(folder, DONE + 1)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 16 * 2**20  # of 64; JAX needs some of it to trace


def test_planted_links_are_not_written_through(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    for name in (".run.json.part", f".run.json.{'0' * 16}.part", f"hypers-00000{DONE}.npz"):
        (folder / name).symlink_to(victim)
    learn(folder)
    assert victim.read_text() == "precious" and (folder / ".run.json.part").is_symlink()
    with pytest.MonkeyPatch.context() as patch:  # who could guess the token
        patch.setattr(_folder_owner.secrets, "token_hex", lambda n: "1" * 16)
        (folder / f".owner-{'1' * 16}.json.{'1' * 16}.part").symlink_to(victim)
        with pytest.raises(ValueError, match=rf"{folder} cannot be written to \(File exists\)"):
            learn(folder, WANTED + 1)
    assert victim.read_text() == "precious"


def test_files_of_others_are_passed_by(folder: pathlib.Path, expected: list[Any]) -> None:
    for i in (DONE, DONE + 1):
        (folder / f"hypers-00000{i}.npz").write_text("a novel")
    (folder / "point-000001.npz").write_text("a poem")
    (folder / "notes.txt").write_text("a note")
    assert damage.digest(learn(folder)) == expected
    assert damage.digest(learn(folder)) == expected
    assert [(folder / f"hypers-00000{i}.npz").read_text() for i in (DONE, DONE + 1)] == 2 * ["a novel"]
    assert (folder / "point-000001.npz").read_text() == "a poem" and (folder / "notes.txt").read_text() == "a note"
