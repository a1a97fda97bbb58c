"""What a run will take, told before it runs: `hg.plan` and `hg.Auto` against the programs that then run."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from covering import some_of

import hypergrad as hg
from hypergrad import _plan
from hypergrad.adjoints import auto
from hypergrad.adjoints.auto import bytes_of


DENSE = problems.network("tanh")
STEPS = 400
OPTIMIZERS = {
    "SGD": hg.SGD(jnp.float32(0.1), 0.9),
    "Adam": hg.Adam(jnp.float32(1e-3)),
    "a rate per step": hg.SGD(hg.PerStep(jnp.full(STEPS, 0.1, jnp.float32)), 0.9),
}
WIDE = {"in": np.full((64, 32), 0.01, np.float32), "out": np.full((32, 10), 0.02, np.float32)}  # more than what steps keep
BATCHES = hg.full_batch(np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32))
ROADS = {"Reversible": hg.Reversible(), "Checkpointed": hg.Checkpointed(), "Unrolled": hg.Unrolled()}


def _loss(w, penalty, x):
    return jnp.mean(jax.nn.logsumexp(jnp.tanh(x @ w["in"]) @ w["out"], axis=1)) + penalty * jnp.sum(w["in"] ** 2)


def planned(net: problems.Network, optimizer, steps=STEPS, **kwargs):
    arguments = net.loss, net.params(), optimizer, net.batches(steps)
    return hg.plan(*arguments, theta=net.theta(), steps=steps, measure=False, **kwargs)


@pytest.mark.long
def test_of_several_processes_none_keeps_lost_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "several", lambda: True)
    roads = planned(problems.network(), hg.SGD(jnp.float32(0.1)), steps=8).roads
    assert [road.adjoint for road in roads] == list(ROADS.values())


def trained(net: problems.Network, theta, optimizer, adjoint, steps=STEPS):
    run = hg.train(net.loss, net.params(), optimizer, net.batches(steps), theta=theta, steps=steps, adjoint=adjoint)
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(run.params))


@some_of(("rule", "road"), itertools.product(OPTIMIZERS, ROADS), ("SGD", "Reversible"))
def test_bytes_are_those_of_the_program_that_then_runs(rule, road):
    adjoint, optimizer, theta = ROADS[road], OPTIMIZERS[rule], jnp.float32(1e-3)
    plan = hg.plan(_loss, WIDE, optimizer, BATCHES, theta=theta, steps=STEPS, adjoint=adjoint, measure=False)

    def value(rate, theta):
        rule = dataclasses.replace(optimizer, learning_rate=rate)
        run = hg.train(_loss, WIDE, rule, BATCHES, theta=theta, steps=STEPS, adjoint=adjoint)
        return sum(jnp.sum(x) for x in jax.tree.leaves(run.params))

    program = jax.jit(jax.grad(value, argnums=(0, 1))).lower(optimizer.learning_rate, theta).compile()
    used = program.memory_analysis().temp_size_in_bytes
    np.testing.assert_allclose(plan.roads[0].device, used, rtol=0.1)


@pytest.mark.long
def test_words_on_the_host_are_those_of_the_schedule():
    road = planned(DENSE, hg.SGD(0.1, 0.5), adjoint=hg.Reversible(buffer="host")).roads[0]
    size = sum(x.size for x in jax.tree.leaves(DENSE.params()))
    assert road.host == 2 * size * (STEPS // 16 - 1)  # one bit a step, in words of 16; the last waits in the integers


@pytest.mark.long
def test_with_words_on_the_host_the_device_holds_as_much_of_a_long_run():
    def device(steps):
        return planned(DENSE, hg.SGD(0.1, 0.9), steps, adjoint=hg.Reversible(buffer="host")).roads[0].device

    assert device(131072) - device(16384) < 131072 / 20  # bytes: where schedules stand before each segment


@pytest.mark.long
def test_of_a_long_run_only_the_words_grow():
    def device(steps):
        return planned(DENSE, hg.SGD(0.1, 0.9), steps, adjoint=hg.Reversible()).roads[0].device

    size = sum(x.size for x in jax.tree.leaves(DENSE.params()))
    of_steps = 8192 * (size * np.log2(1 / 0.9) / 8 + 64)  # and what each step keeps of its schedule and its loss
    assert device(16384) - device(8192) < 1.1 * of_steps


@pytest.mark.long
def test_with_a_budget_the_first_that_fits_is_taken():
    roomy, tight = planned(DENSE, hg.SGD(0.1, 0.9)), planned(DENSE, hg.SGD(0.1, 0.9), memory_budget=1000)
    assert roomy.adjoint == hg.Reversible()
    assert tight.adjoint is None
    assert tight.why.startswith("no road fits into memory_budget=1000 B: a hypergradient of 400 steps sets aside")
    by_adjoint = {road.adjoint: road for road in roomy.roads}
    assert str(min(road.device for road in roomy.roads)) in tight.why
    on_host = by_adjoint[hg.Reversible(buffer="host")]
    plan = planned(DENSE, hg.SGD(0.1, 0.9), memory_budget=on_host.device)
    assert plan.adjoint == on_host.adjoint
    assert "hg.Reversible(buffer='host'): hg.Reversible() does not fit into" in plan.why


@pytest.mark.long
@pytest.mark.parametrize("compile", [pytest.param(jax.jit, id="jit"), pytest.param(lambda f: f, id="eager")])
def test_auto_is_what_it_chose_bit_for_bit(compile):
    def slope(adjoint):
        return compile(jax.grad(lambda rate: trained(DENSE, DENSE.theta(), hg.SGD(rate, 0.9), adjoint, 20)))(0.1)

    assert slope(hg.Auto("1GiB")) == slope(hg.Reversible())


@pytest.mark.long
def test_auto_takes_what_fits():
    """Of 400 steps one word or two of each parameter are much less than states."""
    plan = planned(DENSE, hg.SGD(0.1, 0.9))
    device = {road.adjoint: road.device for road in plan.roads}
    assert 1.5 * device[hg.Reversible()] < device[hg.Checkpointed()]
    budget = int(1.5 * device[hg.Reversible()])
    assert planned(DENSE, hg.SGD(0.1, 0.9), memory_budget=budget).adjoint == hg.Reversible()

    def slope(adjoint):
        return jax.jit(jax.grad(lambda theta: trained(DENSE, theta, hg.SGD(0.1, 0.9), adjoint)))(DENSE.theta())

    for one, other in zip(jax.tree.leaves(slope(hg.Auto(budget))), jax.tree.leaves(slope(hg.Reversible())), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_auto_takes_states_where_lost_digits_are_more(monkeypatch):
    """Digits that fill a gigabyte: no rule of the library loses as many on a network that a test can train."""
    monkeypatch.setattr(auto, "room", lambda adjoint, *_: auto.Room(2**30 if isinstance(adjoint, hg.Reversible) else 2**10))

    def slope(adjoint):
        return jax.jit(jax.grad(lambda rate: trained(DENSE, DENSE.theta(), hg.SGD(rate, 0.9), adjoint, 20)))(0.1)

    assert slope(hg.Auto("1MiB")) == slope(hg.Checkpointed())


def test_auto_that_finds_nothing_says_what_each_road_takes():
    with pytest.raises(ValueError, match=r"no road fits into memory_budget=512 B.*The smallest that works is \d+ bytes"):
        jax.jit(jax.grad(lambda rate: trained(DENSE, DENSE.theta(), hg.SGD(rate, 0.9), hg.Auto(512), 20)))(0.1)


@pytest.mark.long
def test_auto_in_the_meta_loop():
    def train_fn(hypers, key):
        theta = DENSE.theta()
        return hg.train(
            DENSE.loss, DENSE.params(), hg.SGD(hypers, 0.9), DENSE.batches(20), theta=theta, adjoint=hg.Auto("1GiB")
        ).params

    result = hg.optimize(train_fn, lambda w: jnp.sum(w["w1"] ** 2), hg.positive(0.1), meta_steps=2)
    assert len(result.history) == 2


def test_measured_seconds_and_the_table(monkeypatch):
    monkeypatch.setattr(_plan, "LEAST_SECONDS", 0.0)
    net, steps = DENSE, 20
    plan = hg.plan(net.loss, net.params(), hg.SGD(0.1, 0.9), net.batches(steps), theta=net.theta(), steps=steps)
    assert all(road.seconds > 0 for road in plan.roads)
    head, *rows, why = str(plan).splitlines()
    assert head.split() == ["20", "steps", "device", "host", "seconds"]
    assert [row.split("(")[0] for row in rows] == ["hg.Reversible", "hg.Reversible", "hg.Checkpointed", "hg.Unrolled"]
    assert why == "hg.Reversible(): each reversal is checked bit for bit."


@pytest.mark.long
def test_a_long_run_is_measured_on_few_steps():
    steps = 10**6
    batches = hg.full_batch(DENSE.data)
    plan = hg.plan(DENSE.loss, DENSE.params(), hg.SGD(0.1, 0.9), batches, theta=DENSE.theta(), steps=steps,
                   adjoint=hg.Reversible())  # fmt: skip
    assert plan.roads[0].seconds > 0


@pytest.mark.long
def test_batches_from_python_go_backwards_or_not_at_all():
    x, y = DENSE.data
    batches = hg.host_batches([(x[:8], y[:8])] * 20)
    plan = hg.plan(DENSE.loss, DENSE.params(), hg.SGD(0.1, 0.9), batches, theta=DENSE.theta(), measure=False)
    assert [road.adjoint for road in plan.roads] == [hg.Reversible(), hg.Reversible(buffer="host")]
    with pytest.raises(ValueError, match=r"hg.host_batches loads from Python, which hg.Unrolled\(\) cannot"):
        hg.plan(DENSE.loss, DENSE.params(), hg.SGD(0.1, 0.9), batches, theta=DENSE.theta(), adjoint=hg.Unrolled())


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "", "12", "12 parsecs", "0 B", "-1MiB"])
def test_a_budget_that_is_none(budget):
    with pytest.raises(ValueError, match="`memory_budget` must be bytes, an int above 0, or a string such as"):
        hg.Auto(budget)
    with pytest.raises(ValueError, match="`memory_budget` must be bytes"):
        planned(DENSE, hg.SGD(0.1, 0.9), memory_budget=budget)


def test_budgets_in_units():
    assert [bytes_of(x) for x in (7, "1 B", "512MiB", "1.5 GiB", "2 GB")] == [7, 1, 2**29, 3 * 2**29, 2 * 10**9]


def test_the_slow_reference_is_not_planned():
    with pytest.raises(ValueError, match='hg.plan knows nothing of buffer="gmpy2"'):
        planned(DENSE, hg.SGD(0.1, 0.9), adjoint=hg.Reversible(buffer="gmpy2"))


@pytest.mark.long
@pytest.mark.parametrize("measure", [False, pytest.param(True, marks=pytest.mark.long)])
def test_between_the_two_it_cuts_the_run_into_segments(measure):
    """Digits of 4,000 steps at a small momentum are more than the budget, states of now and then are not."""
    steps, optimizer = 4000, hg.SGD(jnp.float32(0.1), 0.1)
    arguments = (_loss, WIDE, optimizer, BATCHES)
    whole = hg.plan(*arguments, theta=1e-3, steps=steps, adjoint=hg.Reversible(), measure=False).roads[0].device
    budget = whole // 2
    plan = hg.plan(*arguments, theta=1e-3, steps=steps, memory_budget=budget, measure=measure)
    assert isinstance(plan.adjoint, hg.Reversible) and plan.adjoint.memory_budget
    taken = {road.adjoint: road for road in plan.roads}
    assert taken[plan.adjoint].device <= budget and "does not fit" in plan.why
    if not measure:
        return
    assert taken[plan.adjoint].seconds > 0

    def slope(adjoint):
        def value(rate):
            run = hg.train(_loss, WIDE, hg.SGD(rate, 0.1), BATCHES, theta=1e-3, steps=40, adjoint=adjoint)
            return sum(jnp.sum(x) for x in jax.tree.leaves(run.params))

        return jax.jit(jax.grad(value))(0.1)

    np.testing.assert_allclose(slope(plan.adjoint), slope(hg.Reversible()), rtol=1e-6)


@pytest.mark.long
def test_the_smallest_budget_of_all_roads_works():
    """Of runs in segments, where these take the least."""
    arguments, steps = (_loss, WIDE, hg.SGD(jnp.float32(0.1), 0.1), BATCHES), 4000

    def traced(budget):
        def value(rate):
            run = hg.train(_loss, WIDE, hg.SGD(rate, 0.1), BATCHES, theta=1e-3, steps=steps, adjoint=hg.Auto(budget))
            return sum(jnp.sum(x) for x in jax.tree.leaves(run.params))

        return jax.eval_shape(jax.grad(value), 0.1)

    with pytest.raises(ValueError, match="no road fits") as caught:
        traced(1000)
    smallest = int(re.search(r"smallest that works is (\d+) bytes", str(caught.value))[1])
    whole = hg.plan(*arguments, theta=1e-3, steps=steps, adjoint=hg.Reversible(), measure=False).roads[0].device
    assert smallest < whole / 2
    for budget in (smallest, int(0.95 * whole)):
        assert traced(budget).shape == ()


# Rules that make a decay of hyperparameters.
MADE_OF_OTHERS = {"AdamW": hg.AdamW(jnp.float32(1e-3)), "Lion": hg.Lion(jnp.float32(1e-3))}


@some_of("rule", MADE_OF_OTHERS, "AdamW")
def test_decays_that_are_made_of_others_lose_what_they_lose_now(rule):
    """In a plan as outside of `jax.jit`: the smallest budget is the same."""
    net, optimizer = problems.network(), MADE_OF_OTHERS[rule]

    def smallest(asked):
        with pytest.raises(ValueError, match="too little to reverse 200 steps") as caught:
            asked(hg.Reversible(memory_budget=1))
        return int(re.search(r"smallest that works is (\d+) bytes", str(caught.value))[1])

    in_a_run = smallest(lambda x: jax.grad(lambda theta: trained(net, theta, optimizer, x, 200))(net.theta()))
    assert smallest(lambda x: planned(net, optimizer, 200, adjoint=x)) == in_a_run
    assert planned(net, optimizer, 200, adjoint=hg.Reversible(memory_budget=in_a_run)).roads[0].device > in_a_run


@pytest.mark.long
@pytest.mark.parametrize("rule", MADE_OF_OTHERS)
def test_a_plan_for_little_memory_knows_all_roads(rule):
    plan = planned(problems.network(), MADE_OF_OTHERS[rule], 200, memory_budget=1)
    assert plan.adjoint is None and "no road fits into memory_budget=1 B" in plan.why
    assert [road.adjoint.memory_budget is not None for road in plan.roads[:2]] == [False, True] and len(plan.roads) == 5


def test_words_on_disk_are_planned_as_those_of_the_host(tmp_path):
    def planned_with(buffer):
        rule, adjoint = hg.SGD(jnp.float32(0.1), 0.1), hg.Reversible(buffer=buffer)
        return hg.plan(_loss, WIDE, rule, BATCHES, theta=1e-3, steps=600, adjoint=adjoint, measure=False).roads[0]

    on_disk, on_host = planned_with(hg.Disk(tmp_path)), planned_with("host")
    assert (on_disk.device, on_disk.host) == (on_host.device, on_host.host)


def test_a_plan_is_made_outside_of_what_is_compiled() -> None:
    net = problems.network()
    with pytest.raises(ValueError, match="call it outside of jax.jit"):
        jax.jit(lambda rate: planned(net, hg.SGD(rate, 0.9), steps=8).steps)(0.1)
