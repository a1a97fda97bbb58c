"""Sources of batches: pure in t, every pass sees every example once, and what cannot be a source is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long

import hypergrad as hg


KEY = jax.random.key(0)


@jax.jit
def drawn(source, steps):
    # The source is an argument: its key is data, and another key compiles nothing.
    return jax.vmap(source)(steps)


def rows(source, steps: range) -> np.ndarray:
    """The rows of these steps, [steps, batch]; the data are their own indices."""
    return np.asarray(drawn(source, jnp.arange(steps.start, steps.stop, dtype=jnp.int32)))


def passes(size: int, batch_size: int, count: int, key=None) -> np.ndarray:
    """The first `count` passes over `size` examples, [count, size]."""
    source = hg.minibatches(jnp.arange(size), batch_size, jax.random.key(0) if key is None else key)
    steps = -(-count * size // batch_size)
    return rows(source, range(steps)).reshape(-1)[: count * size].reshape(count, size)


# Divisible or not, one batch a pass, one example, primes, powers of two, and batches that straddle two passes.
@pytest.mark.parametrize(
    ("size", "batch_size"), [(1, 1), long(2, 1), (7, 3), long(12, 4), (13, 13), long(64, 10), long(97, 96), (1000, 37)]
)
def test_every_pass_sees_every_example_once(size, batch_size):
    for order in passes(size, batch_size, 5):
        assert sorted(order) == list(range(size))


@pytest.mark.parametrize("t", [6, 7, 8, 7 * 10**6, 2**31 - 1 - 6])
def test_late_steps_are_whole_passes_too(t):
    # 7 steps of 3 are 3 passes of 7 examples, and begin one at any multiple of 7 steps.
    source, first = hg.minibatches(jnp.arange(7), 3, jax.random.key(0)), t // 7 * 7
    for order in rows(source, range(first, first + 7)).reshape(3, 7):
        assert sorted(order) == list(range(7))


def test_passes_have_orders_of_their_own():
    orders = {tuple(order) for order in passes(20, 5, 30)}
    assert len(orders) == 30  # of 20! = 2e18 orders, two of thirty agree with probability 2e-16


def test_keys_give_different_orders():
    orders = {tuple(passes(20, 20, 1, jax.random.key(seed))[0]) for seed in range(30)}
    assert len(orders) == 30


def mixed(seed: int, x: int) -> int:
    """murmur3's finalizer of (seed, x), in Python integers."""
    x = (x * 0x9E3779B9) % 2**32 ^ seed
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize(("size", "batch_size"), [(7, 3), (64, 10), (97, 96)])
def test_order_is_the_one_of_the_written_rounds(size, batch_size):
    # In Python integers, with divisions: whoever goes on with an old run finds the rows that it was begun with.
    def position(x: int, epoch: int) -> int:
        for first, second in words:
            partner = (mixed(first, epoch) % size - x) % size
            x = partner if mixed(second ^ mixed(first, epoch), max(x, partner)) >> 31 else x
        return x

    words = np.asarray(jax.random.bits(jax.random.key(0), (32, 2), jnp.uint32)).tolist()
    expected = [[position(x, epoch) for x in range(size)] for epoch in range(3)]
    np.testing.assert_array_equal(passes(size, batch_size, 3), expected)


def test_old_style_keys_are_accepted_and_mean_the_same():
    old, new = jax.random.PRNGKey(3), jax.random.key(3)
    assert old.dtype == jnp.uint32
    sources = [hg.minibatches(jnp.arange(7), 3, key) for key in (old, new)]
    np.testing.assert_array_equal(*(rows(source, range(7)) for source in sources))


@pytest.mark.parametrize("replacement", [False, True])
def test_batches_depend_on_t_alone(replacement):
    source = hg.minibatches((jnp.arange(30), jnp.arange(30) * 10), 4, jax.random.key(1), replacement=replacement)
    one, steps = jax.jit(lambda source, t: source(t)), jnp.arange(12, dtype=jnp.int32)
    forward = [one(source, t) for t in steps]
    backward = [one(source, t) for t in steps[::-1]][::-1]
    scanned = jax.lax.scan(lambda _, t: (None, source(t)), None, steps, reverse=True)[1]
    for t in range(12):
        for x, y, z in zip(forward[t], backward[t], scanned, strict=True):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_array_equal(x, z[t])
        np.testing.assert_array_equal(forward[t][0] * 10, forward[t][1])  # all leaves take the same rows


def test_draws_with_replacement_are_in_range_and_repeat():
    batches = rows(hg.minibatches(jnp.arange(10), 10, jax.random.key(2), replacement=True), range(200))
    assert batches.min() == 0 and batches.max() == 9
    assert any(len(set(batch)) < 10 for batch in batches)
    counts = np.bincount(batches.reshape(-1), minlength=10)
    assert chi_squared(counts) < 40  # 9 degrees of freedom: above 40 with probability 1e-5


