"""A meta-loop that is killed and goes on has the history of one that is not; a folder of another run is refused by name."""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import some_of

import hypergrad as hg
from hypergrad import _folder_owner
from hypergrad._safe_files import sealed


HYPERS = {"a": hg.positive(jnp.array([0.5, 2.0])), "m": hg.unit_interval(0.3), "fixed": hg.fixed(0.25)}
STEPS = 6


def train_fn(hypers: Any, key: Any) -> Any:
    noise = 0.1 * jax.random.normal(key, 2)
    return jnp.sum((hypers["a"] - 1 + noise) ** 2) + hypers["m"] ** 2 + hypers["fixed"]


def run(folder: Any, meta_steps: int = STEPS, train_fn: Any = train_fn, hypers: Any = HYPERS, **options: Any) -> hg.Result:
    options = {"meta_optimizer": optax.adam(0.1), "val_fn": lambda x: x, **options}
    return hg.optimize(train_fn, hypers=hypers, meta_steps=meta_steps, checkpoint=folder, **options)


def plain(tree: Any) -> Any:
    """Leaves that compare, to the last digit: as text, so that NaN equals NaN."""
    return [repr(np.asarray(x).tolist()) for x in jax.tree.leaves(tree, is_leaf=lambda x: x is None)]


def assert_same(result: hg.Result, expected: hg.Result) -> None:
    assert len(result.history) == len(expected.history)
    for a, b in zip(result.history, expected.history, strict=True):
        assert plain(a._replace(seconds=0.0)) == plain(b._replace(seconds=0.0))
        assert jax.tree.structure(a.hypers) == jax.tree.structure(b.hypers)
    assert plain(result.hypers) == plain(expected.hypers)
    assert result.best.step == expected.best.step


@pytest.fixture(scope="module")
def uninterrupted() -> hg.Result:
    return run(None)


class Killed(BaseException):
    """Stands for the end of the process: nothing in the library catches it."""


def fail_at(count: int, before: bool) -> Callable[..., Any]:
    """Wrap a function so that its call number `count` dies before or after doing its work."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if before and calls == count:
                raise Killed
            value = function(*args, **kwargs)
            if calls == count:
                raise Killed
            return value

        return wrapped

    return wrap


# Beside the claim and the first run.json four files are written for each meta-step: hypers, point, old and new run.json.
FAULTS: dict[str, tuple[Any, str, bool]] = {
    "before a file": (_folder_owner.Owner, "_write", True),
    "before the data": (_folder_owner, "write_new", True),
    "before the data is safe": (os, "fsync", True),
    "before the look": (_folder_owner.Owner, "check", True),
    "before the rename": (os, "replace", True),
    "after the rename": (os, "replace", False),
    "before the old point goes": (pathlib.Path, "unlink", True),
}


@some_of("fault", FAULTS, "before a file", "before the rename", "before the old point goes")
def test_killed_while_writing(fault: str, tmp_path: pathlib.Path, uninterrupted: hg.Result) -> None:
    rng = np.random.default_rng(sum(fault.encode()))
    place, name, before = FAULTS[fault]
    deaths = 0
    for last in (1, 3, 8, 8, 16):
        with pytest.MonkeyPatch.context() as patch:
            forgotten = lambda self: _folder_owner._here.discard(self.token)  # noqa: E731
            patch.setattr(_folder_owner.Owner, "release", forgotten)  # who is killed releases nothing
            patch.setattr(place, name, fail_at(int(rng.integers(1, last + 1)), before)(getattr(place, name)))
            try:
                run(tmp_path, meta_steps=STEPS - 1)
            except Killed:
                deaths += 1
    assert deaths > 2
    assert_same(run(tmp_path), uninterrupted)
    names = {path.name for path in tmp_path.iterdir()}
    assert not [name for name in names if name.startswith(("owner-", "."))]
    points = sorted(name[:12] for name in names if name.startswith("point-"))
    assert {"point-000005", "point-000006"} <= set(points) and len(points) <= 4, points  # what was not committed goes later


def test_killed_while_compiling_and_in_a_callback(tmp_path: pathlib.Path, uninterrupted: hg.Result) -> None:
    def dies(hypers: Any, key: Any) -> Any:
        raise Killed

    def stops(done: hg.MetaStep) -> None:
        if done.step == 2:
            raise Killed

    for options in ({"train_fn": dies}, {"callbacks": [stops]}, {"train_fn": dies}):
        with pytest.raises(Killed):
            run(tmp_path, **options)
    assert_same(run(tmp_path), uninterrupted)


CHILD = """
import os, signal, sys
import test_checkpoint as t

