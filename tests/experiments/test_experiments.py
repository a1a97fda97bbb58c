"""Every script runs, in its smallest form, and its numbers are there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long

from experiments import (
    _config,
    _data,
    _record,
    adam_schedules,
    chaos,
    curvature_optimizers,
    gradient_links,
    language_model,
    learning_rate_schedules,
    long_horizon,
    memory,
    optimizer_race,
    quickstart,
    report,
    schedule_gradient,
    toy_valley,
    unlearning,
)
from experiments.benchmarks import optimizer_family, rules


def test_quickstart_learns_and_records(tmp_path, capsys):
    config = quickstart.Config(meta_steps=2, steps=4, hidden=(4,), report_seeds=2, out=tmp_path)
    numbers = quickstart.main(config)
    printed = capsys.readouterr().out
    assert numbers["certificate"]["exact"] and "reversal exact" in printed
    assert printed.count("<- best") == 1 and "before: validation loss" in printed and "after:  validation loss" in printed
    record = json.loads((tmp_path / "quickstart.json").read_text())
    assert record["config"]["steps"] == 4 and record["versions"]["jax"] == jax.__version__
    assert set(record["numbers"]["after"]) == {"validation_loss", "validation_error", "test_loss", "test_error"}
    for picture in ("schedules", "meta_learning", "penalties"):
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


@pytest.mark.long
def test_adam_beside_optax_in_short():
    beside = optimizer_family.curve("Adam", "digits", 40, jnp.float32, rules.rounded, hidden=())
    assert beside.loss <= 1e-4 and beside.update <= 1e-4 and beside.small <= 2


@pytest.mark.long
@pytest.mark.parametrize(
    "experiment",
    [
        toy_valley,
        long(learning_rate_schedules),
        long(schedule_gradient),
        long(chaos),
        long(memory),
        long(adam_schedules),
        long(gradient_links),
        long(language_model),
        long(optimizer_race),
        long(curvature_optimizers),
        long(unlearning),
        long(long_horizon),
    ],
    ids=lambda m: m.__name__[12:],
)
def test_the_page_runs_in_miniature_and_is_reported(experiment, tmp_path, capsys):
    name = experiment.__name__.removeprefix("experiments.")
    numbers = experiment.main(experiment.Config(tiny=True, out=tmp_path / name))
    proofs = numbers["certificate"]
    assert all(proof["exact"] for proof in ([proofs] if "exact" in proofs else proofs.values()))
    record = _record.read(tmp_path / name / f"{name}.json")
    assert record["thesis"] and record["pictures"] and record["seeds"] is not None
    assert all(row["ours"] is not None for row in record["thesis"])
    for picture in record["pictures"]:
        assert (tmp_path / name / picture["file"]).stat().st_size > 10_000 and picture["caption"]
    page = report.main(report.Config(results=tmp_path, docs=tmp_path / "docs")).read_text()
    assert record["thesis"][0]["quantity"] in page and "exact, every bit compared" in page
    assert f"images/{name}-{record['pictures'][0]['file']}" in page
    assert "wrote" in capsys.readouterr().out


def test_toy_valley_is_that_of_the_thesis():
    with jax.enable_x64(True):
        assert float(toy_valley.valley(jnp.asarray(toy_valley.START))) == pytest.approx(630.4171, abs=1e-4)


def test_the_report_keeps_sections_that_have_no_record(tmp_path):
    page = tmp_path / "docs" / "experiments.md"
    page.parent.mkdir()
    page.write_text("# Title\n\n<!-- chaos -->\n\n## Old\n\ntext\n\n<!-- toy_valley -->\n\n## Older\n\nmore\n")
    text = report.main(report.Config(results=tmp_path, docs=page.parent)).read_text()
    assert text.index("## Older\n\nmore") < text.index("## Old\n\ntext") and text.count("<!--") == 2


def test_the_report_says_when_a_reversal_failed():
    proof = {
        "exact": False,
        "first_mismatch": "step 3",
        "bits_per_parameter_step": 1.0,
        "ideal_bits_per_parameter_step": 1.0,
    }
    assert report._certified(proof) == "Reversal FAILED: step 3."
    assert report._certified({"a": proof | {"exact": True}, "b": proof}) == "Reversal FAILED: b."


def test_presets_fill_what_was_not_said():
    presets = {"digits": {"seeds": 5, "steps": 100}, "mnist": {"steps": 200}, "tiny": {"seeds": 1}}
    config = schedule_gradient.Config(data="mnist", at_once=3)
    filled = _config.filled(config, presets)
    assert (filled.seeds, filled.steps, filled.at_once, filled.hidden) == (5, 200, 3, None)
    tiny = _config.filled(schedule_gradient.Config(tiny=True, steps=7), presets)
    assert (tiny.seeds, tiny.steps) == (1, 7)


def test_memory_holds_from_the_step_that_it_names():
    t = memory.steps_for(200, 0.9, 0)
    assert memory.STORED * t >= 200 * memory.buffer_bits(0.9, t)
    assert memory.STORED * (t - 1) < 200 * memory.buffer_bits(0.9, t - 1)
    with pytest.raises(ValueError, match="a factor of 300 is not reached"):
        memory.steps_for(300, 0.9, 0, limit=1000)


def test_onset_of_chaos_is_the_first_rate_that_does_not_lead_upwards():
    rates = np.arange(4.0)
    assert chaos._onset(rates, np.array([-1, -1, np.nan, 1])) == 2.0
    assert np.isnan(chaos._onset(rates, -np.ones(4)))


def test_the_rule_of_the_thesis_forgets_its_momentum():
    """Twice the same gradient: multipliers 1 and 1 / (1 - 0.81), of a gradient over its root mean square."""
    rule, g = learning_rate_schedules.thesis_rule(0.04), jnp.array([0.5])
    first, state = rule.update(g, rule.init(g))
    second, _ = rule.update(g, state)
    np.testing.assert_allclose([*first, *second], [-0.04 / 1.0002, -0.04 / 0.19 / 1.0002], rtol=1e-4)
