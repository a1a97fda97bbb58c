"""The report of `optuna_comparison`: curves, tables and sentences, of the storage alone."""

import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import optuna

from experiments import _comparison_plots, _plots, _record, report
from experiments._comparison_methods import METHODS


MARK = "<!-- comparison -->"
GRADIENTS = ("hg.optimize", "HypergradientSampler")


class Run(NamedTuple):
    """One method from one seed: arrays over its evaluations; value and test of the best so far."""

    value: np.ndarray
    test: np.ndarray
    seconds: np.ndarray
    trainings: np.ndarray
    hypergradients: np.ndarray
    numbers: np.ndarray  # of the trial, from 1
    attributes: dict[str, Any]

    def at(self, cost: np.ndarray, limits: Sequence[float], what: np.ndarray) -> np.ndarray:
        """`what` when so much was spent; the first evaluation stands for what came before it."""
        return what[np.maximum(np.searchsorted(cost, limits, side="right") - 1, 0)]


class Group(NamedTuple):
    """A task: its runs by method, budgets, and the multiple of a hypergradient."""

    title: str
    runs: dict[str, list[Run]]
    budgets: dict[str, float]
    multiple: float

    def cost(self, run: Run, axis: str) -> np.ndarray:
        work = run.attributes["steps"] * (run.trainings + self.multiple * run.hypergradients)
        return run.seconds if axis == "seconds" else work

    def curves(self, method: str, axis: str, limits: Sequence[float], what: str) -> np.ndarray:
        """[seeds, limits]"""
        return np.array([run.at(self.cost(run, axis), limits, getattr(run, what)) for run in self.runs[method]])


def write(storage: optuna.storages.BaseStorage, out: pathlib.Path, docs: pathlib.Path) -> dict[str, Any]:
    """Pictures beside the storage and in docs/images, the page's part below MARK. Returns the numbers of the tables."""
    runs = _loaded(storage)
    groups = {task: grouped(task, runs) for task in METHODS if any(run.attributes["task"] == task for run in runs)}
    race = raced([run for run in runs if run.attributes["task"] == "race"])
    found: dict[str, Any] = {task: numbers(group) for task, group in groups.items()} | {"race": race}
    figures = {task: _comparison_plots.figure(group) for task, group in groups.items()}
    pictures = _plots.save(out, figures)
    parts = [MARK, "## Against Optuna's samplers", *_introduction(groups)]
    for (task, group), picture in zip(groups.items(), pictures, strict=True):
        target = docs / "images" / f"optuna_comparison-{task}.png"
        report.copy_small(picture.path, target, 900)
        parts += [f"### {group.title[0].upper()}{group.title[1:]}", verdict(found[task], group)]
        parts += [_table(found[task], group), f"![{picture.caption}](images/{target.name})\n\n*{picture.caption}*"]
    parts += ["### A race to what TPE finds", _race_sentence(race)] if race else []
    parts.append(_provenance(runs))
    page = docs / "optuna.md"
    before = page.read_text().partition(MARK)[0].rstrip() if page.exists() else "# Optuna"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join([before, *parts]) + "\n")
    for task in groups:
        print(re.sub(r"[|`]", " ", verdict(found[task], groups[task])))
    print(f"{_race_sentence(race) if race else ''}\nwrote {page} and {', '.join(p.path.name for p in pictures)}")
    return found


def _loaded(storage: optuna.storages.BaseStorage) -> list[Run]:
    names = optuna.get_all_study_names(storage)
    studies = [optuna.load_study(study_name=name, storage=storage) for name in names]
    return [read(study) for study in studies if study.user_attrs.get("complete")]


def read(study: optuna.Study) -> Run:
    trials = study.get_trials(deepcopy=False)
    columns = {k: np.array([t.user_attrs[k] for t in trials]) for k in ("test", "seconds", "trainings", "hypergradients")}
    value = np.array([trial.value for trial in trials])
    best = np.maximum.accumulate(np.where(value <= np.minimum.accumulate(value), np.arange(len(value)), 0))
    numbers_ = columns["trainings"] + columns["hypergradients"]
    columns["test"] = columns["test"][best]
    return Run(value[best], **columns, numbers=numbers_, attributes=study.user_attrs)


def grouped(task: str, runs: list[Run]) -> Group:
    mine = [run for run in runs if run.attributes["task"] == task]
    by_method = {method: [run for run in mine if run.attributes["method"] == method] for method in METHODS[task]}
    multiple = float(np.median([run.attributes["multiple"] for run in mine]))
    first = Group(mine[0].attributes["title"], {k: v for k, v in by_method.items() if v}, {}, multiple)
    # What all have spent: the budgets, or a little less where the multiple of a run was another.
    ends = {axis: min(first.cost(run, axis)[-1] for run in mine) for axis in ("seconds", "evaluations")}
    given = dict(zip(ends, mine[0].attributes["budget"], strict=True))
    return first._replace(budgets={axis: min(given[axis] or end, end) for axis, end in ends.items()})


