"""Chains of trials: they follow the meta-optimizer, live in the storage alone, and survive workers that die or lag."""

import datetime
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

import hypergrad as hg
from hypergrad.studies import _chains, _descent, _marks


optuna.logging.set_verbosity(optuna.logging.ERROR)

RATE = FloatDistribution(1e-3, 10.0, log=True)
SHIFT = FloatDistribution(-1.0, 3.0)


@pytest.fixture(autouse=True)
def without_exploration(monkeypatch):
    """One chain after the other."""
    monkeypatch.setattr(_chains, "EXPLORATION", 10**6)


def valley(rate, shift):
    return (jnp.log(rate) + 1) ** 2 + (shift - 0.5) ** 2 + jnp.log(rate) * shift


def objective(trial):
    rate, shift = trial.suggest_float("rate", 1e-3, 10.0, log=True), trial.suggest_float("shift", -1.0, 3.0)
    with jax.enable_x64(True):
        value, grads = jax.value_and_grad(valley, argnums=(0, 1))(rate, shift)
    hg.studies.report_gradient(trial, {"rate": grads[0], "shift": grads[1]})
    return float(value)


def sampler(**options):
    return hg.studies.HypergradientSampler(**{"seed": 0, **options})


def started(start=None, **options):
    study = optuna.create_study(sampler=sampler(**options))
    study.enqueue_trial(start or {"rate": 2.0, "shift": 1.5})
    return study


def links(study):
    return [_marks.read_link(trial) for trial in study.trials]


def test_a_chain_is_the_meta_optimizer_in_unconstrained_coordinates():
    """The other road: optax on the valley written in log(rate) and the logit of shift, without Optuna."""
    rule = optax.adam(0.2)
    study = started(meta_optimizer=rule)
    study.optimize(objective, n_trials=9)
    assert links(study) == [(0, step, None if step == 0 else step - 1) for step in range(9)]
    with jax.enable_x64(True):
        natural = lambda u: (jnp.exp(u[0]), -1 + 4 * jax.nn.sigmoid(u[1]))  # noqa: E731
        u = jnp.array([math.log(2.0), math.log(2.5 / 1.5)])
        state = rule.init(u)
        for trial in study.trials:
            np.testing.assert_allclose([trial.params["rate"], trial.params["shift"]], natural(u), rtol=1e-5)
            update, state = rule.update(jax.grad(lambda u: valley(*natural(u)))(u), state)
            u = u + update


def test_maximizing_is_minimizing_the_opposite():
    down, up = started(), optuna.create_study(direction="maximize", sampler=sampler())
    up.enqueue_trial({"rate": 2.0, "shift": 1.5})

    def opposite(trial):
        value = objective(trial)
        gradient = _marks.read_gradient(trial.study.trials[trial.number])
        hg.studies.report_gradient(trial, dict(zip(gradient.names, -gradient.numbers, strict=True)))
        return -value

    down.optimize(objective, n_trials=12)
    up.optimize(opposite, n_trials=12)
    assert [t.params for t in down.trials] == [t.params for t in up.trials] and links(up) == links(down)
    assert up.best_value == -down.best_value


def test_everything_is_rebuilt_from_the_storage(tmp_path):
    """A new process for each trial: other objects, the same file."""
    once = optuna.create_study(sampler=sampler())
    once.optimize(objective, n_trials=12)
    path = f"sqlite:///{tmp_path / 'study.db'}"
    for _ in range(12):
        study = optuna.create_study(study_name="s", storage=path, sampler=sampler(seed=0), load_if_exists=True)
        study.optimize(objective, n_trials=1)
    assert links(study) == links(once) and max(link.step for link in links(once)) > 6
    for a, b in zip(study.trials, once.trials, strict=True):
        assert a.params == pytest.approx(b.params, rel=1e-12) and a.value == pytest.approx(b.value, rel=1e-12)


def test_the_seed_belongs_to_the_study():
    study = optuna.create_study(sampler=sampler(seed=5))
    study.ask()
    study.sampler = sampler(seed=6)
    assert _marks.study_seed(study, 6) == 5
    assert _marks.draw(5, 3, 0) == _marks.draw(5, 3, 0)
    assert len({_marks.draw(*place) for place in ((5, 3, 0), (6, 3, 0), (5, 4, 0), (5, 3, 1), (5, 3, 0, "x"))}) == 5