def kill(done):
    if done.step == 3 and os.environ["DIE"] == "yes":
        os.kill(os.getpid(), signal.SIGKILL)

t.run(sys.argv[1], callbacks=[kill])
"""


@pytest.mark.long
def test_a_killed_process(tmp_path: pathlib.Path, uninterrupted: hg.Result) -> None:
    here = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent), "DIE": "yes"}
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], env=here, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert json.loads((tmp_path / "run.json").read_text())["steps"][-1]["step"] == 2
    assert_same(run(tmp_path), uninterrupted)


def test_a_finished_run_is_read_not_repeated_and_can_be_extended(tmp_path: pathlib.Path, uninterrupted: hg.Result) -> None:
    calls = []

    def counted(hypers: Any, key: Any) -> Any:
        calls.append(0)
        return train_fn(hypers, key)

    run(tmp_path, meta_steps=4)
    assert_same(run(tmp_path, meta_steps=4, train_fn=counted), run(None, meta_steps=4))
    assert not calls
    assert_same(run(tmp_path), uninterrupted)
    assert_same(run(tmp_path, meta_steps=2), run(None, meta_steps=2))


def test_what_a_callback_stopped_stays_stopped_until_extended(tmp_path: pathlib.Path) -> None:
    stop = {"callbacks": [lambda done: done.step == 1]}
    assert len(run(tmp_path, **stop).history) == 2
    with pytest.warns(UserWarning, match=f"a callback stopped this run after 2 of {STEPS} meta-steps"):
        assert len(run(tmp_path).history) == 2
    assert len(run(tmp_path, meta_steps=STEPS + 1).history) == STEPS + 1


def test_callbacks_go_on_where_they_were(tmp_path: pathlib.Path) -> None:
    lines = tmp_path / "history.jsonl"
    lines.write_text('{"step": 0, "value": left by a run that was killed')
    stopping = hg.callbacks.EarlyStopping(patience=2, tolerance=10.0)  # nothing is ever better by 10
    first = run(tmp_path / "run", meta_steps=2, callbacks=[hg.callbacks.JsonLines(lines), stopping])
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == [0, 1]
    lines.unlink()
    fresh = hg.callbacks.EarlyStopping(patience=2, tolerance=10.0)
    result = run(tmp_path / "run", callbacks=[hg.callbacks.JsonLines(lines), fresh])
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == [0, 1, 2]
    assert len(first.history) == 2
    assert len(result.history) == 3  # one had been waited for before


def test_training_runs_seeds_and_other_leaves_come_back(tmp_path: pathlib.Path) -> None:
    """Statuses, standard errors, failed seeds, NaN, bfloat16 hypers and a key in the meta-optimizer's state."""

    def trainer(hypers: Any, key: Any) -> Any:
        start = jax.random.normal(key, 3)
        rate = jnp.where(start[0] > 0.5, jnp.nan, hypers["rate"])  # some seeds diverge
        batches = hg.full_batch(jnp.arange(3.0))
        loss = lambda w, theta, x: jnp.sum((w - x * theta.astype(w.dtype)) ** 2)  # noqa: E731
        return hg.train(loss, start, hg.SGD(rate, 0.5), batches, theta=hypers["scale"], steps=4).params

    hypers = {"rate": hg.positive(0.1), "scale": jnp.ones(3, jnp.bfloat16)}
    options = {
        "train_fn": trainer, "val_fn": lambda w: jnp.sum(w**2), "hypers": hypers, "seeds_per_step": 4,
        "skip_nonfinite": True, "monitor_fn": lambda w: jnp.sum(jnp.abs(w)),
        "meta_optimizer": optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(3)), optax.adam(0.1)),
    }  # fmt: skip
    expected = run(None, meta_steps=4, **options)
    assert 0 < sum(done.failed_seeds for done in expected.history) < 16
    run(tmp_path, meta_steps=2, **options)
    resumed = run(tmp_path, meta_steps=4, **options)
    assert_same(resumed, expected)
    assert resumed.history[0].status.names == expected.history[0].status.names
    assert resumed.history[0].signal_to_noise == expected.history[0].signal_to_noise


