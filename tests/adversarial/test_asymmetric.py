"""Losses whose "gradient" is the gradient of nothing: derivative rules of their own make a field whose Jacobian is not
symmetric. The transposed product is then not the product, for weights and theta alike.

The oracle is `hg.Unrolled`, which shares no derivative code with `hg.Reversible`, in float64.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of

import hypergrad as hg
from hypergrad import _programs as programs
from hypergrad import _trace


DATA = np.random.default_rng(1).normal(size=(12, 4))
TARGETS, DOMAINS = np.sin(DATA[:, 0]), (DATA[:, 1] > 0) * 1.0
RNG = np.random.default_rng(2)
WEIGHTS = {"features": RNG.normal(size=(4, 3)), "labels": RNG.normal(size=3), "domains": RNG.normal(size=3)}
BATCHES = hg.full_batch(np.zeros(1))


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@jax.custom_vjp
def reversed_gradient(x: Any, strength: Any) -> Any:
    """Ganin and Lempitsky 2015."""
    return x


reversed_gradient.defvjp(lambda x, s: (x, s), lambda s, ct: (-s * ct, jnp.zeros_like(s)))


@jax.custom_vjp
def clipped_gradient(x: Any, bound: Any) -> Any:
    return x


clipped_gradient.defvjp(lambda x, c: (x, c), lambda c, ct: (jnp.clip(ct, -c, c), jnp.zeros_like(c)))


@jax.custom_jvp
def scaled_gradient(x: Any, scale: Any) -> Any:
    return x


scaled_gradient.defjvp(lambda primals, tangents: (primals[0], primals[1] * tangents[0]))


@jax.custom_vjp
def quantized(x: Any, step: Any) -> Any:
    """Straight through for x, with a learned step size (Esser et al. 2020)."""
    return jnp.round(x / step) * step


quantized.defvjp(
    lambda x, s: (quantized(x, s), (x, s)),
    lambda saved, ct: (ct, jnp.sum(ct * (jnp.round(saved[0] / saved[1]) - saved[0] / saved[1]))),
)

# The functions are JAX's, the rules are not.
half_product = jax.custom_jvp(jnp.matmul)
half_product.defjvp(lambda p, t: (p[0] @ p[1], 0.5 * t[0] @ p[1]))
one_sided_product = jax.custom_jvp(jnp.matmul)
one_sided_product.defjvps(lambda t, out, x, y: 0.5 * t @ y, None)


def equilibrium(x: Any, strength: Any) -> Any:
    """z = tanh(x + strength roll(z)), whose derivative skips the inverse of the Jacobian (Fung et al. 2022)."""

    def solve(f: Any, z: Any) -> Any:
        for _ in range(4):
            z = z - f(z)
        return z

    f = lambda z: z - jnp.tanh(x + strength * jnp.roll(z, 1, axis=-1))  # noqa: E731
    return jax.lax.custom_root(f, jnp.zeros_like(x), solve, lambda g, y: y)


def labels(w: Any, features: Any) -> Any:
    return jnp.mean((features @ w["labels"] - TARGETS) ** 2)


def of_features(field: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A loss in which `field`, which has a derivative rule of its own, stands between features and one head."""

    def loss(w: Any, theta: Any, batch: Any) -> Any:
        x = jnp.tanh(DATA @ w["features"])
        other = jax.nn.sigmoid(field(x, theta) @ w["domains"])
        return labels(w, x) + jnp.mean((other - DOMAINS) ** 2)

    return loss


LOSSES = {
    "reversed": of_features(reversed_gradient),
    "clipped": of_features(lambda x, theta: clipped_gradient(x, theta / 100)),
    "scaled": of_features(scaled_gradient),
    "quantized": of_features(quantized),
    "a rule for a function of JAX": of_features(lambda x, theta: half_product(x, theta * jnp.eye(3) + x[:3])),
    "rules for its arguments": of_features(lambda x, theta: one_sided_product(x, theta * jnp.eye(3) + x[:3])),
    "custom_root": of_features(equilibrium),
    "stop_gradient": of_features(lambda x, theta: x * theta + jax.lax.stop_gradient(jnp.round(x) - x) * theta),
}
REVERSED = LOSSES["reversed"]


