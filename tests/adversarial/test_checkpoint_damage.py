"""A damaged, forged or misplaced file in a checkpoint folder: the right history, or an error with the file and the cure.

The long form is `experiments.benchmarks.damage`.
"""

import os
import pathlib
import random
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from folders import DONE, HYPERS, OPTIONS, begun, flip, killed, learn, link, named, pipe, train_fn

import hypergrad as hg
from experiments.benchmarks import damage
from hypergrad import _checkpoint, _folder_owner


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return damage.digest(learn(None))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    return [begun(tmp_path_factory.mktemp("ended")), killed(tmp_path_factory.mktemp("killed"))]


@pytest.fixture
def folder(bases: list[pathlib.Path], tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(bases[0], tmp_path / "folder")


@pytest.mark.long
def test_any_damage_ends_in_the_right_history_or_a_name(
    bases: list[pathlib.Path], expected: list[Any], tmp_path: pathlib.Path
) -> None:
    found: dict[str, int] = {}
    for case in range(24):
        folder = shutil.copytree(bases[case % 2], tmp_path / str(case))
        what = damage.damaged(folder, random.Random(case))
        result = damage.outcome(folder, expected, learn)
        assert not result.startswith("WRONG"), (case, what, result)
        found[result] = found.get(result, 0) + 1
    assert len(found) == 3, found


def test_the_judge_of_damage_catches_lies(bases: list[pathlib.Path], expected: list[Any], tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(bases[0], tmp_path / "folder")
    assert damage.outcome(folder, [*expected[:-1], "another"], learn) == "WRONG: another history"

    def nameless(*_: Any) -> None:
        raise ValueError("it is broken")

    def bare(*_: Any) -> None:
        raise KeyError("capacity")

    def careless(folder: pathlib.Path, _: int) -> None:
        (folder / "hypers-000001.npz").unlink()
        raise ValueError(f"{folder} is broken")

    lies = {nameless: "an error without a name: it is broken", bare: "KeyError: 'capacity'", careless: "an error, and ['hyp"}
    for lie, text in lies.items():
        assert damage.outcome(folder, expected, lie).startswith(f"WRONG: {text}")


# Each of the ways by hand: what is done, and what is said.


ONE_BACK = rf"Going on from the point before: meta-step {DONE - 1} is made again\."
MENDED: dict[str, tuple[str, Callable[[pathlib.Path], None], str]] = {
    "the point flipped": (
        "point-*",
        flip,
        rf"point-00000{DONE}-\w+.npz does not match its checksum in run.json\. {ONE_BACK}",
    ),
    "the point cut": (
        "point-*",
        lambda p: p.write_bytes(p.read_bytes()[:99]),
        rf"has 99 bytes of \d+\. {ONE_BACK}",
    ),
    "the point longer": (
        "point-*",
        lambda p: p.write_bytes(bytes(9999)),
        rf"has 9999 bytes, where at most \d+ are.*{ONE_BACK}",
    ),
    "the point lost": ("point-*", pathlib.Path.unlink, rf"point-\S+ is missing\. {ONE_BACK}"),
    "the point a link": ("point-*", link, rf"point-\S+ is a symbolic link, and is not followed\. {ONE_BACK}"),
    "the point a pipe": ("point-*", pipe, rf"point-\S+ is not a regular file\. {ONE_BACK}"),
    "first hypers": (
        "hypers-000000*",
        flip,
        r"hypers-000000.npz does not .* The file after it has its hypers too: nothing is",
    ),
    "other hypers": (
        "hypers-000001*",
        pathlib.Path.unlink,
        r"is missing\. The file after it has its hypers too: nothing is lost",
    ),
    "last hypers": (f"hypers-00000{DONE - 1}*", flip, r"does not match .*A point has its hypers too: nothing is lost"),
}


@pytest.mark.parametrize("way", MENDED)
def test_one_damaged_file_loses_nothing(way: str, folder: pathlib.Path, expected: list[Any]) -> None:
    pattern, act, text = MENDED[way]
    act(named(folder, pattern))
    with pytest.warns(UserWarning, match=text) as caught:
        assert damage.digest(learn(folder)) == expected
    assert len(caught) == 1
    assert damage.digest(learn(folder)) == expected  # and no warning: what was damaged is whole or not needed any more


def test_a_warning_is_that_of_the_users_line(folder: pathlib.Path) -> None:
    flip(named(folder, "point-*"))
    flip(folder / "hypers-000001.npz")
    with pytest.warns(UserWarning) as caught:
        hg.optimize(train_fn, hypers=HYPERS, meta_steps=DONE + 1, checkpoint=folder, **OPTIONS)
    assert [w.filename for w in caught] == 2 * [__file__]


def test_a_run_of_one_meta_step_goes_on_from_its_start(tmp_path: pathlib.Path, expected: list[Any]) -> None:
    learn(tmp_path, 1)
    flip(named(tmp_path, "point-*"))
    flip(named(tmp_path, "hypers-*"))
    with pytest.warns(UserWarning) as caught:
        assert damage.digest(learn(tmp_path)) == expected
    for warning, end in zip(
        caught, ("Its hypers are those given here: nothing is lost.", "meta-step 0 is made again."), strict=True
    ):
        assert str(warning.message).endswith(end)


def test_without_both_points_only_a_meta_optimizer_with_a_state_stops(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for path in folder.glob("point-*"):
        flip(path)
    with pytest.raises(
        ValueError, match=rf"{folder} cannot go on: point-\S+ does not .*, and point-\S+ does not .* state of"
    ):
        learn(folder)
    with pytest.raises(
        ValueError, match=rf"meta_steps={DONE - 1} still reads the history, and the hypers that it ends with"
    ):
        learn(folder)
    assert len(learn(folder, DONE - 1).history) == DONE - 1
    plain = {"meta_optimizer": optax.sgd(0.01)}
    learn(tmp_path / "plain", DONE, **plain)
    for path in (tmp_path / "plain").glob("point-*"):
        path.unlink()
    with pytest.warns(UserWarning, match=ONE_BACK):
        resumed = learn(tmp_path / "plain", **plain)
    assert damage.digest(resumed) == damage.digest(learn(None, **plain))


def test_hypers_that_are_lost_twice_are_nan_and_said_to_be(folder: pathlib.Path, expected: list[Any]) -> None:
    for i in (1, 2):
        flip(folder / f"hypers-00000{i}.npz")
    with pytest.warns(UserWarning) as caught:
        result = learn(folder)
    assert "hypers-000001.npz does not match its checksum" in str(caught[0].message)
    assert str(caught[0].message).endswith("no better: the hypers of meta-step 1 are lost, and NaN in the history.")
    assert str(caught[1].message).endswith("The file after it has its hypers too: nothing is lost.") and len(caught) == 2
    lost = [i for i, done in enumerate(result.history) if np.isnan(done.hypers["a"].unconstrained).any()]
    assert lost == [1] and [done.value for done in result.history] == [done.value for done in learn(None).history]


@pytest.mark.parametrize("which", [(DONE - 1,), (0, 1)], ids=["last", "first"])
def test_hypers_by_which_the_run_is_known_are_needed(which: tuple[int, ...], folder: pathlib.Path) -> None:
    for i in which:
        flip(folder / f"hypers-00000{i}.npz")
    flip(named(folder, f"point-00000{DONE - 1}*"))
    elsewhere = {"a": hg.positive(jnp.array([0.5, 2.0000005])), "b": HYPERS["b"]}
    with pytest.raises(
        ValueError, match=rf"hypers-00000{which[0]}.npz does not match .*, and its hypers are found nowhere else"
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hg.optimize(train_fn, jnp.sum, elsewhere, monitor_fn=jnp.max, meta_optimizer=optax.adam(0.1), checkpoint=folder)


def test_an_edited_number_is_noticed_and_the_record_before_it_is_named(folder: pathlib.Path, expected: list[Any]) -> None:
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"capacity": 0', '"capacity": 1'))
    with pytest.raises(ValueError) as caught:
        learn(folder)
    before = named(folder, "run-*.json").name
    assert str(caught.value) == (
        f"{folder / 'run.json'} is damaged or was edited: it does not match its own checksum. Restore it: {before}, copied "
        f"to run.json, goes on after meta-step {DONE - 2}, or pass another `checkpoint` folder."
    )
    shutil.copy(folder / before, folder / "run.json")
    assert damage.digest(learn(folder)) == expected


def test_hypers_without_run_json_are_no_new_run(folder: pathlib.Path) -> None:
    (folder / "run.json").unlink()
    before = damage.contents(folder)
    with pytest.raises(ValueError) as caught:
        learn(folder)
    assert str(caught.value) == (
        f"`checkpoint` {folder} has hypers-000000.npz, hypers-000001.npz, hypers-000002.npz, ..., but no run.json, that "
        "says what run they are of: it was lost, or the files are not of hg.optimize. Restore it: "
        f"{named(folder, 'run-*').name}, copied to run.json, goes on after meta-step {DONE - 2}, or pass another folder. "
        "Nothing was changed."
    )
    assert damage.contents(folder) == before
    named(folder, "run-*").unlink()
    with pytest.raises(ValueError, match="Restore it from a backup, or pass another folder"):
        learn(folder)


def test_a_folder_that_cannot_be_written_to_is_found_out_before_the_first_meta_step(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: pathlib.Path, content: bytes) -> None:
        raise OSError(30, os.strerror(30), str(path))

    def never(*_: Any) -> Any:
        raise AssertionError("a meta-step was made")

    monkeypatch.setattr(_folder_owner, "write_new", read_only)
    for other in (folder, folder / "new"):
        with pytest.raises(
            ValueError, match=rf"{other} cannot be written to \(Read-only file system\), and there are meta-st"
        ):
            learn(other, train_fn=never)
    assert len(learn(folder, DONE).history) == DONE  # nothing to write
    flip(named(folder, "point-*"))
    with pytest.raises(ValueError, match="cannot be written to"):
        learn(folder, DONE)


def test_a_folder_that_cannot_be_read_is_named(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Any) -> Any:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(ValueError, match=rf"{folder} cannot be read \(Permission denied\)"):
        learn(folder)


def test_a_disk_that_is_full_leaves_the_last_meta_step(folder: pathlib.Path, expected: list[Any]) -> None:
    written = []

    def full(path: pathlib.Path, content: bytes) -> None:
        written.append(path)
        path.write_bytes(content if len(written) < 8 else content[:10])
        if len(written) == 8:
            raise OSError(28, os.strerror(28), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_folder_owner, "write_new", full)
        with pytest.raises(OSError, match="No space left on device"):
            learn(folder)
    assert not list(folder.glob("*.part"))
    assert damage.digest(learn(folder)) == expected


def test_another_monitor_is_noticed(folder: pathlib.Path) -> None:
    with pytest.raises(
        ValueError, match="had the monitor .* now: monitor_fn or its data are not those of this run. Pass an"
    ):
        learn(folder, monitor_fn=lambda x: 100 * jnp.max(x))
    with pytest.warns(UserWarning, match="had the monitor .* now; nothing else is known to differ. Were .*") as caught:
        learn(folder, DONE + 1, monitor_fn=lambda x: 1.0001 * jnp.max(x))
    assert len(caught) == 1


def test_a_reader_follows_a_writer_that_goes_on_meanwhile(folder: pathlib.Path, expected: list[Any]) -> None:
    """Between run.json and the point, which is gone by then."""
    point, calls = _checkpoint.Folder.point, []

    def overtaken(self: Any, *arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == 1:
            learn(folder)
        return point(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checkpoint.Folder, "point", overtaken)
        assert len(learn(folder, DONE).history) == DONE
    assert damage.digest(learn(folder)) == expected