def chi_squared(counts: np.ndarray) -> float:
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())


def test_every_example_is_as_likely_at_every_position():
    # 4000 passes of 8 examples: the count of (position, example) is binomial with mean 500. Rows and columns sum to 4000,
    # so 7 x 7 degrees of freedom; chi squared exceeds 100 with probability 2e-5.
    orders = passes(8, 8, 4000)
    counts = np.array([np.bincount(orders[:, position], minlength=8) for position in range(8)])
    assert chi_squared(counts) < 100


def test_every_order_is_as_likely():
    # 3 examples have 6 orders, 1000 times each on average; 5 degrees of freedom, above 31 with probability 1e-5.
    codes = passes(3, 3, 6000) @ np.array([9, 3, 1])
    counts = [int((codes == np.dot(order, [9, 3, 1])).sum()) for order in itertools.permutations(range(3))]
    assert sum(counts) == 6000 and chi_squared(np.array(counts)) < 31


def test_neighbours_are_separated():
    # Two examples next to each other in the data are as often neighbours as any two: 2/size of the passes.
    orders = passes(16, 16, 2000)
    where = np.argsort(orders, axis=1)
    together = np.mean(np.abs(where[:, 0] - where[:, 1]) == 1)
    assert abs(together - 2 / 16) < 0.04  # five standard deviations of 0.0074


def test_stacked_gives_row_t_and_the_number_of_steps():
    source = hg.stacked({"x": np.arange(12.0).reshape(4, 3), "y": np.arange(4)})
    assert source.steps == 4
    for t in range(4):
        batch = source(jnp.int32(t))
        np.testing.assert_array_equal(batch["x"], np.arange(12.0).reshape(4, 3)[t])
        assert int(batch["y"]) == t


def test_full_batch_gives_everything():
    data = {"x": np.ones((4, 3)), "y": np.arange(5)}  # lengths may differ: nothing is indexed
    for t in (0, 7):
        np.testing.assert_array_equal(hg.full_batch(data)(jnp.int32(t))["x"], data["x"])
        np.testing.assert_array_equal(hg.full_batch(data)(jnp.int32(t))["y"], data["y"])


@pytest.mark.parametrize(
    "make", [hg.stacked, lambda data: hg.minibatches(data, 1, jax.random.key(0))], ids=["stacked", "minibatches"]
)
@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((jnp.ones(2), jnp.ones((3, 2))), r"one equal.* leading axis; got lengths \[0\]: 2, \[1\]: 3"),
        ({"x": jnp.ones(2), "y": jnp.ones(5)}, r"one equal.* leading axis; got lengths \['x'\]: 2, \['y'\]: 5"),
        (jnp.zeros((0, 3)), r"non-empty leading axis; got lengths data: 0"),
        (jnp.float32(1.0), r"leading axis"),
        ((), r"got no arrays"),
        ({}, r"got no arrays"),
    ],
)
def test_data_without_one_leading_axis_are_refused(make, data, text):
    with pytest.raises(ValueError, match=rf"hg\.(stacked|minibatches).*{text}"):
        make(data)


@pytest.mark.parametrize("batch_size", [0, -1, 8, 2.0, True, None])
def test_batch_sizes_outside_the_data_are_refused(batch_size):
    with pytest.raises(ValueError, match=rf"`batch_size` must be an integer from 1 to the 7 examples.*got {batch_size}"):
        hg.minibatches(jnp.arange(7), batch_size, jax.random.key(0))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: hg.minibatches({"a": np.array(["x", "y"])}, 1, KEY), TypeError, r"data\['a'\] is an array of <U1"),
        (lambda: hg.full_batch("rows"), TypeError, "hg.full_batch takes a pytree of arrays of numbers; data is a str"),
        (lambda: hg.full_batch(lambda t: t), TypeError, "data is a function. A function of the step is a source"),
        (lambda: hg.minibatches(np.ones(3), 1, jax.random.split(KEY, 2)), ValueError, r"got keys of shape \(2,\). Take one"),
        (
            lambda: hg.minibatches(np.ones(3), 1, np.zeros(4, np.uint32)),
            TypeError,
            r"raw keys here have 2 numbers. Pass a typed",
        ),
        (lambda: hg.minibatches(np.ones(3), 1, np.ones(2)), TypeError, r"must be a JAX key.*got float64\[2\]"),
        (lambda: hg.minibatches(np.ones(3), 1, KEY, "no"), TypeError, "`replacement` of hg.minibatches must be True or"),
        (lambda: hg.minibatches(np.ones(3), True, KEY), ValueError, "`batch_size` must be an integer from 1 to the 3"),
    ],
)
def test_what_is_no_data_key_or_number_is_told(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_loader_that_fails_is_told_with_its_error():
    with pytest.raises(ValueError, match=r"no batch for step 0 \(IndexError: list index out of range\)"):
        hg.train(lambda w, theta, x: w * x, 1.0, hg.SGD(0.1), hg.host_batches(lambda t: [][t]), steps=2)


@pytest.mark.parametrize("make", [hg.full_batch, hg.stacked, lambda x: hg.minibatches(x, 1, KEY)])
def test_integers_that_do_not_fit_are_told_of_data(make):
    for data in (np.array([2**32 + 1, 3]), np.array([2**64 - 1], np.uint64)):
        with pytest.raises(ValueError, match=r"data\['a'\] has integers beyond u?int32, as which JAX reads them"):
            make({"a": data})


def test_what_is_an_array_to_numpy_is_data():
    class Table:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3.0)

    np.testing.assert_array_equal(hg.full_batch({"a": Table()}).data["a"], jnp.arange(3.0))
    with pytest.raises(TypeError, match="data has masked entries: fill them"):
        hg.full_batch(np.ma.masked_array([1.0, 2.0], [0, 1]))