def trial_at(number, link, state=TrialState.COMPLETE, value=1.0, begun=0.0, lasted=1.0, gradient=0.5):
    """A trial as a storage would give it; begun and lasted in seconds."""
    begin = EPOCH + datetime.timedelta(seconds=begun)
    finished = state.is_finished()
    trial = optuna.trial.FrozenTrial(
        number, state, value if state == TrialState.COMPLETE else None, begin,
        begin + datetime.timedelta(seconds=lasted) if finished else None, {"shift": 0.5}, {"shift": SHIFT}, {}, {}, {},
        number,
    )  # fmt: skip
    store = _Attributes(trial)
    _marks.write_link(store, trial, _marks.Link(*link))
    if gradient is not None and finished:
        _marks.write_gradient(store, number, _marks.Gradient(("shift",), np.array([gradient]), np.zeros(0)))
    return trial


class _Attributes:
    def __init__(self, trial):
        self.trial = trial

    def set_trial_system_attr(self, trial_id, key, value):
        self.trial.system_attrs[key] = value


EPOCH = datetime.datetime(2026, 1, 1)
GIVEN = {"fixed_params": {"shift": 0.5}}


def begun(**options):
    """A chain of one trial, which the user enqueued."""
    trial = trial_at(0, (0, 0, None), **options)
    trial.system_attrs |= GIVEN
    return trial


def chosen(trials, seconds=0.0):
    chain = _chains.chosen(trials, 1.0, EPOCH + datetime.timedelta(seconds=seconds))
    return chain and (chain.number, len(chain.trials))


def test_of_several_complete_trials_of_a_step_the_lowest_numbered_counts():
    trials = [begun(), trial_at(1, (0, 1, 0), gradient=None), trial_at(2, (0, 1, 0)), trial_at(3, (0, 1, 0), value=0.1)]
    (chain,) = _chains.rebuilt(trials)
    assert [t.number for t in chain.trials] == [0, 2] and chosen(trials) == (0, 2)
    late = [*trials[:1], trial_at(1, (0, 1, 0)), *trials[2:]]  # the first turned out to count after all
    assert [t.number for t in _chains.rebuilt(late)[0].trials] == [0, 1]


def test_a_state_is_replayed_when_another_trial_counts():
    descent = _descent.Descent(optax.adam(0.1))
    trials = [begun(), trial_at(2, (0, 1, 0), gradient=0.5)]
    later = [begun(), trial_at(1, (0, 1, 0), gradient=-0.2)]
    proposals = [descent.next("study", _chains.rebuilt(ts)[0], 1.0).params["shift"] for ts in (trials, later)]
    fresh = _descent.Descent(optax.adam(0.1)).next("study", _chains.rebuilt(later)[0], 1.0).params["shift"]
    assert proposals[1] == fresh != proposals[0]


def test_a_running_head_is_not_waited_for_and_redone_after_three_median_durations():
    running = trial_at(1, (0, 1, 0), TrialState.RUNNING, begun=10.0)
    trials = [begun(lasted=2.0), running]
    assert chosen(trials, 10.0 + 5.9) is None
    assert chosen(trials, 10.0 + 6.1) == (0, 1)
    again = trial_at(2, (0, 1, 0), TrialState.RUNNING, begun=16.0)
    assert chosen([*trials, again], 16.0 + 5.9) is None  # somebody is at it again
    assert chosen([*trials, again], 16.0 + 6.1) == (0, 1)


def test_a_chain_that_stalls_is_left():
    steadily = [10.0 - 0.1 * i for i in range(30)]
    assert not any(_chains.stalled(steadily[: i + 1]) for i in range(30))
    assert not _chains.stalled([*steadily, *7 * [7.1]]) and _chains.stalled([*steadily, *8 * [7.1]])
    assert _chains.stalled(9 * [3.0]) and not _chains.stalled(8 * [3.0])


def test_the_best_for_its_age_goes_on():
    def chain(number, values):
        parents = [None, *range(number, number + len(values) - 1)]
        return [trial_at(number + i, (number, i, parents[i]), value=v) for i, v in enumerate(values)]

    elder = chain(0, [5.0, 3.0, 2.0])
    elder[0].system_attrs |= GIVEN
    assert chosen([*elder, *chain(3, [4.0])]) == (3, 1)  # better than the elder was
    assert chosen([*elder, *chain(3, [4.0, 3.5])]) == (0, 3)  # but slower
    stalled = chain(0, [5.0, 1.0, *10 * [1.0]])
    assert chosen([*stalled, *chain(12, [6.0])]) is None  # of a worse start than any: another one


def test_a_few_starts_come_before_the_first_descent():
    study = optuna.create_study(sampler=sampler())
    study.optimize(objective, n_trials=_chains.STARTS + 1)
    best = min(study.trials[: _chains.STARTS], key=lambda trial: trial.value).number
    assert links(study)[_chains.STARTS :] == [(best, 1, best)]


