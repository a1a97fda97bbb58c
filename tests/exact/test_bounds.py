"""When words are spilled, how many, how large a head or a scale can get, and how large the noise is: each at its worst."""

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value, some_of
from extremes import BUFFERS, DENOMINATORS, SMALLEST, STEPS, numerators, schedule, tables
from hypothesis import strategies as st

from hypergrad.exact import DEFERRED, HEADS, WORD_BITS, Fixed
from hypergrad.exact.deferred import FULL_SCALE, DeferredEntry


pytestmark = pytest.mark.of_bits

LONG = 20_000


def bounds_by_hand(n: list[int], d: int) -> tuple[list[bool], list[int], list[int]]:
    """(spills, words spilled before each step, bound after each step), as the docstring of `HeadsAndWords` says."""
    spills, slots, bounds, bound, words = [], [], [], 0, 0
    for k in n:
        spills.append((bound * d + d - 1) // k >= 2**32)
        slots.append(words)
        if spills[-1]:
            bound, words = bound // 2**16, words + 1
        bound = (bound * d + d - 1) // k
        bounds.append(bound)
    return spills, slots, bounds


def rows(d: int) -> st.SearchStrategy[np.ndarray]:
    return tables(numerators(d), STEPS).map(lambda n: n[:, 0])


@some_of("d", DENOMINATORS, 2**12, 2**16)
@hypothesis.given(data=st.data())
def test_schedule_is_words_needed_and_no_head_reaches_2_to_the_32(d, data):
    n = data.draw(rows(d))
    spills, slots, bounds = bounds_by_hand(n.tolist(), d)
    found = schedule(HEADS, n, d)
    np.testing.assert_array_equal(found.entries.n, n)
    np.testing.assert_array_equal(found.entries.spills, spills)
    np.testing.assert_array_equal(found.entries.slot, slots)
    np.testing.assert_array_equal(found.entries.step, np.arange(STEPS))
    assert int(found.end.words) == HEADS.words_needed(n, d) == sum(spills)
    np.testing.assert_allclose(HEADS.residual_bits(found.end), np.log2(bounds[-1] + 1.0), rtol=1e-6)
    assert max(bounds) < 2**32


@every_value("buffer, d", [HEADS, DEFERRED], DENOMINATORS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_a_schedule_goes_on_from_where_it_stood(buffer, d, data):
    """Any step of it follows from the mark before: what it says is what it says in one piece."""
    n, cut = data.draw(rows(d)), STEPS // 3
    whole, early = schedule(buffer, n, d), schedule(buffer, n[:cut], d)
    late = from_mark(buffer, n[cut:], d, early.end)
    jax.tree.map(np.testing.assert_array_equal, late.end, whole.end)
    pairs = zip(*(jax.tree.leaves(x.entries._replace(**WITHOUT[buffer])) for x in (whole, early, late)), strict=True)
    for one, a, b in pairs:
        np.testing.assert_array_equal(np.concatenate([a, b]), one)
    again = from_mark(buffer, n[cut:], d, early.end.restarted())
    np.testing.assert_array_equal(again.entries.slot, late.entries.slot - early.end.words)
    np.testing.assert_array_equal(again.entries.spills, late.entries.spills)
    assert int(again.end.words) == int(whole.end.words - early.end.words)


from_mark = jax.jit(lambda buffer, n, d, mark: buffer.schedule(n, d, mark), static_argnums=(0, 2))
WITHOUT: dict[Any, Any] = {HEADS: {"step": None}, DEFERRED: {}}  # of those, steps are counted anew


@some_of("d", DENOMINATORS, 2**12, 2**16)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_scales_stay_between_1_and_2_to_the_16_and_words_are_those_of_theory(d, data):
    n = data.draw(rows(d))
    found = schedule(DEFERRED, n, d)
    entries = found.entries
    scales = np.asarray(entries.after[:, 0])
    assert (scales >= 1).all() and (scales <= FULL_SCALE).all()
    np.testing.assert_array_equal(entries.after[:, 1], 1 / scales)
    np.testing.assert_array_equal(entries.before[1:], entries.after[:-1])
    np.testing.assert_array_equal(entries.before[0], DEFERRED.hold(Fixed(jnp.zeros(1))).scale)
    np.testing.assert_array_equal(entries.slot + entries.spills, np.append(entries.slot[1:], found.end.words))
    assert int(found.end.words) == DEFERRED.words_needed(n, d)
    lost = WORD_BITS * found.end.words + DEFERRED.residual_bits(found.end)
    np.testing.assert_allclose(lost, -np.log2(n / d).sum(), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("name", ["reference", "deferred reference"])
def test_the_references_take_the_schedules_of_the_device(name):
    reference, device = BUFFERS[name], BUFFERS["deferred" if "deferred" in name else "heads"]
    n = np.resize([3, 700, 30_000, 58982], STEPS)
    jax.tree.map(np.testing.assert_array_equal, schedule(reference, n, 2**16), schedule(device, n, 2**16))
    assert reference.words_needed(n, 2**16) == device.words_needed(n, 2**16)
    jax.tree.map(np.testing.assert_array_equal, reference.hold(Fixed(n)), device.hold(Fixed(n)))


@pytest.mark.parametrize(("slot", "spills"), [(0, False), (0, True), (2**29, True), (2**31 - 2, True), (2**31 - 1, False)])
def test_a_deferred_entry_unpacks_to_what_was_packed(slot, spills):
    entry = DeferredEntry.packed(jnp.float64(3.5), jnp.float64(77.7), slot + spills, slot)
    assert entry.row.shape == (5,)
    assert (entry.after.tolist(), entry.before.tolist()) == ([3.5, 1 / 3.5], [77.7, 1 / 77.7])
    assert (int(entry.slot), bool(entry.spills)) == (slot, spills)


def spilled_at(d: int) -> list[int]:
    return np.flatnonzero(bounds_by_hand([SMALLEST[d]] * STEPS, d)[0]).tolist()


def test_worst_case_for_d_2_to_the_12_is_3_words_every_4_steps():
    # n = 1: 12 bits a step. Bits held after each step: 12, 24 | spill: 8 -> 20 | 32, full | spill: 16 -> 28 |
    # spill: 12 -> 24 | ...: 4 steps lose 48 bits, three words.
    assert spilled_at(2**12) == [t for t in range(2, STEPS) if t % 4 != 3]
    assert max(bounds_by_hand([1] * STEPS, 2**12)[2]) == 2**32 - 1


@pytest.mark.parametrize("d", [2**16, 2**24])
def test_worst_case_of_the_others_is_a_word_every_step(d):
    # n/d = 2^-16: 16 bits a step, the head is full after two, and what a spill leaves it, 16 bits, becomes 32 again.
    assert spilled_at(d) == list(range(2, STEPS))
    assert max(bounds_by_hand([SMALLEST[d]] * STEPS, d)[2]) == 2**32 - 1


@pytest.mark.parametrize("d", DENOMINATORS)
def test_worst_case_of_deferred_decays_is_a_word_a_step_after_the_first(d):
    # The first 2^-16 takes the scale from 2^16 to 1; with d = 2^12 a step is 12 bits, and floor(12 t / 16) words have left
    # but one, since a scale of 1 is left as it is.
    bits = [int(np.log2(d // SMALLEST[d])) * (t + 1) for t in range(STEPS)]
    words = schedule(DEFERRED, np.full(STEPS, SMALLEST[d]), d).entries
    assert (words.slot + words.spills).tolist() == [(b - 1) // 16 for b in bits]


@pytest.mark.parametrize("d", DENOMINATORS)
def test_heads_reach_their_bound(d):
    # c = -1 and the smallest n: every digit lost is d - 1, the largest, so no smaller bound would do.
    n, bounds = np.full(STEPS, SMALLEST[d]), bounds_by_hand([SMALLEST[d]] * STEPS, d)[2]

    def body(digits, entry):
        digits, _ = HEADS.multiply_by(digits, c, entry.n, d, entry)
        return digits, digits.head

    found, c = schedule(HEADS, n, d), Fixed(jnp.int64(-1))
    start = HEADS.empty(c.high, int(found.end.words))
    heads = jax.jit(lambda: jax.lax.scan(body, start, found.entries))()[1]
    assert np.asarray(heads).tolist() == bounds


@pytest.mark.parametrize("buffer", [HEADS, DEFERRED], ids=["heads", "deferred"])
@pytest.mark.parametrize("decays", [(0.5,), (0.9,), (0.98,), (0.995,), (0.5, 0.9, 0.98, 0.995)])
def test_bits_stored_are_those_lost(decays, buffer):
    d = 2**16
    n = np.resize(np.round(np.array(decays) * d).astype(np.int64), LONG)
    ideal = np.log2(d / n).sum()
    found = schedule(buffer, n, d)
    stored = WORD_BITS * int(found.end.words) + float(buffer.residual_bits(found.end))
    assert int(found.end.words) == buffer.words_needed(n, d)
    assert abs(stored - ideal) <= 0.01 * ideal + 64  # 64 bits: the head


@pytest.mark.parametrize("buffer", [HEADS, DEFERRED], ids=["heads", "deferred"])
def test_nothing_is_stored_where_nothing_decays(buffer):
    # n = d: c is taken apart and put together again, and i = (i d + c mod d) div d is the old i.
    n = np.full(LONG, 2**16)
    found = schedule(buffer, n, 2**16)
    # The bound is (bound d + d - 1) div d = bound: it stays 0.
    assert (int(found.end.words), float(buffer.residual_bits(found.end))) == (0, 0.0) and buffer.words_needed(n, 2**16) == 0


@pytest.mark.parametrize("name", BUFFERS)
def test_length_is_the_bits_of_the_integers(name):
    """Of heads and words: 16 a word and those of the head, until the first word those of the one integer."""
    buffer, digits = BUFFERS[name], BUFFERS[name].empty(jnp.zeros(3), 4)
    if hasattr(digits, "head"):
        digits = digits._replace(head=jnp.asarray([0, 1, 2**31], jnp.uint32))
        assert float(buffer.length(digits, jnp.int32(2))) == pytest.approx(2 * 16 + (0 + 1 + 32) / 3)
    elif hasattr(digits, "stack"):
        assert int(buffer.length(digits, jnp.int32(2))) == 2 * 16
    else:
        digits = dataclasses.replace(digits, i=digits.i + [0, 1, 2**40])
        assert buffer.length(digits, 99) == pytest.approx((0 + 1 + 41) / 3)


def means(buffer: Any, wide: bool, n: int, g: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """x <- x n/2^16 + g, all steps: (on the grid, in float64)."""

    @jax.jit
    def run(g: Any) -> Any:
        def body(carry, x):
            digits, value = buffer.multiply_by(*carry, jnp.int64(n), 2**16, x[0])
            return (digits, value.add(x[1], bits)), None

        start = buffer.hold(Fixed.zeros_like(g[0], wide))
        entries = buffer.schedule(jnp.full(len(g), n), 2**16).entries
        return jax.lax.scan(body, (buffer.empty(start.high, None), start), (entries, g))[0][1].decode(bits, jnp.float64)

    exact = np.zeros(g.shape[1])
    for row in g:
        exact = n / 2**16 * exact + row
    return np.asarray(run(jnp.asarray(g))), exact


def test_noise_of_a_decay_by_heads_is_what_the_docstrings_say():
    """Up to d rho / sqrt(6 (1 - rho^2)) quanta of 2^-86, 7.7e-21 at rho = 0.999; half, as long as the heads are small."""
    g2 = np.random.default_rng(0).uniform(0.5, 1.5, 500) * 1e-13
    found, exact = means(HEADS, True, 65470, np.tile(g2, (4000, 1)), 40)
    noise = float(np.std(found - exact))
    assert 2e-21 < noise < 8e-21, noise


def test_deferred_decays_have_no_noise_but_rounding():
    """A velocity at m = 0.9: less than a tenth of what Algorithm 7 with n/d = 58982/65536 adds at every step."""
    g = np.random.default_rng(0).normal(size=(2000, 500)) * 1e-6
    found, exact = means(DEFERRED, False, 58982, g, 48)
    assert np.abs(found - exact).max() < 4 * 2.0**-32 and (found - exact).std() < 1.8e-10


def test_noise_of_a_deferred_second_moment_is_what_the_docstring_says():
    g = np.random.default_rng(0).uniform(size=(3000, 500)) * 1e-12
    found, exact = means(DEFERRED, True, 65470, g, 40)
    assert 4e-22 < (found - exact).std() < 1.2e-21  # the docstring: up to 5.5e-21, at the coarsest


@every_value("d, buffer", DENOMINATORS, [HEADS, DEFERRED])
@hypothesis.given(data=st.data())
def test_no_steps_in_a_row_spill_more_words_than_their_bound(buffer, d, data):
    smallest = data.draw(st.sampled_from([SMALLEST[d], d // 2, d - d // 10, d - 1]))
    n = np.asarray(data.draw(st.lists(st.integers(smallest, d - 1), min_size=1, max_size=STEPS)))
    found = schedule(buffer, np.append(n, np.full(STEPS + 1 - len(n), d - 1)), d)  # of one length: one program
    counts = np.asarray(found.entries.slot)[: len(n) + 1]
    bits = np.log2(d / n.min())
    for length in range(1, len(n) + 1):
        assert (counts[length:] - counts[:-length]).max() <= buffer.most_words(length, bits), length


@pytest.mark.parametrize("buffer", [HEADS, DEFERRED], ids=["heads", "deferred"])
def test_the_bound_is_near(buffer):
    n = np.full(LONG, round(0.9 * 2**16))
    found = schedule(buffer, n, 2**16)
    assert buffer.most_words(LONG, np.log2(2**16 / n[0])) <= int(found.end.words) + (4 if buffer == HEADS else 1)
