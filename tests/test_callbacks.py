"""Callbacks stop by True alone; and lines of JSON are written beside what else is in a file."""

import json
import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from covering import long
from tiny import fails

import hypergrad as hg


def run(*callbacks: Any, meta_steps: int = 3, **options: Any) -> list[int]:
    f = lambda h, _: h["x"] ** 2  # noqa: E731
    result = hg.optimize(f, lambda v: v, {"x": 2.0}, meta_steps=meta_steps, callbacks=list(callbacks), **options)
    return [done.step for done in result.history]


@pytest.mark.parametrize(
    ("result", "shown"),
    [(2, "int 2"), long(0, "int 0"), ("no", "str 'no'"), (np.ones(2), "float64[2]"), long(jnp.zeros(()), "float32[]")],
    ids=["length", "zero", "text", "array", "number"],
)
def test_what_is_neither_true_nor_false_is_an_error_after_the_meta_step_is_kept(result, shown, tmp_path) -> None:
    def writes(done):
        return result

    with fails(TypeError, "after meta-step 0 the callback", f"writes returns {shown}; True stops"):
        run(writes, checkpoint=tmp_path)
    seen = []
    assert run(seen.append, checkpoint=tmp_path) == [0, 1, 2] and [done.step for done in seen] == [1, 2]


@pytest.mark.parametrize("kind", [bool, long(np.bool_), jnp.bool_], ids=["python", "numpy", "jax"])
def test_a_bool_of_any_kind_stops_or_goes_on(kind, tmp_path) -> None:
    stop = lambda done: kind(done.step == 1)  # noqa: E731
    for _ in range(2):
        assert run(stop, checkpoint=tmp_path) == [0, 1]
    with pytest.warns(UserWarning, match=f"{re.escape(str(tmp_path))}: a callback stopped this run after 2 of 3") as told:
        assert run(checkpoint=tmp_path) == [0, 1]
    assert [w.filename for w in told] == [__file__]
    assert run(checkpoint=tmp_path, meta_steps=2) == [0, 1]  # as many as were asked for: in silence
    assert run(checkpoint=tmp_path, meta_steps=4) == [0, 1, 2, 3]


def test_what_returned_nothing_before_is_named_where_it_stops() -> None:
    """As bars of progress do, which return True where they were drawn."""

    def logs(done):
        return True if done.step == 1 else None

    with pytest.warns(UserWarning, match="stops at meta-step 1 of 3: the callback .*logs returned True, and noth") as told:
        assert run(logs) == [0, 1]
    assert [w.filename for w in told] == [__file__]


def test_a_callback_of_the_library_stops_in_silence_and_its_folder_is_found_so(tmp_path) -> None:
    for _ in range(2):
        assert run(hg.callbacks.EarlyStopping(patience=2, tolerance=9.0), meta_steps=5, checkpoint=tmp_path) == [0, 1, 2]


def test_a_callback_of_two_arguments_is_an_error_before_anything_runs() -> None:
    with fails(TypeError, "`callback` must take one argument, callback(done)", "has the signature (step, done)"):
        run(lambda step, done: None)


def values(path: pathlib.Path) -> list[Any]:
    return [record["value"] if "value" in record else record for record in map(json.loads, path.read_text().splitlines())]


def test_a_line_that_was_cut_off_takes_no_record_with_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"step": 7, "value": 0.12')
    run(hg.callbacks.JsonLines(path), meta_steps=2)
    first, *records = path.read_text().splitlines()
    assert first == '{"step": 7, "value": 0.12' and [json.loads(line)["step"] for line in records] == [0, 1]


def test_lines_that_are_no_records_stay(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"mine": 1}\n{"mine": 2}')
    for _ in range(2):
        run(hg.callbacks.JsonLines(path), checkpoint=tmp_path / "run", meta_steps=2)
        assert values(path)[:2] == [{"mine": 1}, {"mine": 2}] and len(values(path)) == 4


def test_a_call_that_reads_fewer_meta_steps_cuts_no_lines(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines"
    go = lambda n: run(hg.callbacks.JsonLines(path), checkpoint=tmp_path / "run", meta_steps=n)  # noqa: E731
    go(3)
    before = path.read_bytes()
    assert go(1) == [0] and path.read_bytes() == before
    go(4)
    assert path.read_bytes().startswith(before) and len(values(path)) == 4


def test_a_line_whose_meta_step_was_not_kept_is_written_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines"

    def killed(done: Any) -> None:
        if done.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(hg.callbacks.JsonLines(path), killed, checkpoint=tmp_path / "run")
    assert len(values(path)) == 2
    run(hg.callbacks.JsonLines(path), checkpoint=tmp_path / "run")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_no_link_is_written_through_or_replaced(tmp_path: pathlib.Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("mine\n")
    link.symlink_to(target)
    with fails(ValueError, f"JsonLines cannot write to {link}", f"it leads to {target}"):
        run(hg.callbacks.JsonLines(link), checkpoint=tmp_path / "run")
    assert link.is_symlink() and target.read_text() == "mine\n"


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_path_that_cannot_be_written_is_found_before_anything_runs(checkpoint: bool, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    seen: list[Any] = []
    options = {"checkpoint": tmp_path / "run"} if checkpoint else {}
    for path in (tmp_path, tmp_path / "file" / "lines"):
        with fails(ValueError, f"JsonLines cannot write to {path}", "Give the path of a file"):
            run(seen.append, hg.callbacks.JsonLines(path), **options)
    assert not seen
    run(hg.callbacks.JsonLines(tmp_path / "new" / "folder" / "lines"), meta_steps=1, **options)
    assert len(values(tmp_path / "new" / "folder" / "lines")) == 1


def test_a_checkpoint_is_a_path() -> None:
    with fails(TypeError, "`checkpoint` must be the path of a folder", "got bool True"):
        run(checkpoint=True)


def test_files_are_where_the_process_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    run(hg.callbacks.JsonLines("log.jsonl"), lambda _: monkeypatch.chdir(there), meta_steps=2, checkpoint="run")
    assert len((here / "log.jsonl").read_text().splitlines()) == 2 and not list(there.iterdir())
    monkeypatch.chdir(here)
    assert run(meta_steps=3, checkpoint="run") == [0, 1, 2]
