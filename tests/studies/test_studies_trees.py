"""Trees in a trial, meta-steps as trials, errors as pruned trials."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optuna
import pytest
from covering import some_of
from optuna.trial import TrialState

import hypergrad as hg
from hypergrad.studies import _marks


optuna.logging.set_verbosity(optuna.logging.ERROR)

HYPERS = {
    "rate": hg.positive(hg.PerStep(np.full(5, 0.2, np.float32))),
    "penalty": {"a": hg.bounded(np.full((2, 3), 0.5, np.float32), 0.0, 2.0), "b": np.float32(-1.0)},
    "seed": hg.fixed(7),
}


def distance(hypers):
    """Lowest at rates of 1, penalties of 1, b = 0."""
    h = hg.natural(hypers)
    return jnp.sum(jnp.log(h["rate"].values) ** 2) + jnp.sum((h["penalty"]["a"] - 1) ** 2) + h["penalty"]["b"] ** 2


def objective(trial):
    hypers = hg.studies.suggest_tree(trial, HYPERS)
    value, grads = jax.value_and_grad(distance, allow_int=True)(hypers)
    hg.studies.report_gradient(trial, grads)
    return float(value)


def sampler(**options):
    return hg.studies.HypergradientSampler(**{"seed": 0, "meta_optimizer": optax.adam(0.2), **options})


def assert_same(a, b, rtol=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-5), a, b)


def test_a_tree_follows_its_gradient():
    """The other road: the same meta-optimizer on the tree itself."""
    study = optuna.create_study(sampler=sampler())
    study.optimize(objective, n_trials=6)
    assert [_marks.read_link(t).step for t in study.trials] == list(range(6))
    learned, rule = {k: HYPERS[k] for k in ("rate", "penalty")}, optax.adam(0.2)
    state = rule.init(learned)
    for trial in study.trials:
        there = hg.studies.suggest_tree(trial, HYPERS)
        assert_same({k: there[k] for k in learned}, learned, rtol=1e-4)
        assert there["seed"].natural() == 7
        update, state = rule.update(jax.grad(distance)(learned), state)
        learned = optax.apply_updates(learned, update)
    assert study.best_value < 0.8 * study.trials[0].value


def test_the_first_trial_tries_the_values_given_and_another_start_others():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    trials = [study.ask() for _ in range(3)]
    first, second, third = (hg.studies.suggest_tree(trial, HYPERS) for trial in trials)
    assert_same(first, HYPERS)
    assert not np.allclose(second["rate"].unconstrained.values, third["rate"].unconstrained.values)
    assert_same(second, hg.studies.suggest_tree(trials[1], HYPERS))  # asked again
    assert second["rate"].unconstrained.values.dtype == jnp.float32 and second["seed"].natural() == 7


def test_values_types_and_shapes_come_back_from_a_file(tmp_path):
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    study = optuna.create_study(study_name="s", storage=storage, sampler=sampler())
    with jax.enable_x64(True):
        hypers = {"many": hg.positive(jnp.linspace(0.1, 1, 7_850).reshape(785, 10)), "one": jnp.asarray(2, jnp.bfloat16)}
        hg.studies.suggest_tree(study.ask(), hypers)
        study.tell(0, 1.0)
        other = optuna.load_study(study_name="s", storage=storage).trials[0]
        again = hg.studies.suggest_tree(other, jax.tree.map(jnp.zeros_like, hypers))
        assert [x.dtype for x in jax.tree.leaves(again)] == [jnp.float64, jnp.bfloat16]
        for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(hypers), strict=True):
            assert bool((x == y).all())


def test_single_precision_penalties_of_every_weight_fit_into_a_column_of_text():
    rng = np.random.default_rng(0)
    study = optuna.create_study()
    trial = study.ask()
    hg.studies.suggest_tree(trial, {"l2": rng.normal(size=7_850).astype(np.float32)})
    hg.studies.report_gradient(trial, {"l2": rng.normal(size=7_850).astype(np.float32)})
    for mark in study.trials[0].system_attrs.values():
        assert len(str(mark)) < 2**16  # MySQL's


def test_a_tree_beside_numbers_and_choices():
    study = optuna.create_study(sampler=sampler())

    def mixed(trial):
        hypers = hg.studies.suggest_tree(trial, HYPERS)
        depth, shift = trial.suggest_int("depth", 1, 3), trial.suggest_float("shift", -1.0, 1.0)
        value, grads = jax.value_and_grad(distance, allow_int=True)(hypers)
        hg.studies.report_gradient(trial, {**grads, "shift": 2 * shift})
        return float(value) + shift**2 + depth

    study.optimize(mixed, n_trials=14)
    for trial in study.trials:
        link = _marks.read_link(trial)
        if link.step > 0:
            parent = study.trials[link.parent]
            assert trial.params["depth"] == parent.params["depth"] and trial.params["shift"] != parent.params["shift"]
            assert (_marks.read_tree(trial.system_attrs).elements != _marks.read_tree(parent.system_attrs).elements).all()
    assert {_marks.read_link(t).step for t in study.trials} >= {0, 1, 2, 3}


def test_a_tree_of_another_shape_begins_anew():
    study = optuna.create_study(sampler=sampler())
    study.optimize(objective, n_trials=3)
    trial = study.ask()
    longer = {**HYPERS, "rate": hg.positive(hg.PerStep(np.full(6, 0.2, np.float32)))}
    with pytest.warns(UserWarning, match=r"float32\[5\] in positive at \['rate'\] there, float32\[6\] in positive here"):
        assert_same(hg.studies.suggest_tree(trial, longer), longer)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda g: {**g, "rate": hg.positive(np.ones(3, np.float32))}, r"has float32\[5\] in positive at \['rate'\], its"),
        (lambda g: {"rate": g["rate"]}, r"at \['penalty'\]\['a'\], its gradient nothing"),
        (
            lambda g: jax.tree.map(lambda x: np.nan * x, g),
            "it is NaN, or beyond the range of float32, in the tree",
        ),
    ],
    ids=["shape", "part", "nan"],
)
def test_a_gradient_that_does_not_fit_is_ignored(change, problem):
    study = optuna.create_study(sampler=sampler())
    trial = study.ask()
    hypers = hg.studies.suggest_tree(trial, {k: HYPERS[k] for k in ("rate", "penalty")})
    with pytest.warns(UserWarning, match=f"trial 0: its gradient is ignored: .*{problem}") as caught:
        hg.studies.report_gradient(trial, change(jax.grad(distance)(hypers)))
    assert len(caught) == 1
    study.tell(trial, 1.0)
    assert _marks.read_gradient(study.trials[0]) is None


def test_reports_of_one_trial_add_up() -> None:
    study = optuna.create_study(sampler=sampler())
    trial = study.ask()
    rates = hg.studies.suggest_tree(trial, {"rate": hg.positive(np.full(3, 0.5, np.float32))})
    for name in ("a", "b"):
        trial.suggest_float(name, 0.0, 1.0)
    for grads in ({"a": 1.0}, rates, {"b": 3.0}, {"a": 2.0}):
        hg.studies.report_gradient(trial, grads)
    study.tell(trial, 1.0)
    found = _marks.read_gradient(study.trials[0])
    assert dict(zip(found.names, found.numbers, strict=True)) == {"a": 2.0, "b": 3.0}
    np.testing.assert_allclose(found.tree, np.log(0.5), rtol=1e-6)


def test_a_name_of_a_number_and_of_a_key_of_the_tree_is_an_error() -> None:
    trial = optuna.create_study().ask()
    hg.studies.suggest_tree(trial, HYPERS)
    trial.suggest_float("rate", 0.0, 1.0)
    with pytest.raises(ValueError, match="'rate' is a number that trial 0 suggested and a key of its tree"):
        hg.studies.report_gradient(trial, {"rate": 1.0})


def test_a_key_that_is_neither_in_the_tree_nor_suggested_is_an_error():
    trial = optuna.create_study().ask()
    hg.studies.suggest_tree(trial, HYPERS)
    with pytest.raises(ValueError, match=r"trial 0 suggested no 'decay'; it suggested no number and a tree"):
        hg.studies.report_gradient(trial, {"decay": 1.0})


def test_a_bare_tree_and_a_trial_without_a_study():
    rates = hg.positive(np.full(3, 0.5, np.float32))
    assert_same(hg.studies.suggest_tree(optuna.trial.FixedTrial({}), rates), rates)
    study = optuna.create_study(sampler=sampler())
    trial = study.ask()
    hg.studies.report_gradient(trial, hg.studies.suggest_tree(trial, rates))
    study.tell(trial, 1.0)
    np.testing.assert_allclose(_marks.read_gradient(study.trials[0]).tree, np.log(0.5), rtol=1e-6)


def train_fn(hypers, key):
    params = {"w": jnp.array([2.0, -1.0]) * hypers["scale"]}
    return hg.train(bowl, params, hg.SGD(hypers["rate"], 0.9), hg.full_batch(jnp.ones(2)), steps=3).params


def bowl(params, theta, batch):
    return jnp.sum((params["w"] - batch) ** 2) / 2


def val_fn(params):
    return jnp.sum((params["w"] - 1) ** 2)


def test_meta_steps_become_trials(tmp_path):
    study = optuna.create_study()
    hypers = {"rate": hg.positive(hg.PerStep(jnp.full(3, 0.1))), "scale": hg.positive(2.0)}
    options = {"checkpoint": tmp_path / "run", "callbacks": [hg.studies.RecordTrials(study, evaluations=12)]}
    result = hg.optimize(train_fn, val_fn, hypers, meta_steps=2, **options)
    hg.optimize(train_fn, val_fn, hypers, meta_steps=3, **options)  # goes on
    assert [t.value for t in study.trials][:2] == [done.value for done in result.history]
    assert [(t.user_attrs["run"], t.user_attrs["meta_step"]) for t in study.trials] == [(0, 0), (0, 1), (0, 2)]
    first = study.trials[0].user_attrs
    assert first["certificate"] == "exact" and first["gradient_evaluations"] == 12 and first["seconds"] > 0
    assert first["hypers"] == {"['scale']": pytest.approx(2.0)} and first["bits_per_parameter_step"] > 0
    assert set(first) == {
        "run", "meta_step", "seconds", "gradient_norm", "gradient_evaluations", "certificate",
        "bits_per_parameter_step", "hypers", "checkpoint",
    }  # fmt: skip


def diverging(trial):
    rate = trial.suggest_float("rate", 0.1, 1e9, log=True)
    return float(hg.train(bowl, {"w": jnp.ones(2)}, hg.SGD(rate, 0.9), hg.full_batch(jnp.zeros(2)), steps=3).losses[-1])


@some_of("compiled", [False, True], True)
def test_training_that_fails_is_pruned(compiled):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({"rate": 0.5})
    study.enqueue_trial({"rate": 1e9})
    study.optimize(hg.studies.prune_on_error(compiled_run if compiled else diverging), n_trials=2)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert study.trials[1].user_attrs["error"].startswith("params['w'] left the range of its fixed-point grid at step")


@jax.jit
def losses(rate):
    return hg.train(bowl, {"w": jnp.ones(2)}, hg.SGD(rate, 0.9), hg.full_batch(jnp.zeros(2)), steps=3).losses


def compiled_run(trial):
    return float(losses(trial.suggest_float("rate", 0.1, 1e9, log=True))[-1])


def test_other_errors_are_not_pruned():
    study = optuna.create_study()

    def wrong(trial):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError):
        study.optimize(hg.studies.prune_on_error(wrong), n_trials=1)
    assert hg.studies.prune_on_error(wrong).__name__ == "wrong"


@pytest.mark.parametrize("other", ["dict", "ordered otherwise"])
def test_the_order_of_a_mapping_says_nothing_of_its_leaves(other: str) -> None:
    """JAX sorts the keys of a dict, and keeps the order of an `OrderedDict`."""
    Ordered = collections.OrderedDict
    start = Ordered([("rate", jnp.float32(0.0)), ("decay", jnp.float32(0.5))])
    same = dict(start) if other == "dict" else Ordered(reversed(start.items()))
    study = optuna.create_study(sampler=hg.studies.HypergradientSampler(seed=0, meta_optimizer=optax.sgd(0.1)))

    def objective(trial: Any) -> float:
        h = hg.studies.suggest_tree(trial, start if trial.number < 2 else same)
        value, grads = jax.value_and_grad(lambda h: (h["rate"] - 1) ** 2 + (h["decay"] + 1) ** 2 / 2)(h)
        hg.studies.report_gradient(trial, grads)
        return float(value)

    study.optimize(objective, n_trials=4)
    rates, decays = [0.2 * sum(0.8**k for k in range(i)) for i in range(4)], [1.5 * 0.9**i - 1 for i in range(4)]
    assert study.trials[0].value == pytest.approx(2.125)
    for i, trial in enumerate(study.trials):
        for like in (start, same):
            found = hg.studies.suggest_tree(trial, like)
            assert (float(found["rate"]), float(found["decay"])) == pytest.approx((rates[i], decays[i]), abs=1e-6)
