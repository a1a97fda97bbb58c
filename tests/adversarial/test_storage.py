"""What other processes wrote into a study is looked at before it is used: a mark that is none counts as absent, and is told
once; nothing inflates beyond what is known to be needed."""

import base64
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optuna
import pytest

import hypergrad as hg
from hypergrad.studies import _marks


optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial: Any) -> float:
    x, y = trial.suggest_float("x", -5, 5), trial.suggest_float("y", -5, 5)
    hg.studies.report_gradient(trial, {"x": 2 * (x - 1), "y": 2 * (y + 2)})
    return (x - 1) ** 2 + (y + 2) ** 2


TREE = {"a": hg.positive(jnp.array([0.5, 2.0])), "b": jnp.zeros((2, 3))}


def with_tree(trial: Any) -> float:
    tree = hg.studies.suggest_tree(trial, TREE)
    hg.studies.report_gradient(trial, {"a": hg.positive(jnp.ones(2)), "b": 2 * tree["b"]})
    return float(jnp.sum(tree["b"] ** 2) + jnp.sum(hg.natural(tree)["a"]))


def study_of(objective: Callable[[Any], float], trials: int = 6) -> optuna.Study:
    study = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0))
    study.optimize(objective, n_trials=trials)
    return study


def tampered(study: optuna.Study, key: str, change: Callable[[Any], Any]) -> None:
    """As another writer to the same storage would."""
    for trial in study.trials:
        attributes = study._storage._get_trial(trial._trial_id).system_attrs  # type: ignore[attr-defined]
        if key in attributes:
            attributes[key] = change(attributes[key])


def packed(values: Any, dtype: str = "<f4") -> str:
    return _marks.packed(np.asarray(values, dtype))


def bomb(megabytes: int) -> str:
    compressor = zlib.compressobj(9)
    parts = [compressor.compress(bytes(2**20)) for _ in range(megabytes)]
    return base64.b85encode(b"".join([*parts, compressor.flush()])).decode()


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


MORE = base64.b85encode(zlib.compress(bytes(8)) + b"more").decode()


def having(**change: Any) -> Callable[[Any], Any]:
    return lambda mark: {**mark, **change}


def lacking(name: str) -> Callable[[Any], Any]:
    return lambda mark: {k: v for k, v in mark.items() if k != name}


GRADIENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "too many": (having(values=packed(np.zeros(7))), "its values are not 2 numbers"),
    "too few": (having(values=packed([1.0])), "its values are not 2 numbers"),
    "half a number": (having(values=_marks.packed(np.zeros(7, "u1"))), "its values"),
    "NaN": (having(values=packed([np.nan, 0])), "its values are not finite"),
    "infinite": (having(values=packed([np.inf, 0])), "its values are not finite"),
    "cut off": (lambda mark: {**mark, "values": mark["values"][:-5]}, "its values"),
    "not compressed": (having(values="0123456789"), "its values cannot be read"),
    "no base85": (having(values='"'), "its values cannot be read"),
    "a number": (having(values=3), r"it\['values'\] is 3"),
    "a bomb": (having(values=bomb(40)), "its values are not 2 numbers"),
    "no values": (lacking("values"), "it lacks 'values'"),
    "no names": (lacking("names"), "it lacks 'names'"),
    "names of another type": (having(names=[1, 2]), r"it\['names'\] is \[1, 2\]"),
    "a name twice": (having(names=["x", "x"]), r"it\['names'\] is \['x', 'x'\]"),
    "names as text": (having(names="xy"), r"it\['names'\] is 'xy'"),
    "nested": (having(names=nested(200)), r"it\['names'\] is \["),
    "more": (having(more=1), "it has a strange entry 'more'"),
    "format as text": (having(format="1"), "another version .*format '1'"),
    "no mapping": (lambda mark: [mark], "another version"),
    "huge format": (having(format=10**30), "another version"),
    "format too long to print": (having(format=10**5000), "another version .*too long to print"),
    "a number too long to print": (having(values=10**5000), r"it\['values'\] is int with an integer too long to print"),
    "more after the end": (having(values=MORE), "its values are not 2 numbers"),
}


@pytest.mark.parametrize("way", GRADIENTS)
def test_a_gradient_that_is_none_counts_as_absent(way: str) -> None:
    change, told = GRADIENTS[way]
    study = study_of(objective)
    tampered(study, _marks.GRADIENT, change)
    with pytest.warns(UserWarning, match=told) as caught:
        study.optimize(objective, n_trials=3)
    assert len(caught) == 1 and "count as plain ones" in str(caught[0].message)
    assert len(study.trials) == 9
    assert all(_marks.read_gradient(trial) is None for trial in study.trials[:6])


@pytest.mark.long
def test_a_bomb_takes_no_memory() -> None:
    study = study_of(objective)
    text = bomb(200)
    tampered(study, _marks.GRADIENT, having(values=text))
    tracemalloc.start()
    with pytest.warns(UserWarning, match="its values are not 2 numbers"):
        study.optimize(objective, n_trials=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_a_bomb_as_long_as_honest_values_inflates_to_their_length() -> None:
    text, length = bomb(200), 25_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="its values are not 25000 numbers"):
        _marks.unpacked(text, "<f4", [length])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(text) < 3 * 4 * length and peak < 2**24