def objective(inputs: Any, loss: Any, optimizer: Any, adjoint: Any, **options: Any) -> Any:
    """Of all that training returns; inputs: what is differentiated."""
    if "statistics" in inputs:
        options["statistics"] = hg.Statistics(inputs["statistics"], inputs["decay"])
    run = hg.train(
        loss,
        inputs["params"],
        optimizer(inputs["rate"]),
        BATCHES,
        theta=inputs["theta"],
        steps=8,
        adjoint=adjoint,
        **options,
    )
    leaves = jax.tree.leaves((run.params, run.state, run.statistics))
    return sum(jnp.sum(jnp.sin(x)) for x in leaves) + jnp.sum(jnp.cos(run.losses))


def inputs(theta: float = 0.7) -> dict[str, Any]:
    return {"params": jax.tree.map(jnp.asarray, WEIGHTS), "rate": jnp.asarray(0.3), "theta": jnp.asarray(theta)}


def assert_same(ours: Any, stored: Any) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(stored), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11, err_msg=jax.tree_util.keystr(path))


def assert_roads_agree(loss: Any, optimizer: Any, given: Any) -> None:
    roads = [jax.grad(lambda i, a=a: objective(i, loss, optimizer, a))(given) for a in (hg.Reversible(), hg.Unrolled())]
    assert_same(*roads)


@some_of("name", LOSSES, "reversed")
def test_a_field_that_is_no_gradient(name: str) -> None:
    assert_roads_agree(LOSSES[name], lambda rate: hg.SGD(rate, 0.75), inputs())


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    [
        long(lambda rate: hg.HeavyBall(rate, 0.75), id="HeavyBall"),
        pytest.param(lambda rate: hg.Adam(rate / 10), id="Adam"),
        long(lambda rate: hg.clip(hg.SGD(rate, 0.75), 0.05), id="clip"),
    ],
)
def test_by_every_kind_of_rule(optimizer: Any) -> None:
    assert_roads_agree(REVERSED, optimizer, inputs())


@pytest.mark.long
def test_beside_statistics() -> None:
    def loss(w: Any, theta: Any, batch: Any) -> Any:
        x = reversed_gradient(jnp.tanh(DATA @ w["features"]), theta)
        return REVERSED(w, theta, batch), jnp.mean(x, axis=0)

    given = inputs() | {"statistics": jnp.full(3, 0.1), "decay": jnp.asarray(0.5)}
    assert_roads_agree(loss, lambda rate: hg.SGD(rate, 0.75), given)


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(lambda rate: hg.SGD(rate, 0.75), id="SGD"), long(lambda rate: hg.Adam(rate / 10), id="Adam")],
)
def test_a_rule_that_is_not_linear_has_all_cotangents_at_once(optimizer: Any) -> None:
    """What clips a sum is not the sum of what is clipped: those of gradient, loss and statistics come together."""

    def loss(w: Any, theta: Any, batch: Any) -> Any:
        total = labels(w, jnp.tanh(DATA @ w["features"])) + clipped_gradient(theta, 0.01)
        return total + jnp.sin(2 * total), jnp.tanh(total * jnp.arange(1.0, 4.0))

    assert_roads_agree(loss, optimizer, inputs() | {"statistics": jnp.full(3, 0.1), "decay": jnp.asarray(0.5)})


