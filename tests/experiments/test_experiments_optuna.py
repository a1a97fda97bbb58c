"""The comparison with Optuna's samplers and the hybrid search in miniature: they run, resume, report from the storage."""

import jax.numpy as jnp
import numpy as np
import optuna
import pytest

from experiments import _comparison_methods, _comparison_tasks, _optuna_report, hybrid_search, optuna_comparison
from experiments._comparison_methods import Budget, Evaluation


class Bowl(_comparison_tasks.Four):
    """The four numbers, and no training."""

    def train(self, natural, key):
        return sum((jnp.log(x) + 1) ** 2 for x in natural.values())

    def losses(self, params):
        return params, params + 1


@pytest.mark.long
def test_the_comparison_runs_resumes_and_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HYPERGRAD_DATA", raising=False)
    monkeypatch.setitem(_comparison_tasks.TASKS, "four", Bowl)
    few = {k: _comparison_methods.METHODS["schedules"][k] for k in ("TPE, constants", "HypergradientSampler")}
    monkeypatch.setitem(_comparison_methods.METHODS, "schedules", few)
    page = tmp_path / "docs" / "optuna.md"
    page.parent.mkdir()
    page.write_text("# Written by hand\n\n<!-- comparison -->\n\nof an earlier run\n")
    config = optuna_comparison.Config(tiny=True, workers=0, out=tmp_path / "out", docs=page.parent)
    found = optuna_comparison.main(config)
    assert "9 runs to do, 0 done before" in capsys.readouterr().out
    for task, methods in _comparison_methods.METHODS.items():
        assert list(found[task]) == list(methods)
        for row in found[task].values():
            assert np.isfinite([row[axis][what] for axis in ("seconds", "evaluations") for what in ("value", "test")]).all()
    text = page.read_text()
    assert text.startswith("# Written by hand\n\n<!-- comparison -->\n\n## Against Optuna's samplers")
    assert "of an earlier run" not in text and text.count("| `hg.optimize` |") == 1 and "A race to what TPE finds" in text
    for task in _comparison_methods.METHODS:
        assert (page.parent / "images" / f"optuna_comparison-{task}.png").stat().st_size > 10_000
    storage = optuna_comparison.opened(config)
    optuna.delete_study(study_name="race / TPE / seed 0", storage=storage)  # as if it had been killed
    optuna.create_study(study_name="race / TPE / seed 0", storage=storage)
    again = optuna_comparison.main(config)
    assert "1 runs to do, 8 done before" in capsys.readouterr().out and list(again) == list(found)
    assert again["four"] == found["four"]


@pytest.mark.long
def test_hybrid_search_learns_schedules_inside_of_choices(tmp_path, capsys):
    config = hybrid_search.Config(tiny=True, out=tmp_path)
    found = hybrid_search.main(config)
    assert [len(row["validation"]) for row in found.values()] == [3, 3]
    curve = found["schedules by gradient"]["validation"]
    assert curve[2] < curve[1] < curve[0] and (tmp_path / "hybrid.png").stat().st_size > 10_000
    assert "1 x 16, sgd" in capsys.readouterr().out


def run_of(values, **attributes):
    n = len(values)
    costs = {"seconds": np.arange(1.0, n + 1), "trainings": np.arange(1, n + 1), "hypergradients": np.zeros(n, int)}
    study = optuna.create_study()
    for i, value in enumerate(values):
        row = {k: v[i].item() for k, v in costs.items()} | {"test": 10.0 * value}
        study.add_trial(optuna.create_trial(value=value, user_attrs=row))
    for key, value in ({"steps": 5, "multiple": 4.0, "evaluated": n, "seed": 0} | attributes).items():
        study.set_user_attr(key, value)
    return _optuna_report.read(study)


def test_best_so_far_and_the_test_loss_that_belongs_to_it():
    run = run_of([3.0, 5.0, 2.0, 2.5])
    np.testing.assert_array_equal(run.value, [3, 3, 2, 2])
    np.testing.assert_array_equal(run.test, [30, 30, 20, 20])
    np.testing.assert_array_equal(run.at(run.seconds, [0.5, 1.0, 2.9, 3.0, 9.0], run.value), [3, 3, 3, 2, 2])


def test_the_verdict_says_who_is_lowest():
    def group(ours):
        names = {"TPE": [[3.0, 1.0]], "hg.optimize": [[3.0, ours]], "HypergradientSampler": [[3.0, 0.5]]}
        runs = {
            name: [run_of(v, task="four", method=name, title="t", budget=[2.0, 10.0]) for v in vs]
            for name, vs in names.items()
        }
        return _optuna_report.grouped("four", [run for rs in runs.values() for run in rs])

    for ours, said in ((0.75, "Both methods with gradients are below every"), (2.0, "HypergradientSampler is lowest")):
        found = _optuna_report.numbers(group(ours))
        assert f"After 2 seconds: {said}" in _optuna_report.verdict(found, group(ours))
        assert found["hg.optimize"]["seconds"]["value"] == [ours] * 3


def test_the_race_counts_trials_to_the_loss_of_tpe():
    runs = [
        run_of(values, task="race", method=method, seed=seed)
        for seed, tpe, ours in ((0, [3.0, 2.0], [4.0, 1.0, 0.5]), (1, [3.0, 1.0], [4.0, 3.0, 2.0]))
        for method, values in (("TPE", tpe), ("HypergradientSampler", ours))
    ]
    assert _optuna_report.raced(runs) == {"trials": [2, None], "of": 2, "at_most": 3}
    assert "comes to the same validation loss in 2 trials (quartiles 2 trials and more than 3 trials); in 1 of 2" in (
        _optuna_report._race_sentence(_optuna_report.raced(runs))
    )


def test_a_budget_is_spent_when_both_its_parts_are():
    budget = Budget(seconds=2.0, evaluations=100.0, multiple=4.0)
    for seconds, trainings, hypergradients, spent in (
        (3, 9, 0, False),
        (3, 10, 0, True),
        (1, 99, 0, False),
        (2, 0, 3, True),
    ):
        assert budget.spent(Evaluation(0.0, 0.0, seconds, trainings, hypergradients), steps=10) == spent