MASKED = np.ma.masked_array(np.float32([1.0, 9.0]), [0, 1])
OBJECTS = np.array([1.0, 2.0], object)
BIG = np.array(2**33 + 5)


def trained(params=1.0, rate=0.1, theta=None, batches=None):
    def loss(w, theta, x):
        return jnp.sum(w**2) * sum(map(jnp.mean, jax.tree.leaves(theta)), 1.0)

    return hg.train(loss, params, hg.SGD(rate), hg.full_batch(0.0) if batches is None else batches, theta=theta, steps=2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda: trained(params=MASKED), "params has masked entries"),
        (lambda: trained(rate=MASKED, params=jnp.ones(2)), "optimizer.learning_rate has masked entries"),
        (lambda: trained(theta={"a": MASKED}), r"theta\['a'\] has masked entries"),
        (lambda: trained(theta=BIG), "theta has integers beyond int32"),
        (lambda: trained(theta=BIG[()]), "theta has integers beyond int32"),
        (lambda: trained(batches=hg.host_batches([MASKED] * 2)), "a batch of hg.host_batches has masked entries"),
        (lambda: hg.fixed({"a": BIG}), r"hg.fixed\['a'\] has integers beyond int32"),
        (lambda: hg.positive(MASKED), "hg.positive has masked entries"),
        (lambda: hg.unit_interval(MASKED / 10), "hg.unit_interval has masked entries"),
        (lambda: hg.knots(MASKED, 3), "hg.knots has masked entries"),
        (lambda: hg.hypergradient(lambda h, key: h, jnp.sum, MASKED), "hypers has masked entries"),
        (lambda: hg.hypergradient(lambda h, key: h, jnp.sum, OBJECTS), "hypers is an array of Python objects"),
        (lambda: trained(params=OBJECTS), "params is an array of Python objects"),
    ],
)
def test_what_jax_would_read_otherwise_is_told_wherever_it_comes_in(given, text):
    with pytest.raises((TypeError, ValueError), match=text):
        given()


def test_raw_keys_are_those_of_the_generator_that_is_set():
    with jax.default_prng_impl("rbg"):
        assert hg.minibatches(jnp.arange(8.0), 2, jax.random.PRNGKey(0))(0).shape == (2,)
        with pytest.raises(TypeError, match="raw keys here have 4 numbers"):
            hg.minibatches(jnp.arange(8.0), 2, jnp.zeros(2, jnp.uint32))


def test_integers_that_do_not_fit_are_told():
    batches = hg.host_batches([np.ones(3, int), np.full(3, 2**32 + 1)])
    with pytest.raises(ValueError, match="of step 1 of hg.host_batches has integers beyond int32"):
        hg.train(lambda w, theta, x: w * jnp.mean(x), 1.0, hg.SGD(0.1), batches)


def test_integers_of_numpy_count():
    source = hg.minibatches(np.arange(4), np.int64(2), KEY)
    assert type(source.batch_size) is int and source(0).shape == (2,)
    assert hg.Truncated(np.int64(3)) == hg.Truncated(3) and hg.Checkpointed(np.int32(2)) == hg.Checkpointed(2)
    assert hg.knots(np.ones(2, np.float32), np.int64(4)) == hg.knots(np.ones(2, np.float32), 4)
    with pytest.raises(ValueError, match="`checkpoints` must be None or an integer"):
        hg.Checkpointed(True)


def test_numbers_that_are_missing_are_no_side_effect():
    """NaN in what a function of batches makes anew at each call."""
    data = np.array([1.0, np.nan, 2.0], np.float32)
    batches = lambda t: jnp.asarray(data.copy())[t]  # noqa: E731
    loss = lambda w, _, b: (w - jnp.where(jnp.isnan(b), 0, b)) ** 2  # noqa: E731
    assert jnp.isfinite(hg.train(loss, jnp.ones(()), hg.SGD(0.1), batches, steps=3).params)