def dict_of_another_order(hypers: dict[str, Any]) -> Any:
    return collections.OrderedDict(reversed(sorted(hypers.items())))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"meta_optimizer": optax.adam(0.2)}, "meta_optimizer updates differently"),
    "schedule": ({"meta_optimizer": optax.adam(optax.cosine_decay_schedule(0.1, 9))}, "meta_optimizer"),
    "rule": ({"meta_optimizer": optax.sgd(0.1)}, "another meta_optimizer: of its state, [0].count is int32[] there"),
    "key": ({"key": jax.random.key(1)}, "key is [0 0] there and [0 1] here"),
    "seeds": ({"seeds_per_step": 2}, "seeds_per_step is 1 there and 2 here"),
    "skip": ({"skip_nonfinite": True}, "skip_nonfinite is False there and True here"),
    "monitor": ({"monitor_fn": lambda x: x}, "monitor_fn is none there and given here"),
    "shape": ({"hypers": {**HYPERS, "a": hg.positive(jnp.ones(3))}}, "hypers['a'] is float32[2] in positive there"),
    "domain": ({"hypers": {**HYPERS, "m": hg.bounded(0.3, 0.0, 1.0)}}, "in bounded 0..1 here"),
    "tree": ({"hypers": {**HYPERS, "b": 1.0}}, "hypers['b'] is absent there and float32[] in the real line here"),
    "fixed": ({"hypers": {**HYPERS, "fixed": hg.fixed(0.5)}}, "fixed at 0.25 there and float32[] in fixed at 0.5 here"),
    "start": ({"hypers": {**HYPERS, "m": hg.unit_interval(0.4)}}, "it started from other values of hypers['m']"),
    "order": ({"hypers": dict_of_another_order(HYPERS)}, "the leaves of hypers are in another order, ['a'], ['"),
    "function": ({"train_fn": lambda h, key: 2 * train_fn(h, key)}, "train_fn, val_fn or their data are not those"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("begun")
    run(folder, meta_steps=2)
    return folder


@pytest.mark.parametrize("other", OTHERS)
def test_another_run_is_refused_by_name(other: str, begun: pathlib.Path) -> None:
    options, text = OTHERS[other]
    before = {path.name: path.read_bytes() for path in begun.iterdir()}
    with pytest.raises(ValueError, match="Pass another") as caught:
        run(begun, **options)
    assert text in str(caught.value)
    assert {path.name: path.read_bytes() for path in begun.iterdir()} == before


def rewritten(begun: pathlib.Path, to: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> pathlib.Path:
    """A copy of the folder with another `run.json`, that has its checksum."""
    for path in begun.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    record = json.loads((begun / "run.json").read_text())
    del record["sha256"]
    change(record)
    (to / "run.json").write_bytes(sealed(record))
    return to


def test_another_library_version_is_refused(begun: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = rewritten(begun, tmp_path, lambda record: record["identity"].update({"library version": "0.0.9"}))
    with pytest.raises(ValueError, match="library version is 0.0.9 there and .* here"):
        run(folder)


def test_another_place_is_a_warning_with_the_value_compared(begun: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def moved(record: dict[str, Any]) -> None:
        record["environment"].update({"jax": "0.9.9", "machine": "elsewhere"})
        record["update"] = "another program: optax and jax write it in their own way"

    folder = rewritten(begun, tmp_path, moved)
    with pytest.warns(UserWarning, match="had the value .* now; jax 0.9.9 there and .* here, machine elsewhere there"):
        result = run(folder)
    assert len(result.history) == STEPS


def test_a_folder_that_is_none_of_ours(begun: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = rewritten(begun, tmp_path, lambda record: None)
    (folder / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="run.json is not a record of hg.optimize. Pass another `checkpoint` folder"):
        run(folder)
    with pytest.raises(ValueError, match="`checkpoint` must be a folder; .* is a file"):
        run(folder / "run.json")


def test_restarts_keep_a_folder_each(tmp_path: pathlib.Path) -> None:
    starts = [HYPERS, hg.scatter(HYPERS, jax.random.key(1))]
    options = {"meta_optimizer": optax.adam(0.1), "checkpoint": tmp_path}
    first = hg.restarts(train_fn, lambda x: x, starts, meta_steps=2, **options)
    again = hg.restarts(train_fn, lambda x: x, starts, meta_steps=3, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start-0", "start-1"]
    for a, b in zip(again, first, strict=True):
        assert a.history[0].value == b.history[0].value
