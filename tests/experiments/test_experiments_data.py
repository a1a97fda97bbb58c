"""The scripts that learn penalties, data, architectures and initial weights, in miniature, and what they stand on."""

import json

import jax
import numpy as np
import pytest
from covering import some_of

from experiments import (
    _characters,
    _config,
    _tasks,
    architecture_sharing,
    initial_weights,
    learned_training_set,
    per_weight_penalty,
)


SCRIPTS = {
    per_weight_penalty: ["penalties", "losses"],
    learned_training_set: ["images", "hundred", "labels", "losses"],
    architecture_sharing: ["alphabets", "sharing", "losses"],
    initial_weights: ["sinusoids"],
}


@pytest.mark.long
@some_of("script", SCRIPTS, per_weight_penalty, ids=lambda s: s.__name__.split(".")[-1])
def test_script_in_miniature(script, tmp_path, capsys):
    script.main(script.Config(tiny=True, seeds=(3,), out=tmp_path))
    name = script.__name__.split(".")[-1]
    assert f"{name}.json" in capsys.readouterr().out
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["seeds"] == [3] and record["numbers"]
    assert all(proof["exact"] for proof in record["certificate"].values())
    for picture in SCRIPTS[script]:
        assert (tmp_path / f"{picture}.png").stat().st_size > 5_000


def test_a_preset_fills_what_was_not_given():
    config = per_weight_penalty.Config(data="mnist", batch_size=7)
    presets = {"digits": {"steps": 5, "batch_size": 1, "longer": 2}, "mnist": {"longer": 3}, "tiny": {"steps": 1}}
    filled = _config.filled(config, presets)
    assert (filled.steps, filled.batch_size, filled.longer, filled.meta_steps) == (5, 7, 3, None)
    assert _config.filled(per_weight_penalty.Config(tiny=True), presets).steps == 1


def test_glyphs_are_always_the_same_and_hardly_the_same():
    first, again = (_characters.load("glyphs", 7) for _ in range(2))
    assert [a.images.shape for a in first] == [(10, 20, 7, 7)] * 8
    np.testing.assert_array_equal(first[3].images, again[3].images)
    images = first[3].images
    within = np.abs(images[:, :1] - images).mean()
    between = np.abs(images[:1] - images).mean()
    assert 0 < within < between


def test_omniglot_is_read_from_its_folder(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (120, 28, 28), dtype=np.uint8)
    alphabet = np.repeat([0, 1], [80, 40]).astype(np.uint8)
    np.savez(tmp_path / "omniglot.npz", images=images, alphabet=alphabet, alphabet_names=np.array(["A_b", "C"]))
    monkeypatch.setenv("HYPERGRAD_DATA", str(tmp_path))
    first, second = _characters.load("omniglot", 14)
    assert (first.name, first.images.shape, second.images.shape) == ("A b", (4, 20, 14, 14), (2, 20, 14, 14))
    np.testing.assert_allclose(first.images[1, 3, 2, 5], images[23, 4:6, 10:12].mean() / 255, rtol=1e-6)


def test_a_drawing_and_its_turned_copy_stay_on_one_side():
    config = _config.filled(architecture_sharing.Config(tiny=True), architecture_sharing.PRESETS)
    alphabets = _characters.load("glyphs", 7)
    alphabets[1] = alphabets[1]._replace(images=alphabets[1].images[:6])
    experiment = architecture_sharing.Experiment(config, alphabets[:2])
    train, validation = experiment.split(jax.random.key(0))
    assert train.x.shape == (4, 10, 10, 49) and validation.x.shape == (4, 10, 2, 49)
    np.testing.assert_array_equal(train.of.sum(axis=1), [10, 6, 10, 6])
    upright = np.asarray(validation.x[0]).reshape(10, 2, 7, 7)
    np.testing.assert_array_equal(np.rot90(upright, -1, axes=(-2, -1)), np.asarray(validation.x[2]).reshape(10, 2, 7, 7))
    seen = {x.tobytes() for x in np.asarray(train.x[0]).reshape(-1, 49)}
    assert all(x.tobytes() not in seen for x in np.asarray(validation.x[0]).reshape(-1, 49))


def test_nll_of_a_task_leaves_the_padding_out():
    alphabets = [a._replace(images=a.images[:n]) for a, n in zip(_characters.load("glyphs", 7), (4, 3), strict=False)]
    images, of = architecture_sharing.padded(alphabets)
    tasks = architecture_sharing.Tasks(images.reshape(2, 4, 20, 49), of)
    params = {"layer_1": {"weights": np.zeros((2, 49, 4)), "biases": np.array([[0.0, 1, 2, 3]] * 2)}}
    log_p = np.arange(4) - np.log(np.exp(np.arange(4)).sum())
    np.testing.assert_allclose(tasks.nll(params), [-log_p.mean(), -log_p[:3].mean()], rtol=1e-6)
    np.testing.assert_allclose(tasks.error(params), [3 / 4, 1], rtol=1e-6)


def test_correlation_of_tied_and_of_separate_weights():
    np.testing.assert_allclose(architecture_sharing.correlation(np.full((3, 3), 1 / 3)), np.ones((3, 3)))
    np.testing.assert_allclose(architecture_sharing.correlation(np.diag([1.0, 2, 3])), np.eye(3))


@pytest.mark.long
def test_parts_of_a_family_share_no_task():
    shots = _tasks.FewShot("glyphs", 7, ways=3, shots=2, queries=4)
    (x, y), (xq, yq) = shots.tasks(jax.random.key(0), "test", 5)
    assert x.shape == (5, 6, 49) and xq.shape == (5, 12, 49) and y[0].tolist() == [0, 0, 1, 1, 2, 2]
    drawings = {part: {row.tobytes() for row in np.asarray(i).reshape(-1, 49)} for part, i in shots.images.items()}
    assert all(row.tobytes() in drawings["test"] for row in np.asarray(x).reshape(-1, 49))
    assert not {row.tobytes() for row in np.asarray(x[0])} & {row.tobytes() for row in np.asarray(xq[0])}
    assert not drawings["test"] & drawings["train"] and not drawings["validation"] & drawings["train"]
    waves = _tasks.Sinusoids(shots=4, queries=3)
    train, test = (waves.tasks(jax.random.key(0), part, 2)[0] for part in ("train", "test"))
    assert train[0].shape == (2, 4, 1) and not np.isin(train[1], test[1]).any()