@pytest.mark.long
def test_compiled_and_batched() -> None:
    gradient = lambda a: jax.grad(lambda i: objective(i, REVERSED, lambda rate: hg.SGD(rate, 0.75), a))  # noqa: E731
    lanes = jax.tree.map(lambda x: jnp.stack([x, 0.9 * x]), inputs())
    ours, stored = (jax.jit(jax.vmap(gradient(a)))(lanes) for a in (hg.Reversible(), hg.Unrolled()))
    assert_same(ours, stored)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Programs by a lie are found by nobody who does not lie."""
    programs._PROGRAMS.clear()
    yield
    programs._PROGRAMS.clear()


def test_an_asymmetry_that_no_program_foretold_is_found(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    monkeypatch.setattr(_trace, "_symmetric", lambda jaxpr: True)
    arguments = (REVERSED, inputs()["params"], hg.SGD(0.3, 0.75), BATCHES)
    with pytest.raises(hg.HypergradError, match=r"not symmetric: J u and J\^T u differ by .*hg.Unrolled"):
        hg.check_reversal(*arguments, theta=0.7, steps=4)


@pytest.mark.long
def test_a_diagnosis_finds_it_too(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    monkeypatch.setattr(_trace, "_symmetric", lambda jaxpr: True)
    arguments = (REVERSED, inputs()["params"], hg.SGD(0.3, 0.75), BATCHES)

    def train_fn(h: Any, key: Any) -> Any:
        return hg.train(*arguments, theta=h["theta"], steps=4).params

    with pytest.raises(hg.HypergradError, match="not symmetric"):
        hg.diagnose(train_fn, lambda w: jnp.sum(w["labels"] ** 2), {"theta": 0.7}, jax.random.key(0))


@pytest.mark.long
def test_symmetric_losses_are_not_accused() -> None:
    loss = of_features(lambda x, theta: jax.nn.silu(theta * x))
    assert hg.check_reversal(loss, inputs()["params"], hg.SGD(0.3, 0.75), BATCHES, theta=0.7, steps=4).exact
    assert _trace._symmetric(jax.make_jaxpr(loss)(inputs()["params"], 0.7, None).jaxpr)


@pytest.mark.of_bits
@some_of("scale", [10, 100])
def test_a_loss_that_has_come_to_zero_is_not_accused(scale: float) -> None:
    """In float32, J of saturated outputs is nothing but roundings, other ones in J u and in J^T u."""
    rng = np.random.default_rng(0)
    x, a, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((30, 6), (6, 8), (8, 4)))
    w = {"a": a * scale**0.5, "b": b * scale**0.5}

    def outputs(w: Any) -> Any:
        return jnp.tanh(x @ w["a"]) @ w["b"]

    labels = jnp.argmax(outputs(w), axis=1)

    def loss(w: Any, _: Any, __: Any) -> Any:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scale * outputs(w)), labels[:, None], axis=1))

    assert hg.check_reversal(loss, w, hg.HeavyBall(1e-3, 0.9), hg.full_batch(None), steps=5).exact


def triangle(w: Any, theta: Any, _: Any) -> Any:
    """Of a matrix that is not symmetric the value reads one triangle, and JAX's derivative both."""
    return jnp.sum(jax.scipy.linalg.cholesky(w + theta * jnp.eye(2), lower=True) ** 3)


def survival(w: Any, theta: Any, _: Any) -> Any:
    """JAX has its second derivative in w and in both, and none in theta."""
    return jnp.sum(jax.scipy.special.gammainc(theta, 1.0 + w**2))


ONE_SIDED = {"cholesky": (triangle, [[2.0, 0.3], [0.3, 1.5]]), "gammainc": (survival, [0.3, 0.7])}


@pytest.mark.parametrize("name", ONE_SIDED)
def test_what_jax_has_one_product_of(name: str) -> None:
    loss, start = ONE_SIDED[name]

    def end(rate: Any, theta: Any, adjoint: Any) -> Any:
        run = hg.train(loss, jnp.array(start), hg.SGD(rate, 0.5), BATCHES, theta=theta, steps=5, adjoint=adjoint)
        return jnp.sum(jnp.sin(run.params) * jnp.arange(1.0, run.params.size + 1).reshape(run.params.shape))

    found, expected = (jax.grad(end, (0, 1))(0.1, 1.0, adjoint) for adjoint in (hg.Reversible(), hg.Unrolled()))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_rule_of_a_rule_that_has_changed_is_another_program() -> None:
    """Where no second derivative can be traced, programs are told apart by the first: it does not show what the rule of a
    rule does."""
    strength = [1.0]
    square = jax.custom_jvp(lambda x: x**2)
    square.defjvp(lambda primals, tangents: (square(primals[0]), strength[0] * primals[0] * tangents[0]))
    cube = jax.custom_jvp(lambda x: x**3)
    cube.defjvp(lambda primals, tangents: (cube(primals[0]), square(primals[0]) * tangents[0]))
    loss = lambda w, theta, _: jnp.sum(cube(w)) + survival(w, theta, _)  # noqa: E731
    end = lambda w: jnp.sum(hg.train(loss, w, hg.SGD(0.1, 0.5), BATCHES, theta=1.5, steps=3).params)  # noqa: E731
    slopes = []
    for strength[0] in (1.0, 3.0):  # noqa: B007
        slopes.append(jax.grad(end)(jnp.array([0.3, 0.7])))
    assert np.abs(slopes[0] - slopes[1]).max() > 1e-2
