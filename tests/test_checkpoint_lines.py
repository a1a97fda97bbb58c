"""Lines of JSON beside a checkpoint: once each, whatever stopped the run."""

import json
import pathlib

import pytest
from test_checkpoint import STEPS, run

import hypergrad as hg


def test_lines_of_all_starts_are_kept(tmp_path: pathlib.Path) -> None:
    """Killed in the second and called again: those of the first from its checkpoint."""
    told = []

    def killed(done: hg.MetaStep) -> None:
        told.append(done)
        if len(told) == 5:
            raise KeyboardInterrupt

    def go_on() -> list[str]:
        path = tmp_path / "lines"
        callbacks = [hg.callbacks.JsonLines(path), killed]
        starts = [{"x": 5.0}, {"x": -30.0}]
        try:
            hg.restarts(
                lambda h, _: h["x"], lambda x: x**2, starts, meta_steps=3, checkpoint=tmp_path / "run", callbacks=callbacks
            )
        except KeyboardInterrupt:
            pass
        return [f"{json.loads(line)['value']:.0f}" for line in path.read_text().splitlines()]

    assert len(go_on()) == 5
    lines = go_on()
    assert len(lines) == 6 and lines[0] == "25" and lines[3] == "900"


def test_lines_of_a_run_that_goes_on_by_the_same_object_are_written_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines"
    lines, stops = hg.callbacks.JsonLines(path), [3]

    def stopped(done: hg.MetaStep) -> None:
        if done.step in stops:
            stops.clear()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", callbacks=[lines, stopped])
    run(tmp_path / "run", callbacks=[lines, stopped])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(STEPS))


def test_lines_of_starts_are_not_those_of_a_later_run(tmp_path: pathlib.Path) -> None:
    lines = hg.callbacks.JsonLines(tmp_path / "lines")
    square = lambda h, key: h**2  # noqa: E731
    hg.restarts(square, lambda x: x, [2.0, 3.0], meta_steps=1, checkpoint=tmp_path / "starts", callbacks=[lines])
    assert len(lines.path.read_text().splitlines()) == 2
    hg.optimize(square, lambda x: x, 4.0, meta_steps=1, checkpoint=tmp_path / "run", callbacks=[lines])
    assert [json.loads(line)["value"] for line in lines.path.read_text().splitlines()] == [16.0]