def test_a_long_text_is_not_even_decoded() -> None:
    """base85 takes ten times its length to decode."""
    study = study_of(objective)
    tampered(study, _marks.GRADIENT, having(values="0" * 10**7))
    tracemalloc.start()
    with pytest.warns(UserWarning, match="its values are not 2 numbers"):
        study.optimize(objective, n_trials=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


def test_marks_are_unpacked_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each trial of a long study would wait for all trials before it."""
    study = study_of(objective, 1)
    (trial,) = study.trials
    marks = [having(values=packed([i, 1]))(trial.system_attrs[_marks.GRADIENT]) for i in range(5000)]
    attributes = [{_marks.GRADIENT: mark} for mark in marks]
    assert all(_marks._read(a, _marks.GRADIENT) for a in attributes)
    monkeypatch.setattr(_marks, "unpacked", None)
    assert all(_marks._read(a, _marks.GRADIENT) for a in attributes)


@pytest.mark.parametrize("size", [0, 1, 2, 100, 10_000])
@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_what_does_not_compress_is_no_long_text(size: int, dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=size).astype(dtype)
    np.testing.assert_array_equal(_marks.unpacked(_marks.packed(values), dtype, [size]), values)


def test_each_study_is_told_of_once_and_formats_together() -> None:
    sampler = hg.studies.HypergradientSampler(seed=0)
    for _ in range(2):
        study = optuna.create_study(sampler=sampler)
        study.optimize(objective, n_trials=5)
        formats = iter(range(2, 7))
        tampered(study, _marks.GRADIENT, lambda mark, formats=formats: {**mark, "format": next(formats)})
        with pytest.warns(UserWarning, match=r"another version of hypergrad wrote them \(format 2, here 1\)") as caught:
            study.optimize(objective, n_trials=2)
        assert len(caught) == 1


LINKS: dict[str, Callable[[Any], Any]] = {
    "text": having(step="1"),
    "negative": having(step=-1),
    "truth": having(chain=True),
    "huge": having(chain=10**30),
    "a fraction": having(parent=0.5),
    "no chain": lacking("chain"),
    "no trial": lacking("trial"),
}


@pytest.mark.parametrize("way", LINKS)
def test_a_link_that_is_none_counts_as_absent(way: str) -> None:
    study = study_of(objective)
    tampered(study, _marks.LINK, LINKS[way])
    with pytest.warns(UserWarning, match="cannot be used: of the link of trial 0, it") as caught:
        study.optimize(objective, n_trials=3)
    assert len(caught) == 1 and len(study.trials) == 9


@pytest.mark.parametrize("link", [(99, 4, 98), (0, 7, 3), (5, 2**31 - 1, None)], ids=str)
def test_a_link_to_what_is_not_there_leads_to_the_inner_sampler(link: Any) -> None:
    """Of its form: it was taken over from another study, say."""
    study = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0))
    study.enqueue_trial({})
    (waiting,) = study.get_trials(deepcopy=False)
    chain, step, parent = link
    mark = {"format": 1, "chain": chain, "step": step, "parent": parent, "trial": 77}
    study._storage.set_trial_system_attr(waiting._trial_id, _marks.LINK, mark)
    study.optimize(objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2


TREES: dict[str, Callable[[Any], Any]] = {
    "elements missing": having(values=packed(np.zeros(3))),
    "elements NaN": having(values=packed(np.full(8, np.nan))),
    "a bomb": having(values=bomb(40)),
    "another type": having(dtype="<U9999999"),
    "objects": having(dtype="O"),
    "an array": having(dtype=np.array(["<f4", "<f8"])),
    "a list": having(dtype=["<f4"]),
    "no leaves": lacking("leaves"),
    "leaves as a list": having(leaves=["float32[8] in positive"]),
    "leaves of no shape": having(leaves={"hypers['a']": "float32 in positive"}),
    "leaves as large as the sea": having(leaves={"hypers['a']": "float32[1000000, 1000000] in positive"}),
    "a number as a leaf": having(leaves={"hypers['a']": 8}),
    "a shape without commas": having(leaves={"hypers['a']": "float32[2 4] in positive"}),
    "a shape of commas": having(leaves={"hypers['a']": "float32[,,] in positive"}),
    "a shape too long to read": having(leaves={"hypers['a']": f"float32[{'9' * 5000}] in positive"}),
}


@pytest.mark.parametrize("way", TREES)
def test_a_tree_that_is_none_counts_as_absent(way: str) -> None:
    study = study_of(with_tree)
    tampered(study, _marks.TREE, TREES[way])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study.optimize(with_tree, n_trials=3)
    told = [str(w.message) for w in caught]
    # Its gradient has then too many numbers, and is none either.
    assert sorted(text.split("of the ")[1].split()[0] for text in told) == ["gradient", "tree"]
    assert all(_marks.read_tree(trial.system_attrs) is None for trial in study.trials[:6])
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 9


def test_the_tree_of_a_finished_trial_that_is_none_is_not_passed_over_in_silence() -> None:
    study = study_of(with_tree)
    tampered(study, _marks.TREE, TREES["elements missing"])
    with pytest.warns(UserWarning, match=r"`hypers` are given back as they are: of the tree of trial 2, its values are"):
        assert hg.studies.suggest_tree(study.trials[2], TREE) is not None


def test_a_tree_that_could_not_be_read_again_is_not_written() -> None:
    study = optuna.create_study()
    with pytest.raises(ValueError, match="a tree of 16,777,217 numbers is too large for a study, which takes 16,777,216"):
        hg.studies.suggest_tree(study.ask(), {"a": np.zeros(2**24 + 1, np.float32)})


def test_marks_that_are_right_stay_so() -> None:
    study = study_of(with_tree)
    assert _marks.unusable(study.trials) == {}
    gradients = [_marks.read_gradient(trial) for trial in study.trials]
    assert all(g is not None and g.tree.size == 8 and g.names == () for g in gradients)