@pytest.mark.parametrize("distribution", [RATE, SHIFT], ids=["log", "linear"])
def test_coordinates_and_their_slope(distribution):
    axes = _descent.Axes(("x",), *(np.array([v]) for v in (distribution.low, distribution.high, distribution.log)))
    u = axes.unconstrained(np.array([0.7]))
    np.testing.assert_allclose(axes.natural(u), 0.7, rtol=1e-12)
    difference = (axes.natural(u + 1e-6) - axes.natural(u - 1e-6)) / 2e-6
    np.testing.assert_allclose(axes.slope(np.array([0.7])), difference, rtol=1e-6)
    for bound in (distribution.low, distribution.high):
        assert np.isfinite(axes.unconstrained(np.array([bound]))).all() and axes.slope(np.array([bound])) > 0
    for far, bound in ((-1e9, distribution.low), (1e9, distribution.high)):
        np.testing.assert_allclose(axes.natural(np.array([far])), bound, atol=1e-300)


def test_domains_and_unconstrained_numbers_are_converted():
    """The same derivative in three coordinates."""
    rate, shift = 0.3, 0.8
    natural = {"rate": 1.7, "shift": -0.4}
    place = (shift + 1) / 4
    domains = {
        "rate": hg.positive(1.0), "shift": hg.bounded(0.0, -1.0, 3.0), "untouched": hg.fixed(1.0),
    }  # fmt: skip
    unconstrained = {"rate": 1.7 * rate, "shift": -0.4 * 4 * place * (1 - place)}
    ours = {
        name: domain if name == "untouched" else jax.tree.map(lambda _, g=unconstrained[name]: np.float32(g), domain)
        for name, domain in domains.items()
    }
    found = []
    for grads, space in ((natural, "natural"), (unconstrained, "unconstrained"), (ours, "natural")):
        study = optuna.create_study(sampler=sampler())
        study.enqueue_trial({"rate": rate, "shift": shift})
        trial = study.ask({"rate": RATE, "shift": SHIFT})
        hg.studies.report_gradient(trial, grads, space=space)
        found.append(_marks.read_gradient(study.trials[0]))
    for gradient in found:
        assert gradient.names == ("rate", "shift")
        np.testing.assert_allclose(gradient.numbers, [1.7, -0.4], rtol=1e-6)


def test_hypergradients_are_followed():
    """The objective as a user writes it: suggested numbers in their domains, the value and its hypergradient."""

    def train_fn(hypers, key):
        sgd = hg.SGD(hypers["rate"], 0.9)
        return hg.train(bowl, {"w": jnp.array([2.0, -1.0])}, sgd, hg.full_batch(jnp.ones(2)), steps=5).params

    def tried(trial):
        hypers = {"rate": hg.positive(trial.suggest_float("rate", 1e-3, 10.0, log=True))}
        value, grads = hg.hypergradient(train_fn, lambda params: jnp.sum((params["w"] - 1) ** 2), hypers)
        hg.studies.report_gradient(trial, grads)
        return float(value)

    study = optuna.create_study(sampler=sampler(meta_optimizer=optax.adam(0.3)))
    study.enqueue_trial({"rate": 0.05})
    study.optimize(tried, n_trials=6)
    rates, values = [t.params["rate"] for t in study.trials], [t.value for t in study.trials]
    assert [link.step for link in links(study)] == list(range(6))
    assert rates == sorted(rates) and values == sorted(values, reverse=True) and values[-1] < 0.7 * values[0]


def bowl(params, theta, batch):
    return jnp.sum((params["w"] - batch) ** 2) / 2


def test_outside_of_a_study_nothing_happens():
    trial = optuna.trial.FixedTrial({"rate": 2.0, "shift": 1.5})
    assert objective(trial) == pytest.approx(float(valley(2.0, 1.5)), rel=1e-6)


def test_a_trial_that_died_is_tried_again_at_its_place():
    """As Optuna's callback for stale trials puts it back: its parameters and its attributes, under another number."""
    study = started()
    study.optimize(objective, n_trials=2)
    dying = study.ask({"rate": RATE, "shift": SHIFT})
    study.tell(dying, state=TrialState.FAIL)
    died = study.trials[-1]
    attributes = {"failed_trial": died.number, "retry_history": [died.number], **died.system_attrs}
    study.add_trial(
        optuna.create_trial(
            state=TrialState.WAITING, params=died.params, distributions=died.distributions, system_attrs=attributes
        )
    )
    study.optimize(objective, n_trials=2)
    assert links(study) == [(0, 0, None), (0, 1, 0), (0, 2, 1), (0, 2, 1), (0, 3, 3)]
    assert study.trials[3].params == died.params


def test_meta_optimizers_that_want_the_value_get_it():
    rule = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    study = started(meta_optimizer=rule)
    study.optimize(objective, n_trials=4)
    assert [link.step for link in links(study)] == [0, 1, 2, 3]
