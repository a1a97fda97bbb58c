"""Shampoo against its paper in plain NumPy, and each of its choices."""

import itertools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from classifier import batches, loss, params
from covering import long, some_of

import hypergrad as hg
from experiments import _quick
from hypergrad.optimizers import shampoo
from hypergrad.optimizers.tiles import tiles


RIDGE, EPS = 1e-6, 1e-10


def inverse_power(a: np.ndarray, e: float) -> np.ndarray:
    n = len(a)
    w, q = np.linalg.eigh(a + (RIDGE * np.trace(a) / n + EPS) * np.eye(n))
    return (q * w**-e) @ q.T


class ByNumpy:
    """A matrix, or a tensor, by the algorithm of the paper; sums where b2 is None."""

    def __init__(self, w: np.ndarray, rate: float, m: float = 0.875, b2: float | None = None, **options: Any) -> None:
        self.w, self.rate, self.m, self.b2, self.t = w.copy(), rate, m, b2, 0
        self.e, self.every, self.graft = options.get("e", 1 / (2 * w.ndim)), options.get("every", 1), options.get("graft")
        self.factors = [np.zeros((n, n)) for n in w.shape]
        self.square, self.v = np.zeros_like(w), np.zeros_like(w)

    def step(self, g: np.ndarray) -> None:
        kept, share = (1, 1) if self.b2 is None else (self.b2, 1 - self.b2)
        correct = 1 if self.b2 is None else 1 - self.b2 ** (self.t + 1)
        rows = [np.moveaxis(g, i, 0).reshape(n, -1) for i, n in enumerate(g.shape)]
        self.factors = [kept * f + share * x @ x.T for f, x in zip(self.factors, rows, strict=True)]
        self.square = kept * self.square + share * g * g
        if self.t % self.every == 0:
            self.roots = [inverse_power(f / correct, self.e) for f in self.factors]
        u = g
        for i, k in enumerate(self.roots):
            u = np.moveaxis(np.tensordot(k, u, (1, i)), 0, i)
        other = {"sgd": g, "adagrad": g / np.sqrt(self.square + EPS), "adam": g / np.sqrt(self.square / correct + EPS)}
        if self.graft:
            u = u * np.linalg.norm(other[self.graft]) / np.linalg.norm(u)
        self.v = self.m * self.v - (1 - self.m) * u
        self.w = self.w + self.rate * self.v
        self.t += 1


