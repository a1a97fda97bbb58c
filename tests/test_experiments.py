"""Every script runs, in its smallest form, and its numbers are there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _data, adam_schedules, quickstart
from experiments.benchmarks import hypergradient, long_reversal, opponents


def test_quickstart_learns_and_records(tmp_path, capsys):
    config = quickstart.Config(meta_steps=2, steps=4, hidden=(4, 3), report_seeds=2, out=tmp_path)
    numbers = quickstart.main(config)
    printed = capsys.readouterr().out
    assert numbers["certificate"]["exact"] and "reversal exact" in printed
    assert printed.count("<- best") == 1 and "before: validation loss" in printed and "after:  validation loss" in printed
    record = json.loads((tmp_path / "quickstart.json").read_text())
    assert record["config"]["steps"] == 4 and record["versions"]["jax"] == jax.__version__
    assert set(record["numbers"]["after"]) == {"validation_loss", "validation_error", "test_loss", "test_error"}
    for picture in ("schedules", "meta_learning", "penalties"):
        assert (tmp_path / f"{picture}.png").stat().st_size > 10_000


def test_adam_schedules_learns_and_records(tmp_path, capsys):
    numbers = adam_schedules.main(adam_schedules.Config(tiny=True, out=tmp_path))
    assert capsys.readouterr().out.count("AdamW, ") == 3
    assert json.loads((tmp_path / "adam_schedules.json").read_text())["numbers"]["table"] == numbers["table"]
    for losses in numbers["table"].values():
        assert len(losses["test_loss"]) == 1 and np.isfinite(losses["test_loss"]).all()
    for picture in ("adamw_schedules", "comparison"):
        assert (tmp_path / f"{picture}.png").stat().st_size > 10_000


def test_digits_are_split_in_three_without_overlap():
    parts = _data.load("digits", seed=0)
    assert [len(part.x) for part in parts] == [897, 450, 450]
    rows = {row.tobytes() for part in parts for row in part.x}
    assert len(rows) == 1797


def test_npz_data_needs_its_folder(monkeypatch):
    monkeypatch.delenv("HYPERGRAD_DATA", raising=False)
    with pytest.raises(SystemExit, match="HYPERGRAD_DATA"):
        _data.load("mnist", seed=0)


def test_npz_data_is_read_from_its_folder(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    images = {f"x_{part}": rng.integers(0, 256, (30, 28, 28), dtype=np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": rng.integers(0, 10, 30, dtype=np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "mnist.npz", **images, **labels)
    monkeypatch.setenv("HYPERGRAD_DATA", str(tmp_path))
    data = _data.load("mnist", seed=0)
    assert data.side == 28 and data.train.x.dtype == np.float32
    np.testing.assert_allclose(data.train.x.mean(axis=0), 0, atol=1e-6)


def test_every_road_of_the_benchmark_gives_the_same_gradient():
    task = hypergradient.mlp_task(16, sizes=(12, 5, 3), batch_size=4, examples=20)
    rows = hypergradient.measure(task, hypergradient.ROWS, repeats=1)  # raises where one disagrees
    assert [row[0] for row in rows] == list(hypergradient.ROWS)


def test_the_benchmark_gives_the_same_gradient_through_adam():
    task = hypergradient.mlp_task(16, sizes=(12, 5, 3), batch_size=4, examples=20, rule="adam")
    names = ("plain float training", "hg.Reversible", "raw unroll")
    hypergradient.measure(task, {name: hypergradient.ROWS[name] for name in names}, repeats=1)


def test_the_benchmark_catches_a_wrong_gradient():
    task = hypergradient.mlp_task(16, sizes=(12, 5, 3), batch_size=4, examples=20)
    rows = {"plain": opponents.plain, "unroll": opponents.unrolled, "wrong": lambda task, a: jnp.ones_like(a)}
    with pytest.raises(AssertionError, match="wrong disagrees"):
        hypergradient.measure(task, rows, repeats=1)


def test_long_reversal_is_exact_in_short():
    proof = long_reversal.certify(40)
    assert proof.exact and proof.first_mismatch is None
