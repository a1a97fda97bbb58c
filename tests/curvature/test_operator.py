"""Products, traces, eigenvalues and inverses are those of the matrix, written out."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from jax.flatten_util import ravel_pytree
from networks import N, convolution, dense, ggn, gradients, hessian

from hypergrad.curvature import Operator, quantities


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def empirical(net: Any) -> Any:
    flat = jax.vmap(lambda g: ravel_pytree(g)[0])(gradients(net))
    return flat.T @ flat / N


MATRICES = {"ggn": ggn, "fisher": ggn, "hessian": hessian, "empirical_fisher": empirical}


def operator(matrix: str, **options: Any) -> Any:
    net = dense()
    return Operator(net.loss, net.params, None, net.batch, matrix, **options)


@some_of("matrix", MATRICES, "ggn")
def test_products_and_diagonals(matrix: str) -> None:
    found, exact = operator(matrix), MATRICES[matrix](dense())
    v = jnp.asarray(np.random.default_rng(0).normal(size=found.shape[0]))
    np.testing.assert_allclose(found @ v, exact @ v, atol=1e-12)
    np.testing.assert_allclose(ravel_pytree(found @ ravel_pytree(dense().params)[1](v))[0], exact @ v, atol=1e-12)
    np.testing.assert_allclose(found.diagonal(), jnp.diag(exact), atol=1e-12)


def test_streamed_batches_count_by_their_examples() -> None:
    net = dense()
    parts = [jax.tree.map(lambda x, s=s: x[s], net.batch) for s in (slice(0, 2), slice(2, N))]
    found = Operator(net.loss, net.params, None, parts, "ggn", many=True)
    v = jnp.ones(found.shape[0])
    np.testing.assert_allclose(found @ v, ggn(net) @ v, atol=1e-12)
    with pytest.raises(TypeError, match="gone through once only; give a list"):
        Operator(net.loss, net.params, None, iter(parts), many=True)


def test_eigenvalues_inverse_and_trace() -> None:
    found, exact = operator("ggn"), np.asarray(ggn(dense()))
    values, vectors = found.top_eigenvalues(3)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(exact)[::-1][:3], rtol=1e-5)
    np.testing.assert_allclose(exact @ vectors, vectors * values, atol=1e-5)
    v = jnp.ones(found.shape[0])
    np.testing.assert_allclose(found.inverse(0.1)(v), np.linalg.solve(exact + 0.1 * np.eye(len(v)), v), rtol=1e-4)
    trace, error = found.trace(jax.random.key(0), 64, method="hutchinson")
    assert abs(float(trace) - np.trace(exact)) < 4 * float(error)


def test_xtrace_leaves_out_each_sign_vector_in_turn() -> None:
    found, exact, key = operator("ggn"), np.asarray(ggn(dense())), jax.random.key(3)
    signs = np.asarray(jax.random.rademacher(key, (len(exact), 6), jnp.float64))
    estimates = []
    for i in range(6):
        q, _ = np.linalg.qr(exact @ np.delete(signs, i, 1))
        rest = signs[:, i] - q @ (q.T @ signs[:, i])
        estimates.append(np.trace(q.T @ exact @ q) + rest @ exact @ rest)
    trace, error = found.trace(key, 12)
    np.testing.assert_allclose(trace, np.mean(estimates), rtol=1e-9)
    np.testing.assert_allclose(error, np.std(estimates, ddof=1) / 6**0.5, rtol=1e-6)
    assert float(error) < 0.5 * float(found.trace(key, 12, method="hutchinson")[1])


def factored(net: Any) -> Any:
    """The matrix of KFLR, written out, and Q of its eigenvectors, block by block."""
    found = quantities(net.loss, net.params, None, net.batch, "kflr")["kflr"]
    orders = {"w": lambda w: w, "v": lambda w: w.T, "b": lambda b: b[None], "c": lambda c: c[None]}
    blocks = {}
    for name, w in net.params.items():
        a = np.eye(1) if found[name].a is None else np.asarray(found[name].a[0])
        places = np.asarray(orders[name](np.arange(w.size).reshape(w.shape))).reshape(-1)
        turn = np.kron(np.linalg.eigh(a)[1], np.linalg.eigh(found[name].b[0])[1])[np.argsort(places)]
        blocks[name] = np.kron(a, found[name].b[0])[np.argsort(places)][:, np.argsort(places)], turn
    return tuple(jax.scipy.linalg.block_diag(*(blocks[name][i] for name in sorted(blocks))) for i in range(2))


@some_of("matrix", ["kflr", "ekflr"], "ekflr")
def test_in_factors(matrix: str) -> None:
    net = dense()
    found, (exact, q) = operator(matrix), factored(net)
    if matrix == "ekflr":  # the best diagonal in these eigenvectors
        exact = q @ np.diag(np.diag(q.T @ ggn(net) @ q)) @ q.T
    v = jnp.asarray(np.random.default_rng(0).normal(size=len(exact)))
    np.testing.assert_allclose(found @ v, exact @ v, atol=1e-12)
    np.testing.assert_allclose(found.diagonal(), np.diag(exact), atol=1e-12)
    np.testing.assert_allclose(found.inverse(0.1)(v), np.linalg.solve(exact + 0.1 * np.eye(len(v)), v), rtol=1e-9)
    np.testing.assert_allclose(found.trace(jax.random.key(0))[0], np.trace(exact), rtol=1e-12)
    moved = found.inverse(0.1)(jax.tree.map(jnp.ones_like, net.params))
    np.testing.assert_allclose(ravel_pytree(moved)[0], found.inverse(0.1)(jnp.ones(len(v))), rtol=1e-12)


@pytest.mark.long
@some_of("network", [dense, convolution], dense)
def test_factors_of_streamed_batches_are_averages(network: Any) -> None:
    net = network()
    parts = [jax.tree.map(lambda x, s=s: x[s], net.batch) for s in (slice(0, 2), slice(2, N))]
    of = lambda batches, **options: Operator(net.loss, net.params, None, batches, **options)  # noqa: E731
    whole, streamed = of(net.batch, matrix="ekflr"), of(parts, matrix="ekflr", many=True)
    v = jnp.ones(whole.shape[0])
    np.testing.assert_allclose(streamed @ v, whole @ v, atol=1e-10)
    drawn = of(net.batch, matrix="ekfac", key=jax.random.key(0))
    assert abs(float(drawn.trace(jax.random.key(0))[0] / whole.trace(jax.random.key(0))[0]) - 1) < 0.5


@some_of("matrix", ["kflr", "ekflr"], "ekflr")
def test_blocks_of_a_weight_that_is_used_in_half_precision_are_linear(matrix: str) -> None:
    """Its vectors do not go through the conversion: float16 ends at 6e-8 and at 65504."""
    w, x, y = (jnp.asarray(np.random.default_rng(0).normal(size=s), jnp.float32) for s in ((3, 2), (4, 3), (4, 2)))
    short = lambda w, theta, b: jnp.mean((b[0].astype(jnp.float16) @ w.astype(jnp.float16) - b[1]) ** 2)  # noqa: E731
    found = Operator(short, w, None, (x, y), matrix)
    v = jnp.linspace(0.1, 1.1, 6, dtype=jnp.float32)
    expected = Operator(mean, w, None, (x, y), matrix) @ v
    for scale in (1e-9, 1.0, 1e6):
        np.testing.assert_allclose((found @ (scale * v)) / scale, expected, rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose((found @ (scale * v)) / scale, found @ v, rtol=1e-4)


@some_of("matrix", ["ggn", "hessian", "kflr"], "kflr")
def test_means_of_half_precision_fit_where_sums_do_not(matrix: str) -> None:
    x = jnp.asarray(8 * np.random.default_rng(0).normal(size=(2000, 3)), jnp.float32)
    loss = lambda w, theta, x: jnp.mean(jnp.sum((x * w.astype(jnp.float32)) ** 2, axis=1))  # noqa: E731
    w = jnp.ones(3)
    short, long = (Operator(loss, w.astype(dtype), None, x, matrix) for dtype in (jnp.float16, jnp.float32))
    v = np.ones(3, np.float32)
    assert float(jnp.min(2000 * (long @ v))) > 65504
    np.testing.assert_allclose(short @ v.astype(np.float16), long @ v, rtol=1e-2)
    np.testing.assert_allclose(short.diagonal(), long.diagonal(), rtol=1e-2)


def test_sampled_products_average_to_the_exact_one() -> None:
    v, draws = jnp.ones(operator("ggn").shape[0]), 400
    one = jax.jit(lambda key: operator("fisher_mc", key=key) @ v)
    found = jnp.stack([one(key) for key in jax.random.split(jax.random.key(0), draws)])
    error = np.std(found, 0) / draws**0.5
    assert np.mean(np.abs(np.mean(found, 0) - ggn(dense()) @ v) < 3 * error + 1e-12) > 0.95


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: operator("shampoo"), "`matrix` must be one of hessian, ggn"),
        (lambda: operator("ekfac"), "'ekfac' draws labels of the model: give it a `key`"),
        (lambda: operator("ggn").trace(jax.random.key(0), 2), "`samples` must be at least 4; got 2"),
        (lambda: operator("ggn").trace(jax.random.key(0), method="hutch++"), "`method` must be 'xtrace' or 'hutchinson'"),
        (lambda: operator("fisher_mc"), "'fisher_mc' draws labels of the model: give it a `key`"),
        (lambda: operator("ggn").inverse(-1.0), "`damping` must not be negative"),
        (lambda: operator("ggn").top_eigenvalues(0), "`k` must be at least 1"),
        (lambda: operator("ggn") @ jnp.ones(3), "a product takes a pytree like `params`"),
        (lambda: operator("fisher_mc", key=jax.random.key(0)).diagonal(), "has no exact diagonal here"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@some_of("count", [1, 2, 5], 1)
def test_the_trace_of_few_parameters_is_exact(count: int) -> None:
    batch = jax.random.normal(jax.random.key(0), (6, count)), jax.random.normal(jax.random.key(1), (6,))
    loss = lambda p, _, b: jnp.mean((jnp.tanh(b[0] @ p) - b[1]) ** 2)  # noqa: E731
    operator = Operator(loss, jnp.linspace(0.1, 0.5, count), None, batch, "ggn")
    trace, error = operator.trace(jax.random.key(2))
    np.testing.assert_allclose(trace, jnp.sum(operator.diagonal()), rtol=1e-5)
    assert error == 0


X, Y = (np.random.default_rng(0).normal(size=(4, n)) for n in (3, 2))


def mean(w: Any, theta: Any, batch: Any) -> Any:
    return jnp.mean((batch[0] @ w - batch[1]) ** 2)


def of_tiny(matrix: str = "ggn", batch: Any = (X, Y), loss: Any = mean, **options: Any) -> Operator:
    return Operator(
        loss, jnp.asarray(np.arange(6.0).reshape(3, 2)), None, jax.tree.map(jnp.asarray, batch), matrix, **options
    )


def normalized(w: Any, theta: Any, batch: Any) -> Any:
    z = batch[0] @ w
    return jnp.mean(((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-3) - batch[1]) ** 2)


@pytest.mark.parametrize("matrix", ["hessian", "ggn", "empirical_fisher"])
def test_a_loss_that_is_no_mean_has_no_operator(matrix: str) -> None:
    for loss in (lambda *x: 4 * mean(*x) * len(x[2][0]), normalized):
        with pytest.raises(ValueError, match="`loss` is no mean over the examples"):
            of_tiny(matrix, [(X, Y)], loss=loss, many=True)
        with pytest.raises(ValueError, match="`loss` is no mean over the examples"):
            of_tiny(matrix, loss=loss).diagonal()
    with pytest.raises(ValueError, match="`loss` is no mean over the examples"):  # a sum over one example is its mean
        of_tiny(matrix, [(X[:1], Y[:1]), (X, Y)], lambda *x: mean(*x) * len(x[2][0]), many=True)


def test_the_hessian_of_one_batch_is_that_of_any_loss() -> None:
    found, w = of_tiny("hessian", loss=normalized), jnp.arange(6.0)
    exact = jax.jit(jax.hessian(lambda w: normalized(w.reshape(3, 2), None, (X, Y))))(w)
    np.testing.assert_allclose(found @ jnp.eye(6), exact, atol=1e-12)
    np.testing.assert_allclose(found.inverse(9.0)(w), np.linalg.solve(exact + 9 * np.eye(6), w), rtol=1e-4, atol=1e-6)


@some_of("scale", [1e-30, 1e30], 1e-30)
def test_the_inverse_is_linear_however_small_or_large(scale: float) -> None:
    """And so are its derivatives: in float32, where such squares are zero or infinite."""
    single = Operator(mean, jnp.ones((3, 2), jnp.float32), None, (jnp.float32(X), jnp.float32(Y)))
    solve, v = single.inverse(0.1), jnp.arange(6, dtype=jnp.float32)
    expected = np.linalg.solve(np.asarray(single @ jnp.eye(6)) + 0.1 * np.eye(6), v)
    pulled = jax.grad(lambda x: jnp.vdot(scale * v, solve(x)))(v)
    for found in (solve(scale * v), pulled, jax.jvp(solve, (v,), (scale * v,))[1]):
        np.testing.assert_allclose(found / scale, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(solve(0 * v), 0)


def test_conjugate_gradients_that_did_not_converge_are_no_solution() -> None:
    singular, v = of_tiny(batch=(X[:1], Y[:1])), jnp.ones(6)
    with pytest.raises(FloatingPointError, match="did not converge: their residual is .* raise `damping`"):
        singular.inverse(0.0)(v)
    assert jnp.isnan(jax.jit(singular.inverse(0.0))(v)).all()
    assert jnp.isnan(jax.grad(lambda x: jnp.sum(singular.inverse(0.0)(x)))(0 * v)).all()
    with pytest.raises(FloatingPointError, match="or `steps`, or allow a larger `tolerance`"):
        singular.inverse(0.0)(v)
    for tolerance in (1e-6, 1.0):  # told to stop, they stop
        assert jnp.isfinite(of_tiny().inverse(0.0, tolerance=tolerance, steps=1)(v)).all()


def test_damping_may_be_traced_and_of_any_type() -> None:
    single = Operator(mean, jnp.ones((3, 2), jnp.float32), None, (jnp.float32(X), jnp.float32(Y)), "ggn")
    v, expected = jnp.ones(6, jnp.float32), single.inverse(0.1)(jnp.ones(6, jnp.float32))
    np.testing.assert_allclose(jax.jit(lambda d: single.inverse(d)(v))(0.1), expected, rtol=1e-5)
    np.testing.assert_allclose(single.inverse(np.float64(0.1))(v), expected, rtol=1e-5)


@some_of("matrix", ["hessian", "ggn", "kflr"], "ggn", "kflr")
def test_vectors_of_any_real_type(matrix: str) -> None:
    single = Operator(mean, jnp.ones((3, 2), jnp.float32), None, (jnp.float32(X), jnp.float32(Y)), matrix)
    for v in (np.ones(6), np.ones(6, int), jnp.ones(6, jnp.bfloat16)):
        assert (single @ v).dtype == jnp.float32
        np.testing.assert_array_equal(single @ v, single @ jnp.ones(6, jnp.float32))
    solve = single.inverse(0.1)
    np.testing.assert_array_equal(solve(np.ones(6)), solve(jnp.ones(6, jnp.float32)))
    np.testing.assert_allclose(single @ solve(np.eye(6)) + 0.1 * solve(np.eye(6)), np.eye(6), atol=1e-4)
    with pytest.raises(TypeError, match="a product takes real numbers"):
        single @ np.ones(6, complex)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: of_tiny(loss=lambda w, t, b: mean(jnp.sin(w).sum() * w / w, t, b)),
            "'ggn' needs to know where the model ends",
        ),
        (lambda: of_tiny(batch=[], many=True), "`batches` is empty"),
        (lambda: of_tiny("kflr", [], many=True), "`batches` is empty"),
        (lambda: of_tiny(batch=(X, Y[:2])), "must have the examples as its leading axis"),
        (lambda: of_tiny(batch=(X, 1.0)), "must have the examples as its leading axis"),
        (lambda: of_tiny(batch=(X[:0], Y[:0])), "`batch` has no examples"),
    ],
)
def test_what_has_no_operator(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