def linear(shape: tuple[int, ...], rule: hg.Shampoo, steps: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start, gradients, end) of a linear loss in float64."""
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=shape), rng.normal(size=(steps, *shape)) * 0.3 + 0.2
    run = hg.train(lambda w, _, g: jnp.vdot(g, w), jnp.asarray(start), rule, hg.stacked(jnp.asarray(gradients)))
    return start, gradients, np.asarray(run.params)


@pytest.mark.parametrize(
    ("shape", "ours", "theirs"),
    [
        long((4, 6), {"b2": None}, {}),
        long((4, 6), {"b2": 0.875}, {"b2": 0.875}),
        long((4, 6), {"b2": 0.875, "exponent": 0.5}, {"b2": 0.875, "e": 0.5}),
        long((4, 6), {"b2": 0.875, "root": "newton"}, {"b2": 0.875}),
        long((4, 6), {"b2": None, "graft": "sgd"}, {"graft": "sgd"}),
        long((4, 6), {"b2": None, "graft": "adagrad"}, {"graft": "adagrad"}),
        ((4, 6), {"b2": 0.875, "graft": "adam"}, {"b2": 0.875, "graft": "adam"}),
        ((2, 3, 4), {"b2": 0.875, "block_size": None}, {"b2": 0.875}),
    ],
    ids=str,
)
def test_it_is_that_of_the_paper(shape: tuple[int, ...], ours: Any, theirs: Any) -> None:
    with jax.enable_x64(True):
        start, gradients, end = linear(shape, hg.Shampoo(0.05, 0.875, ridge=RIDGE, eps=EPS, **ours))
        reference = ByNumpy(start, 0.05, **theirs)
        for g in gradients:
            reference.step(g)
        np.testing.assert_allclose(end, reference.w, rtol=1e-6 if "root" in ours else 1e-8)


@pytest.mark.long
def test_held_roots_are_those_of_the_paper_but_for_what_their_link_keeps() -> None:
    with jax.enable_x64(True):
        start, gradients, end = linear((4, 6), hg.Shampoo(0.05, 0.875, 0.875, every=7, ridge=RIDGE, eps=EPS))
        reference = ByNumpy(start, 0.05, b2=0.875, every=7)
        for g in gradients:
            reference.step(g)
        np.testing.assert_allclose(end, reference.w, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:hg.Shampoo. leaves of fewer than two axes")
def test_held_roots_forget_a_beginning_without_gradients() -> None:
    """As of a head of zeros, or of a warm-up from rate 0: eps^-e would not be forgotten."""
    with jax.enable_x64(True):
        gradients = np.array([[0, 0, 0], [0, 0, 0], [1, -2, 3], [1, 2, -1], [2, 1, 1], [1, 1, -2.0]])
        run = hg.train(
            lambda w, _, g: jnp.vdot(w, g), jnp.zeros(3), hg.Shampoo(0.1, 0.5, 0.875, every=2), hg.stacked(gradients)
        )
        w, velocity, square, root = np.zeros((4, 3))
        for t, g in enumerate(gradients):
            square = 0.875 * square + 0.125 * g**2
            mean = square / (1 - 0.875 ** (t + 1))
            root = (mean + 1e-6 * mean.mean() + 1e-10) ** -0.5 if t % 2 == 0 else root
            velocity = 0.5 * velocity - 0.5 * root * g
            w = w + 0.1 * velocity
        np.testing.assert_allclose(run.params, w, rtol=1e-4)


def test_tiles_are_leaves_of_their_own() -> None:
    with jax.enable_x64(True):
        start, gradients, end = linear((5, 6), hg.Shampoo(0.05, 0.875, None, block_size=3, ridge=RIDGE, eps=EPS))
        for rows in (slice(0, 3), slice(3, 5)):
            for columns in (slice(0, 3), slice(3, 6)):
                reference = ByNumpy(start[rows, columns], 0.05)
                for g in gradients:
                    reference.step(g[rows, columns])
                np.testing.assert_allclose(end[rows, columns], reference.w, rtol=1e-8)


@some_of(
    ("shape", "block_size"),
    list(
        itertools.product([(), (3,), (4, 4), (5, 7), (2, 3, 4), (3, 3, 8, 16), (1, 1)], [None, 1, 3, 128]),
    ),
    ((), None),
    ((3,), 1),
    ((5, 7), 3),
    ((3, 3, 8, 16), 128),
)
def test_a_leaf_is_cut_and_put_together(shape: tuple[int, ...], block_size: int | None) -> None:
    own = tiles(shape, block_size, 4)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    @jax.jit
    def ways(x: jax.Array) -> Any:
        vector = own.squares(x)
        return own.put(own.cut(x)), vector, own.pack(own.unpack(vector), x.dtype), own.times(own.identity(x.dtype), x)

    put, vector, packed, times = ways(x)
    np.testing.assert_array_equal(put, x)
    np.testing.assert_array_equal(packed, vector)
    np.testing.assert_allclose(times, x)
    assert math.prod(own.merged) == x.size


def test_small_axes_of_a_tensor_become_one_and_long_ones_have_a_diagonal() -> None:
    assert tiles((3, 3, 8, 16), 128, 8192).merged == (72, 16)
    assert tiles((3, 3, 8, 16), None, 8192).merged == (3, 3, 8, 16)
    [group] = tiles((4, 9), None, 8).groups
    assert group.full == (True, False)
    [group] = tiles((9,), 128, 8192).groups
    assert group.full == (False,)


@pytest.mark.long
def test_it_keeps_the_contract() -> None:
    rule = hg.Shampoo(0.05, every=3, graft="adam", block_size=2, weight_decay=0.1)
    hg.testing.check_optimizer(rule, {"w": jnp.ones((3, 4))})


@pytest.mark.long
@pytest.mark.of_bits
def test_held_roots_cost_sixteen_bits_each_time() -> None:
    weights = matrices()
    rule = hg.Shampoo(0.01, 0.9, 0.99, every=8)
    proof = hg.check_reversal(loss, weights, rule, batches(), steps=400)
    assert proof.exact
    factors = sum(n * (n + 1) // 2 for x in weights.values() for n in x.shape)
    entries = sum(x.size for x in weights.values())
    bits = -math.log2(0.9) - (math.log2(0.99) - 16 / 8) * factors / entries
    np.testing.assert_allclose(proof.ideal_bits_per_parameter_step, bits, rtol=1e-2)


def matrices(dtype: Any = jnp.float32) -> Any:
    return {k: x for k, x in params(dtype).items() if k.startswith("w")}


def one_matrix(dtype: Any = jnp.float32) -> Any:
    """Half of what the compiler has to do for two."""
    return {"w": jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)) * 0.3, dtype)}


def of_one(p: Any, _: Any, batch: Any) -> jax.Array:
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ p["w"]), y).mean()


@pytest.mark.long
@pytest.mark.of_bits
@pytest.mark.parametrize(
    ("loss", "weights", "every"), [(of_one, one_matrix, 5), long(loss, matrices, 1), long(loss, matrices, 5)]
)
def test_hypergradients_are_those_of_the_unrolled_run(loss: Any, weights: Any, every: int) -> None:
    """Through the roots: also in the exponent, the averages and the ridge. All values are on the grids of decays."""
    with jax.enable_x64(True):
        weights = weights(jnp.float64)
        rule = jax.tree.map(
            jnp.asarray, hg.Shampoo(2.0**-5, 0.875, 1 - 2.0**-5, 2.0**-3, 0.3, 2.0**-7, 2.0**-7, every=every)
        )

        def end(rule: hg.Shampoo, adjoint: Any) -> jax.Array:
            return hg.train(loss, weights, rule, batches(jnp.float64), steps=40, adjoint=adjoint).losses[-1]

        found = jax.jit(jax.grad(lambda rule: end(rule, hg.Reversible())))(rule)
        # An oracle need not have the bits of anything.
        oracle = jax.jit(jax.grad(lambda rule: end(rule, hg.Unrolled())), compiler_options=_quick.OPTIONS)
        expected = oracle(rule)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-8)
            assert x != 0
        hg.testing.check_hypergradient(
            lambda rule: end(rule, hg.Reversible()), rule, gradient=found, tolerance=1e-6, step=2.0**-14
        )


@pytest.mark.long
def test_a_constant_preconditioner_trains_alike_and_has_another_derivative() -> None:
    end = lambda b2, kind: hg.train(  # noqa: E731
        of_one, one_matrix(), hg.Shampoo(0.05, b2=b2, preconditioner=kind), batches(), steps=10
    ).losses[-1]
    assert end(0.9, "constant") == end(0.9, "differentiated")
    assert jax.grad(end)(0.9, "constant") == 0
    assert jax.grad(end)(0.9, "differentiated") != 0


@pytest.mark.parametrize("wrapped", [long(lambda rule: rule), lambda rule: hg.clip(rule, 1.0)])
def test_a_constant_preconditioner_is_named_in_the_status(wrapped: Any) -> None:
    for chosen, said in (("constant", ("hg.Shampoo's preconditioner is taken as constant",)), ("differentiated", ())):
        rule = wrapped(hg.Shampoo(0.1, preconditioner=chosen))
        run = hg.train(of_one, one_matrix(), hg.partition({"all": rule}, "all"), batches(), steps=2)
        assert run.status.approximate == said
        assert ("derivative approximate: hg.Shampoo's" in repr(run.status)) == bool(said)


def test_a_vector_has_a_diagonal_and_that_is_said_once() -> None:
    shampoo._say_once.cache_clear()
    vector = lambda w, _, __: jnp.sum(w**2)  # noqa: E731
    train = lambda: hg.train(vector, jnp.ones(3), hg.Shampoo(0.05), hg.full_batch(None), steps=2)  # noqa: E731
    with pytest.warns(UserWarning, match="leaves of fewer than two axes have a diagonal.*see hg.partition"):
        train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "`block_size` must be an int of at least 1; got 0"),
        ({"every": 0}, "`every` must be an int of at least 1; got 0"),
        ({"every": 2.5}, "`every` must be an int of at least 1; got 2.5"),
        ({"max_size": -1}, "`max_size` must be an int of at least 1; got -1"),
        ({"exponent": 0.0}, "`exponent` must be positive; got 0.0"),
        ({"exponent": -0.25}, "`exponent` must be positive; got -0.25"),
        ({"graft": "lamb"}, "`graft` must be one of 'none', 'sgd', 'adagrad', 'rmsprop', 'adam'; got 'lamb'"),
        ({"root": "svd"}, "`root` must be one of 'eigh', 'newton'; got 'svd'"),
        ({"preconditioner": "fixed"}, "`preconditioner` must be one of 'differentiated', 'constant'; got 'fixed'"),
        ({"root": "newton", "exponent": 0.5}, 'root="newton" has e = 1/\\(2n\\) alone; for an `exponent`, take root="eigh"'),
        ({"b2": None, "graft": "adam"}, "graft='adam' is made of averages: give `b2`, or take \"adagrad\""),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_errors(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hg.Shampoo(0.1, **options)


def test_what_belongs_to_a_leaf_is_one_value() -> None:
    rule = hg.Shampoo(0.1, b2={"w1": jnp.full((6, 12), 0.9), "w2": 0.9})
    with pytest.raises(
        ValueError, match=r"`b2` belongs to a whole leaf, as the factors do: one value.*got one for each of \(6, 12\)"
    ):
        hg.train(loss, matrices(), rule, batches(), steps=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "options"), [((0, 2), {"b2": None}), long((2, 3, 0), {"b2": None, "every": 2, "block_size": None})]
)
def test_a_leaf_without_entries_trains_beside_others(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    w, x = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)}, jnp.arange(12.0).reshape(4, 3) / 12
    loss = lambda p, theta, b: jnp.mean((b @ p["w"] - 1) ** 2) + sum(jnp.sum(v) for k, v in p.items() if k != "w")  # noqa: E731
    of = lambda params: hg.train(loss, params, hg.Shampoo(0.1, **options), hg.full_batch(x), steps=2)  # noqa: E731
    np.testing.assert_array_equal(of({**w, "none": jnp.zeros(shape)}).params["w"], of(w).params["w"])


def test_tiles_of_a_leaf_without_entries() -> None:
    for shape, size in itertools.product([(0,), (0, 2), (2, 3, 0), (0, 3, 2)], [None, 2]):
        own, none = tiles(shape, size, 8192), jnp.zeros(shape)
        assert own.leaf == shape and math.prod(own.merged) == 0
        assert own.times(own.squares(none), none).shape == shape
