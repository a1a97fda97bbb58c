"""The benchmarks run, in their smallest form; their checkers catch lies; their laws hold where they can be counted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import (
    _measure,
    _performance_plots,
    buffers,
    exact_layer,
    gpu,
    integers,
    laws,
    long_curves,
    long_reversal,
    long_runs,
    loops,
    microbatches,
    opponents,
    performance,
    plans,
    rewind,
    roads,
    scaling,
    starting,
    theta,
    workloads,
)
from experiments.benchmarks._live import live_at_most
from experiments.benchmarks._measure import Limits, measure
from experiments.benchmarks.roads import Road


TINY = workloads.mlp_task(12, (6, 3), 4, 20)
ONCE = Limits(rounds=1)
PLAIN = Road("plain training, scan", opponents.plain, "plain")
UNROLL = Road("unroll", opponents.unrolled, "opponent")


@pytest.mark.long
def test_long_reversal_is_exact_in_short():
    proof = long_reversal.certify(40)
    assert proof.exact and proof.first_mismatch is None


@pytest.mark.long
def test_plans_are_compared_in_short(capsys):
    assert plans.main(["--tiny", "--rounds", "1", "--only", "small", "statistics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and all(" MiB " in line and " s " in line for line in lines[1:])


@pytest.mark.long
def test_records_are_rewound_in_short(monkeypatch, capsys):
    monkeypatch.setattr(rewind, "elsewhere", rewind.opened)
    assert rewind.main(["--steps", "8", "--every", "4"]) == 0
    assert capsys.readouterr().out.count("2 of 2 states") == 2
    monkeypatch.setattr(rewind, "elsewhere", lambda *a: {"digests": dict.fromkeys("048", "wrong"), "seconds": 0.0})
    assert rewind.main(["--steps", "8", "--every", "4"]) == 1


@pytest.mark.long
def test_steps_that_read_their_part_of_theta_are_timed(capsys):
    theta.main(theta.Config(rounds=1, steps=(2, 3), images=(4,), batch=2, run=2))
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.long
def test_microbatches_are_timed_in_short(capsys):
    microbatches.main(microbatches.parser().parse_args(["--small", "--rounds", "1", "--steps", "2"]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].startswith("dense 8-8")


@pytest.mark.long
def test_curves_of_long_runs_in_short(tmp_path):
    assert long_curves.main(["--powers", "3", "4", "--mebibytes", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "long_curves.png").stat().st_size > 10_000


@pytest.mark.long
def test_kinds_of_buffer_in_short(capsys):
    assert buffers.main(["--steps", "8", "300", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15 and sum("of theory stored" in line for line in lines) == 4


def test_a_machine_that_slows_down_is_not_taken_for_a_step_that_does():
    medians, neighbours, lowest = buffers.spreads([[1.0, 1.0, 2.0], [1.05, 2.1, 2.1]])  # slow from the middle of a round on
    np.testing.assert_allclose((medians, neighbours, lowest), (2.1, 1.05, 1.05))


def test_arrays_in_use_at_the_same_time_are_told_by_shape():
    def stacked(x):
        _, all_of_them = jax.lax.scan(lambda c, _: (jnp.sin(c), jnp.cos(c)), x, None, length=33)
        return jnp.sort(all_of_them, axis=0)[5] + jax.lax.fori_loop(0, 9, lambda i, z: jnp.sin(z) + all_of_them[i], x)

    lowered = jax.jit(stacked).lower(jnp.ones(257))
    taken = lowered.compile().memory_analysis()
    whole = live_at_most(lowered, lambda shape: True)
    assert 33 * 257 * 4 < whole <= taken.temp_size_in_bytes + taken.output_size_in_bytes
    others = live_at_most(lowered, lambda shape: shape != "f32[33,257]")
    assert 257 * 4 <= others < whole - 33 * 257 * 3


@pytest.mark.long
def test_long_runs_in_short(capsys):
    assert long_runs.main(["--steps", "16", "--share", "4", "--rounds", "1", "--mebibytes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and all(" us a step" in line for line in lines[1:])


@pytest.mark.long
def test_every_road_gives_the_same_hypergradient():
    chosen = [road for road in roads.ROADS if road.options() is None]  # with options: the same functions
    rows = measure(TINY, chosen, ONCE, tolerance=1e-4)  # raises where one disagrees
    assert [row.name for row in rows] == [road.name for road in chosen] and len(rows) >= 14
    for row in rows:
        assert len(row.seconds) == len(row.ratios) == 1 and row.bytes is not None and row.steps == 12
        assert (row.error is None) == (row.kind in ("plain", "exact"))


def test_every_road_has_a_law():
    names = {road.name.removesuffix(roads.SAME) for road in roads.roads_for(loops=True, options=True)}
    assert names == set(laws.LAWS)


@pytest.mark.long
def test_adam_gives_the_same_hypergradient():
    task = workloads.mlp_task(6, (6, 3), 4, 20, rule="adam")
    ours = next(road for road in roads.ROADS if road.name == "hg.Reversible, scan")
    assert [row.name for row in measure(task, [PLAIN, ours, UNROLL], ONCE)] == [PLAIN.name, ours.name, UNROLL.name]


def test_a_wrong_hypergradient_is_caught():
    lie = Road("wrong", lambda task, a: 1.02 * opponents.unrolled(task, a), "opponent")
    with pytest.raises(_measure.Disagreement, match="wrong disagrees with unroll: relative error 2.0e-02"):
        measure(TINY, [PLAIN, UNROLL, lie], ONCE)


def test_a_road_that_needs_too_much_is_timed_on_fewer_steps():
    unroll = measure(TINY, [PLAIN, UNROLL], Limits(1, bytes=1000.0))[1]
    assert unroll.bytes > 1000 and unroll.steps == _measure._halved(12, unroll.bytes / 1000) < 12
    assert _measure._halved(100, 0.5) == 100 and _measure._halved(100, 2.1) == 25 and _measure._halved(3, 1e9) == 1


def test_replays_are_what_the_loops_do(monkeypatch):
    """The law of a loop counts gradients; so does this, one call at a time."""
    calls = []
    monkeypatch.setattr(jax, "jit", lambda function: lambda *a: calls.append(len(a)) or function(*a))
    monkeypatch.setattr(opponents, "step", lambda task, state, t, a: (state[0] + a, state[1]))
    for steps, name, build in ((7, "replay tree, 4-ary, loop", loops.tree), (10, "sqrt-remat, loop", loops.sqrt_remat)):
        calls.clear()
        task = TINY._replace(steps=steps, params=jnp.zeros(2), loss=lambda w, batch: jnp.sum(w))
        np.testing.assert_array_equal(build(task)(task.rates), np.full(steps, 2.0))
        steps_and_pulls = sum(count >= 3 for count in calls)
        assert steps_and_pulls == laws.LAWS[name].gradients(steps)


def test_factors_multiply_to_the_number_of_steps():
    for steps in (1, 2, 13, 100, 200, 256, 1024):
        first, second = opponents.halves(steps)
        assert first * second == steps and first <= second
        assert np.prod(opponents.branches(steps, 4)) == steps
    assert opponents.branches(1024, 4) == (4,) * 5 and opponents.branches(200, 4) == (4, 2, 5, 5)


def test_binomial_law_at_its_corners():
    assert laws.binomial(10, 1) == 10 + 10 * 9 // 2 + 9 - 9  # one state: 1 + ... + 9 replayed
    assert laws.binomial(6, 100) == 6 + 6 - 1  # a state for each step


def test_the_first_scheme_catches_a_reversal_that_missed():
    task = TINY._replace(steps=3)
    found = integers.measure(task, 3, rounds=1)
    assert found["error"] < 1e-3 and set(found["nanoseconds"]) == {"forward", "backward"}
    scheme, rates = integers.Pass(task), np.asarray(task.rates)
    w, v, store = scheme.forward(rates)
    v[0] += 1
    with pytest.raises(AssertionError, match="missed the initial bits"):
        scheme.backward(w, v, store, rates)


def test_multiplying_keeps_what_it_loses():
    store, x = integers.Store(5), np.array([-(2**60), -1, 0, 1, 2**60 + 12345])
    y = x
    for _ in range(50):
        y = integers.multiply(y, store, integers.MOMENTUM, integers.DENOMINATOR)
    assert max(digits.bit_length() for digits in store.digits) > 0 and not np.array_equal(x, y)
    for _ in range(50):
        y = integers.multiply(y, store, integers.DENOMINATOR, integers.MOMENTUM)
    assert np.array_equal(x, y) and not store.digits.any()


@pytest.mark.long
def test_the_exact_layer_is_timed_by_differences():
    times = exact_layer.measure(50, 1, short=4, long=8)
    assert len(times) == 6 and all(np.isfinite(list(times.values())))


def test_starting_costs_are_ratios_of_medians():
    assert starting.compile_ratio({"hg.Reversible, scan": [1.0, 3.0, 9.0], "unroll": [2.0, 2.0, 7.0]}) == 1.5
    assert starting.beyond({"dependencies": [1.0, 2.0, 3.0], "and hypergrad": [1.5, 2.25, 9.0]}) == 0.5


def test_an_unknown_part_is_refused():
    with pytest.raises(SystemExit, match="no part is called 'mpl'; there are mlp, wide_mlp"):
        performance.main(performance.Config(parts=("mpl",)))


def test_curves_are_drawn(tmp_path):
    road = {"steps": [16, 64], "seconds": [1.0, 4.0], "bytes": [1e6, 2e6]}
    road |= {"predicted_time": [16.0, 64.0], "predicted_bytes": [1e6, 2e6]}
    numbers = {"sizes": (3, 2), "batch": 4, "curves": dict.fromkeys([*_performance_plots.DRAWN, PLAIN.name], road)}
    pictures = performance._plots.save(tmp_path, _performance_plots.curves(json.loads(json.dumps(numbers))))
    assert [p.path.name for p in pictures] == ["memory.png", "time.png"]
    assert all(p.path.stat().st_size > 10_000 for p in pictures)


@pytest.mark.long
def test_curves_hold_every_road_at_every_length(monkeypatch):
    monkeypatch.setattr(roads, "roads_for", lambda loops: [PLAIN, UNROLL, roads.ROADS[1]])
    monkeypatch.setattr(scaling, "network", lambda steps: TINY._replace(steps=steps))
    found = scaling.scale((1, 3), 1)
    assert set(found) == {PLAIN.name, UNROLL.name}  # not the one with options of its own
    assert found["unroll"]["steps"] == [2, 8] and found["unroll"]["bytes"][1] > found["unroll"]["bytes"][0]


@pytest.mark.long
def test_a_gpu_script_certifies_and_agrees():
    config = gpu.Config(tiny=True)
    results = {name: gpu.certified(task) for name, task in gpu.models(config).items()}
    assert set(results) == {"dense", "embedding"}
    for result in results.values():
        for text in result.values():
            assert float(text.removeprefix("exact, relative error ")) < 1e-3
    assert gpu.bandwidth(100, rounds=1) > 0


@pytest.mark.long
def test_a_gpu_that_does_not_repeat_itself_is_reported():
    calls = []

    def noise(x):
        calls.append(0)
        return np.float32(1e-3 * len(calls))

    task = gpu.embedding_task(3, 20, 3, 2, 4)

    def loss(params, batch):
        shaken = jax.pure_callback(noise, jax.ShapeDtypeStruct((), jnp.float32), jnp.zeros(()))
        return task.loss(jax.tree.map(lambda x: x * (1 + jax.lax.stop_gradient(shaken)), params), batch)

    result = gpu.certified(task._replace(loss=loss))
    assert all("the reversed run did not return" in text for text in result.values())