def numbers(group: Group) -> dict[str, Any]:
    """{method: {axis: {"value", "test": [25%, median, 75%]}, "evaluated": median number of evaluations}}"""
    found: dict[str, Any] = {}
    for method, runs in group.runs.items():
        found[method] = {"evaluated": float(np.median([run.attributes["evaluated"] for run in runs]))}
        for axis, limit in group.budgets.items():
            found[method][axis] = {
                what: np.percentile(group.curves(method, axis, [limit], what)[:, 0], [25, 50, 75]).tolist()
                for what in ("value", "test")
            }
    return found


def verdict(found: dict[str, Any], group: Group) -> str:
    """Who is lowest, and whether the methods with gradients are below all others."""
    sentences = []
    for axis, said in (("seconds", "seconds"), ("evaluations", "gradient evaluations")):
        medians = sorted((found[method][axis]["value"][1], method) for method in found)
        others = [(value, method) for value, method in medians if method not in GRADIENTS]
        ours = [(value, method) for value, method in medians if method in GRADIENTS]
        order = ", ".join(f"{method} {value:.4f}" for value, method in medians)
        if not ours or not others:
            continue
        all_below = ours[-1][0] < others[0][0]
        what = "Both methods with gradients are below every sampler without" if all_below else f"{medians[0][1]} is lowest"
        limit = f"{group.budgets[axis]:,.0f} {said}" if axis != "seconds" else f"{group.budgets[axis]:.3g} seconds"
        sentences.append(f"After {limit}: {what} (median validation losses: {order}).")
    return " ".join(sentences)


def raced(runs: list[Run]) -> dict[str, Any]:
    """Trials to the loss of TPE's last trial, by seed; None where it was not reached."""
    by_seed: dict[int, dict[str, Run]] = {}
    for run in runs:
        by_seed.setdefault(run.attributes["seed"], {})[run.attributes["method"]] = run
    pairs = {seed: pair for seed, pair in sorted(by_seed.items()) if len(pair) == 2}
    if not pairs:
        return {}
    reached = []
    for pair in pairs.values():
        theirs, ours = pair["TPE"], pair["HypergradientSampler"]
        there = np.flatnonzero(ours.value <= theirs.value[-1])
        reached.append(int(ours.numbers[there[0]]) if there.size else None)
    return {
        "trials": reached, "of": next(iter(pairs.values()))["TPE"].attributes["evaluated"],
        "at_most": next(iter(pairs.values()))["HypergradientSampler"].attributes["evaluated"],
    }  # fmt: skip


def _race_sentence(race: dict[str, Any]) -> str:
    counts = np.array([np.inf if n is None else n for n in race["trials"]])
    low, median, high = (_trials(x, race) for x in np.percentile(counts, [25, 50, 75], method="inverted_cdf"))
    wins = int(np.sum(counts <= race["of"]))
    return (
        f"Four hyperparameters, no start given, {len(counts)} seeds: TPE has {race['of']} trials, and "
        f"`hg.studies.HypergradientSampler` comes to the same validation loss in {median} (quartiles {low} and {high}); "
        f"in {wins} of {len(counts)} seeds within {race['of']}. One of its trials costs a hypergradient, one of TPE's a "
        "training."
    )


def _trials(count: float, race: dict[str, Any]) -> str:
    return f"{count:.0f} trials" if np.isfinite(count) else f"more than {race['at_most']} trials"


def _introduction(groups: dict[str, Group]) -> list[str]:
    each = "; ".join(
        f"{group.title}: {group.budgets['seconds']:.3g} s and {group.budgets['evaluations']:,.0f} gradient evaluations, a "
        f"hypergradient counting as {group.multiple:.2f} trainings" for group in groups.values()
    )  # fmt: skip
    seeds = max((len(runs) for group in groups.values() for runs in group.runs.values()), default=0)
    return [
        f"`python -m experiments.optuna_comparison` runs each method from the same start, {seeds} seeds, one core each, "
        "and writes this part of the page from its storage. A seed decides on the initial weights and batches of all "
        "trainings, and on what a sampler draws. Test images are looked at, never chosen by: the test loss is that of the "
        f"training with the lowest validation loss so far. Budgets: {each}. Compilation is not on the clock. Both methods "
        "with gradients descend by `optax.adam(0.1)`; other samplers are as Optuna has them, CMA-ES from the start and "
        "separable where there are more than 100 numbers."
    ]


def _table(found: dict[str, Any], group: Group) -> str:
    lines = [
        "| method | evaluations | validation, equal seconds | test | validation, equal gradients | test |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method, row in found.items():
        cells = [_shown(row[axis][what]) for axis in ("seconds", "evaluations") for what in ("value", "test")]
        name = f"`{method}`" if method in GRADIENTS else method
        lines.append(f"| {name} | {row['evaluated']:,.0f} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Medians over seeds, quartiles in brackets; nats."])


def _shown(quartiles: list[float]) -> str:
    low, median, high = quartiles
    return f"{median:.4f} [{low:.4f}, {high:.4f}]"


def _provenance(runs: list[Run]) -> str:
    a = runs[0].attributes
    return f"jax {a['jax']}, Optuna {a['optuna']}, {a['device']}; {_record.shown(len(runs))} runs."
