"""Laws of decays that wait: the way back, the exact product as the oracle, scales, words, and what marks a value lost."""

import functools
from fractions import Fraction
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad.exact import (
    DEFERRED,
    GMPY2_DEFERRED,
    WORD_BITS,
    Scaled,
    Wide,
    add,
    decode,
    first_lost,
    grid_range,
    subtract,
    widen,
)
from hypergrad.exact.deferred import FULL
from hypergrad.exact.limbs import LOW_BITS
from hypergrad.exact.lost import STEPS as NEVER


DENOMINATORS = (2**12, 2**16, 2**24)
STEPS = 90
EDGES = [0, -1, 1, 2**16 - 1, 2**16, -(2**16) - 1, 2**45, 2**46 - 2**30, 2**30 - 2**46]  # with room for increments
LOW_EDGES = [0, 1, 2**16 - 1, 2**31, 2**46 - 1]


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def numerators(d: int) -> st.SearchStrategy[np.ndarray]:
    """int64 [STEPS]: the smallest, the largest and any others, repeated with a period of their own."""
    one = st.sampled_from([max(1, d // 2**16), d - 1, d, d // 2]) | st.integers(max(1, d // 2**16), d)
    return hnp.arrays(np.int64, st.integers(1, 7), elements=one, fill=st.nothing()).map(lambda x: np.resize(x, STEPS))


def values(wide: bool) -> Scaled:
    if not wide:
        return DEFERRED.hold(jnp.asarray(EDGES))
    high, low = (x.ravel() for x in np.meshgrid(EDGES, LOW_EDGES))
    return DEFERRED.hold(Wide(jnp.asarray(high), jnp.asarray(low)))


def integers(z: Any) -> list[int]:
    if isinstance(z, Wide):
        return [(int(h) << LOW_BITS) + int(low) for h, low in zip(z.high, z.low, strict=True)]
    return [int(x) for x in z]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def there_and_back(x: Scaled, d: int, capacity: int, divide_by: Any, n: Any, increments: Any) -> Any:
    """x <- x n/d + increment, step by step, and back: (end, before each step, the same on the way back)."""

    def forward(carry, step):
        words, x = DEFERRED.multiply_by(*carry, None, d, step[0])
        return (words, add(x, step[1], 30)), carry[1]

    def backward(carry, step):
        words, x = divide_by(carry[0], subtract(carry[1], step[1], 30), None, d, step[0])
        return (words, x), x

    steps = DEFERRED.schedule(n, d).turns, increments
    end, before = jax.lax.scan(forward, (DEFERRED.empty(x.shape, capacity), x), steps)
    return end[1], before, jax.lax.scan(backward, end, steps, reverse=True)[1]


@pytest.mark.parametrize("wide", [False, True], ids=["int64", "wide"])
@pytest.mark.parametrize("d", DENOMINATORS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_every_step_is_undone(d, wide, data):
    n = data.draw(numerators(d))
    increments = np.resize(data.draw(hnp.arrays(np.float32, 5, elements=st.floats(-9, 9, width=32))), STEPS)
    capacity = 90 if d == 2**24 else DEFERRED.words_needed(np.full(STEPS, max(1, d // 2**16)), d)
    _, before, after = there_and_back(values(wide), d, capacity, DEFERRED.divide_by, jnp.asarray(n), jnp.asarray(increments))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("wide", [False, True], ids=["int64", "wide"])
@pytest.mark.parametrize("d", DENOMINATORS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_values_are_the_exact_product_to_a_quantum(d, wide, data):
    """In rational numbers. Each word that leaves takes less than a quantum of the full scale; scales are floats."""
    n = data.draw(numerators(d))
    end, _, _ = there_and_back(values(wide), d, STEPS, DEFERRED.divide_by, jnp.asarray(n), jnp.zeros(STEPS))
    scale, exact = Fraction(float(end.factors[0])), Fraction(int(FULL))
    for k in n.tolist():
        exact *= Fraction(k, d)
    for z, first in zip(integers(end.z), integers(values(wide).z), strict=True):
        error = abs(z * scale - first * exact)
        assert error <= 2 * int(FULL) + abs(first * exact) * STEPS * Fraction(1, 2**52)


schedule = jax.jit(DEFERRED.schedule, static_argnums=1)


@pytest.mark.parametrize("d", DENOMINATORS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_the_schedule_keeps_its_promises(d, data):
    """Scales from 1 to 2^16, the words of `words_needed`, and as many bits as theory says, to the last digit."""
    n = data.draw(numerators(d))
    plan = schedule(jnp.asarray(n), d)
    scales = np.asarray(plan.turns.after[:, 0])
    assert (scales >= 1).all() and (scales <= FULL).all()
    np.testing.assert_array_equal(plan.turns.before[1:], plan.turns.after[:-1])
    np.testing.assert_array_equal(plan.turns.before[0], DEFERRED.hold(jnp.zeros(1)).factors)
    np.testing.assert_array_equal(plan.turns.slot + plan.turns.spills, np.append(plan.turns.slot[1:], plan.words))
    assert int(plan.words) == DEFERRED.words_needed(n, d)
    np.testing.assert_allclose(WORD_BITS * plan.words + plan.held, -np.log2(n / d).sum(), rtol=1e-12, atol=1e-9)


def test_no_word_is_lost_in_a_stack_that_is_full_to_the_last():
    n, x = np.full(STEPS, 1), DEFERRED.hold(jnp.asarray(EDGES))
    needed = DEFERRED.words_needed(n, 2**16)
    assert needed == STEPS - 1  # the first step takes the scale to 1
    g = jnp.asarray(np.random.default_rng(0).normal(size=STEPS))
    run = lambda capacity: there_and_back(x, 2**16, capacity, DEFERRED.divide_by, jnp.asarray(n), g)[1:]  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, *run(needed))
    before, after = run(needed - 1)
    assert (np.asarray(before.z) != np.asarray(after.z)).any(), "one word short went unnoticed"


def test_short_runs_touch_no_word():
    n, x = jnp.full(STEPS, 58982), DEFERRED.hold(jnp.asarray(EDGES))
    assert DEFERRED.words_needed(n, 2**16) == 0
    g = jnp.asarray(np.random.default_rng(0).normal(size=STEPS))
    with_room, without = (there_and_back(x, 2**16, k, DEFERRED.divide_by, n, g) for k in (1, 0))
    jax.tree.map(np.testing.assert_array_equal, with_room, without)
    jax.tree.map(np.testing.assert_array_equal, *without[1:])


def test_the_law_catches_an_inverse_off_by_one_quantum():
    def lying(*arguments):
        words, x = DEFERRED.divide_by(*arguments)
        return words, x._replace(z=x.z + 1)

    n = jnp.full(STEPS, 58982)
    _, before, after = there_and_back(DEFERRED.hold(jnp.asarray(EDGES)), 2**16, 9, lying, n, jnp.zeros(STEPS))
    assert (np.asarray(before.z) != np.asarray(after.z)).all()


@pytest.mark.parametrize("wide", [False, True], ids=["int64", "wide"])
def test_increments_are_rounded_to_quanta_of_the_scale(wide):
    zero = jnp.zeros(4, jnp.int64)
    x = DEFERRED.hold(widen(zero) if wide else zero)
    quantum = 2.0 ** (WORD_BITS - 48 - (LOW_BITS if wide else 0))
    there = add(x, jnp.asarray([0.4, 0.6, -0.6, 3.0], jnp.float64) * quantum, 48)
    np.testing.assert_array_equal(decode(there, 48, jnp.float64) / quantum, [0, 1, -1, 3])


@pytest.mark.parametrize("scale", [FULL, 1.0, 77.7])
@pytest.mark.parametrize("wide", [False, True], ids=["int64", "wide"])
def test_what_no_value_can_hold_is_recorded_as_what_it_is(scale, wide):
    lost, zero = np.array([np.nan, np.inf, 1e30, grid_range(48)]), jnp.zeros(5, jnp.int64)
    x = Scaled(widen(zero) if wide else zero, jnp.asarray([scale, 1 / scale]))
    after = add(x, jnp.append(lost, 0.99 * grid_range(48)), 48, 3)
    found = jax.vmap(lambda z: first_lost(after._replace(z=z)))(after.z)
    assert found.step.tolist() == [3, 3, 3, 3, NEVER]
    np.testing.assert_array_equal(found.magnitude[:4], lost.astype(np.float32))


def test_no_noise_but_rounding():
    """A velocity at m = 0.9: less than a tenth of what Algorithm 7 with n/d = 58982/65536 adds at every step."""
    steps, rho, rng = 2000, 58982 / 2**16, np.random.default_rng(0)
    g = rng.normal(size=(steps, 500)) * 1e-6
    plan = DEFERRED.schedule(jnp.full(steps, 58982), 2**16)
    body = lambda x, t: (add(DEFERRED.multiply_by(DEFERRED.empty((500,), None), x, None, 2**16, t[0])[1], t[1], 48), None)  # noqa: E731
    end, _ = jax.lax.scan(body, DEFERRED.hold(jnp.zeros(500, jnp.int64)), (plan.turns, jnp.asarray(g)))
    exact = np.zeros(500)
    for row in g:
        exact = rho * exact + row
    error = np.asarray(decode(end, 48, jnp.float64)) - exact
    assert np.abs(error).max() < 4 * 2.0**-32 and error.std() < 1.8e-10


def test_the_stack_is_one_gmpy2_integer():
    """Algorithm 7 as printed, by 1/2^16: the same values at every step, and the words are the digits of its integer."""
    n = np.random.default_rng(0).choice([1, 3, 700, 30_000, 58982], 25)
    plan, x = DEFERRED.schedule(jnp.asarray(n), 2**16), values(wide=True)
    steps = [jax.tree.map(lambda row, t=t: row[t], plan.turns) for t in range(len(n))]
    words, unbounded = DEFERRED.empty(x.shape, int(plan.words)), (GMPY2_DEFERRED.empty(x.shape, None), x)
    for turn in steps:
        words, x = DEFERRED.multiply_by(words, x, None, 2**16, turn)
        unbounded = GMPY2_DEFERRED.multiply_by(*unbounded, None, 2**16, turn)
        jax.tree.map(np.testing.assert_array_equal, unbounded[1], x)
    digits = [sum(int(w) << 16 * k for k, w in enumerate(column)) for column in np.asarray(words.stack)[::-1].T]
    assert digits == list(unbounded[0].i) and int(plan.words) > 5
    for turn in reversed(steps):
        unbounded = GMPY2_DEFERRED.divide_by(*unbounded, None, 2**16, turn)
    assert GMPY2_DEFERRED.is_empty(unbounded[0]).all()
    jax.tree.map(np.testing.assert_array_equal, unbounded[1], values(wide=True))


def test_noise_of_a_second_moment_is_what_the_docstring_says():
    steps, rho, rng = 3000, 65470 / 2**16, np.random.default_rng(0)
    g = rng.uniform(size=(steps, 500)) * 1e-12
    plan = DEFERRED.schedule(jnp.full(steps, 65470), 2**16)
    empty = DEFERRED.empty((500,), None)
    body = lambda x, t: (add(DEFERRED.multiply_by(empty, x, None, 2**16, t[0])[1], t[1], 40), None)  # noqa: E731
    end, _ = jax.lax.scan(body, DEFERRED.hold(widen(jnp.zeros(500, jnp.int64))), (plan.turns, jnp.asarray(g)))
    exact = np.zeros(500)
    for row in g:
        exact = rho * exact + row
    error = np.asarray(decode(end, 40, jnp.float64)) - exact
    assert 4e-22 < error.std() < 1.2e-21  # the docstring: up to 5.5e-21, at the coarsest
