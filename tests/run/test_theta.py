"""Theta as a step sees it: one value per step, rows by index, or the whole. All are the same derivative."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of

import hypergrad as hg
from hypergrad._problem import Problem
from hypergrad._set_up import set_up


STEPS, EXAMPLES = 9, 20
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(EXAMPLES, 3)), RNG.normal(size=EXAMPLES)
INDICES = RNG.integers(0, EXAMPLES, (STEPS, 6))
PARAMS = {"a": 0.1 * RNG.normal(size=(3, 4)), "b": RNG.normal(size=4)}
ADJOINTS = {
    "reversible": hg.Reversible(),
    "isolated": hg.Reversible(isolate=True),
    "host": hg.Reversible(driver="host"),
    "unrolled": hg.Unrolled(),
    "checkpointed": hg.Checkpointed(),
    "truncated": hg.Truncated(4),
}


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def one_hot(i: Any, n: int) -> jax.Array:
    return (jnp.asarray(i)[..., None] == jnp.arange(n)).astype(float)


Reader = Callable[[Any, Any, Any], tuple[Any, Any, Any]]  # (theta, indices, t) -> (pixels, weights, penalty)
BY_HAND: Reader = lambda th, i, t: (  # noqa: E731
    one_hot(i, EXAMPLES) @ th["x"],
    one_hot(i, EXAMPLES) @ th["weights"],
    one_hot(t, STEPS) @ th["penalty"],
)
BY_ROW: dict[str, Reader] = {
    "index": lambda th, i, t: (th["x"][i], th["weights"][i], th["penalty"][t]),
    "take": lambda th, i, t: (
        jnp.take(th["x"], i, axis=0),
        jnp.take(th["weights"], i),
        jax.lax.dynamic_index_in_dim(th["penalty"], t, keepdims=False),
    ),
    "two reads": lambda th, i, t: (
        (th["x"][i] + th["x"][i + 0]) / 2,
        th["weights"].at[i].get(mode="fill"),
        th["penalty"][t],
    ),
    "in a jit": lambda th, i, t: (jax.jit(lambda x, i: x[i])(th["x"], i), th["weights"][i], th["penalty"][t]),
    "of entries": lambda th, i, t: (
        jnp.stack([th["x"][i, k] for k in range(3)], 1),
        th["weights"][i],
        th["penalty"][t % STEPS],
    ),
}


def loss_of(reader: Reader) -> Any:
    def loss(w: Any, theta: Any, batch: Any) -> jax.Array:
        x, weights, penalty = reader(theta, *batch)
        error = (jnp.tanh(x @ w["a"]) @ w["b"] - jnp.asarray(Y)[batch[0]]) ** 2
        return jnp.mean(weights * error) + penalty * jnp.sum(w["a"] ** 2)

    return loss


def theta() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    given = {"x": X, "weights": 0.5 + rng.random(EXAMPLES), "penalty": 0.1 + 0.1 * rng.random(STEPS)}
    return jax.tree.map(jnp.asarray, given)


def batches(t: Any) -> Any:
    return jnp.asarray(INDICES)[t], t


def end(theta: Any, reader: Reader, adjoint: Any, rule: Any) -> jax.Array:
    run = hg.train(loss_of(reader), PARAMS, rule, batches, theta=theta, steps=STEPS, adjoint=adjoint)
    return jnp.sum(run.params["a"] ** 2) + run.losses[-2]


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference of a leaf, relative to the largest entry of the second."""
    differences = jax.tree.map(lambda x, y: float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))), ours, theirs)
    return max(jax.tree.leaves(differences))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("reversible", hg.SGD(0.1)),
        *(long(name, hg.SGD(0.1)) for name in ADJOINTS if name != "reversible"),
        *(long(name, hg.Adam(0.05)) for name in ADJOINTS),
    ],
)
def test_rows_have_the_derivative_of_the_whole(name: str, rule: Any) -> None:
    whole, rows = (jax.grad(end)(theta(), reader, ADJOINTS[name], rule) for reader in (BY_HAND, BY_ROW["index"]))
    assert apart(rows, whole) < 1e-11


@pytest.mark.long
@some_of("how", BY_ROW, "take")
def test_however_rows_are_read(how: str) -> None:
    assert {read.leaf for read in reads_in(BY_ROW[how])} == {0, 1, 2}
    whole, rows = (jax.grad(end)(theta(), reader, hg.Reversible(), hg.Adam(0.05)) for reader in (BY_HAND, BY_ROW[how]))
    assert apart(rows, whole) < 1e-11


def reads_in(reader: Reader) -> Any:
    """What the run that is made of such a loss reads by index."""
    run, *_ = set_up(Problem(loss_of(reader), PARAMS, hg.SGD(0.1), batches, theta(), STEPS))
    return run.functions.theta.reads


WHOLE = 2  # the leaf "x", the last by name


@some_of("name", ["reversible", "host", "unrolled", "truncated"])
def test_a_value_per_step_has_the_derivative_of_one_by_index(name: str) -> None:
    def marked(theta: Any) -> jax.Array:
        reader: Reader = lambda th, i, t: (th["x"][i], th["weights"][i], th["penalty"])  # noqa: E731
        return end({**theta, "penalty": hg.PerStep(theta["penalty"])}, reader, ADJOINTS[name], hg.Adam(0.05))

    whole = jax.grad(end)(theta(), BY_HAND, ADJOINTS[name], hg.Adam(0.05))
    assert apart(jax.grad(marked)(theta()), whole) < 1e-11
    if name in ("reversible", "truncated"):
        batched = jax.jit(jax.vmap(jax.grad(marked)))(jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), theta()))
        assert apart(jax.tree.map(lambda x: x[0], batched), whole) < 1e-11


@pytest.mark.long
def test_differences_agree_for_rows_and_steps() -> None:
    def f(s: Any) -> jax.Array:
        x, penalty = theta()["x"].at[INDICES[2, 0], 1].add(s), hg.PerStep(theta()["penalty"] + s)
        moved = {"x": x, "weights": theta()["weights"], "penalty": penalty}
        reader: Reader = lambda th, i, t: (th["x"][i], th["weights"][i], th["penalty"])  # noqa: E731
        return end(moved, reader, hg.Reversible(), hg.Adam(0.05))

    fine, coarse = ((f(h) - f(-h)) / (2 * h) for h in (5e-3, 1e-2))
    np.testing.assert_allclose(jax.grad(f)(0.0), (4 * fine - coarse) / 3, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "reader",
    [
        long(lambda th, i, t: (th["x"][i] + 0 * jnp.sum(th["x"]), th["weights"][i], th["penalty"][t])),  # and as a whole
        lambda th, i, t: (th["x"][jnp.argsort(th["weights"])][i], th["weights"][i], th["penalty"][t]),  # by what is learned
    ],
)
def test_what_is_not_read_by_the_batch_alone_is_taken_as_a_whole(reader: Any) -> None:
    assert WHOLE not in {read.leaf for read in reads_in(reader)}
    unrolled, ours = (
        jax.jit(jax.grad(lambda theta, name=name: end(theta, reader, ADJOINTS[name], hg.Adam(0.05))))(theta())
        for name in ("unrolled", "reversible")
    )
    assert apart(ours, unrolled) < 1e-11


@jax.custom_vjp
def reversed_gradient(x: jax.Array) -> jax.Array:
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))

OTHER_LOSSES: dict[str, Callable[[Any, Any, Any], jax.Array]] = {
    "a rule of its own": lambda w, x, i: jnp.mean((jnp.tanh(reversed_gradient(x[i] @ w["a"])) @ w["b"]) ** 2),
    "read in a loop": lambda w, x, i: jax.lax.scan(
        lambda sum, i: (sum + (jnp.tanh(x[i] @ w["a"]) @ w["b"]) ** 2, None), 0.0, i
    )[0],
    "read under vmap": lambda w, x, i: jnp.mean(jax.vmap(lambda i: (jnp.tanh(x[i] @ w["a"]) @ w["b"]) ** 2)(i)),
    "by what is trained": lambda w, x, i: jnp.mean((jnp.tanh(x[i + jnp.argmax(w["b"])] @ w["a"]) @ w["b"]) ** 2),
    "negative, clipped, twice": lambda w, x, i: jnp.mean(
        (jnp.tanh(x[-i] @ w["a"]) @ w["b"] + jnp.sum(x.at[i + EXAMPLES - 3].get(mode="clip"))) ** 2
    ),
    "written over": lambda w, x, i: jnp.mean((jnp.tanh(x.at[i[0]].set(0.0)[i] @ w["a"]) @ w["b"]) ** 2),
    "by a key": lambda w, x, i: jnp.mean(
        (jnp.tanh(x[jax.random.randint(jax.random.key(i[0]), (5,), 0, EXAMPLES)] @ w["a"]) @ w["b"]) ** 2
    ),
}


@pytest.mark.long
@some_of("name", OTHER_LOSSES, "a rule of its own")
def test_losses_that_read_otherwise(name: str) -> None:
    def f(x: jax.Array, adjoint: Any) -> jax.Array:
        run = hg.train(
            lambda w, x, batch: OTHER_LOSSES[name](w, x, batch[0]),
            PARAMS,
            hg.Adam(0.05),
            batches,
            theta=x,
            steps=STEPS,
            adjoint=adjoint,
        )
        return jnp.sum(run.params["a"] ** 2) + jnp.sum(run.losses)

    assert apart(*(jax.grad(f)(jnp.asarray(X), adjoint) for adjoint in (hg.Reversible(), hg.Unrolled()))) < 1e-11


def test_no_array_of_all_rows_is_made_in_a_step() -> None:
    """Of 5,000 rows: the loop adds to them in place, and makes none."""
    rows = jnp.zeros((5000, 3))
    loss = loss_of(lambda th, i, t: (th["x"][i], th["weights"][i], th["penalty"]))

    def f(x: jax.Array) -> jax.Array:
        given = {**theta(), "x": x, "penalty": 0.1}
        return jnp.sum(hg.train(loss, PARAMS, hg.SGD(0.1), batches, theta=given, steps=STEPS).params["b"])

    text = jax.jit(jax.grad(f)).lower(rows).as_text()
    adds = [line for line in text.splitlines() if "stablehlo.add" in line and "5000x3" in line]
    assert "stablehlo.scatter" in text and not adds


@pytest.mark.long
def test_a_reversal_with_both_is_certified() -> None:
    given = {**theta(), "penalty": hg.PerStep(theta()["penalty"])}
    loss = loss_of(lambda th, i, t: (th["x"][i], th["weights"][i], th["penalty"]))
    assert hg.check_reversal(loss, PARAMS, hg.Adam(0.05), batches, theta=given, steps=STEPS).exact


@pytest.mark.long
def test_half_precision_rows_add_up_in_single() -> None:
    given = jax.tree.map(lambda x: x.astype(jnp.bfloat16), theta())
    rows, whole = (jax.grad(end)(given, reader, hg.Reversible(), hg.SGD(0.1)) for reader in (BY_ROW["index"], BY_HAND))
    for x, y in zip(jax.tree.leaves(rows), jax.tree.leaves(whole), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=0.05, atol=0.02 * float(jnp.max(jnp.abs(y))))


def test_knots_may_stand_in_theta() -> None:
    loss = lambda w, th, _: jnp.sum(w**2) * th  # noqa: E731

    def f(values: jax.Array, spread: bool) -> jax.Array:
        schedule = hg.knots(values, 5) if spread else hg.PerStep(hg.knots(values, 5).per_step().values)
        return jnp.sum(hg.train(loss, jnp.ones(3), hg.SGD(0.1), hg.full_batch(None), theta=schedule, steps=5).params)

    assert apart(*(jax.grad(f)(jnp.array([0.1, 0.3]), spread) for spread in (True, False))) < 1e-11


@pytest.mark.parametrize(
    ("theta", "message"),
    [
        ({"l2": hg.PerStep(jnp.ones(4))}, r"theta\['l2'\] is hg.PerStep of shape \(4,\); its leading axis must be steps=3"),
        (
            {"l2": hg.PerStep([0.1, 0.2, 0.3])},
            r"shape \(\); its leading axis must be steps=3. A list is a tree of its entries",
        ),
        ({"l2": jnp.ones(3)}, r"got shape \(3,\). theta\['l2'\] has a leading axis of steps=3: hg.PerStep\(theta\['l2'\]\)"),
        ({"l2": hg.PerStep(jnp.arange(3))}, r"theta\['l2'\] is hg.PerStep of .*int.*; it must be of float arrays"),
    ],
)
def test_what_does_not_fit_is_said(theta: Any, message: str) -> None:
    loss = lambda w, th, _: jnp.sum(w**2) * th["l2"]  # noqa: E731
    with pytest.raises((ValueError, TypeError), match=message):
        hg.train(loss, jnp.ones(3), hg.SGD(0.1), hg.full_batch(None), theta=theta, steps=3)


def test_a_mark_is_no_array() -> None:
    schedule = hg.PerStep(jnp.ones(3))
    for misused in (lambda: 2 * schedule, lambda: schedule[0], lambda: -schedule, lambda: float(schedule)):
        with pytest.raises(TypeError, match=r"PerStep\(.*no arithmetic.*`.values\[t\]`"):
            misused()


def test_a_start_before_the_first_row_is_clamped_as_jax_does() -> None:
    """What is negative in a slice's equation has been counted from the end already, or is not to be."""

    def of(theta: Any, i: Any) -> jax.Array:
        first = jax.lax.dynamic_slice(theta, (i,), (1,), allow_negative_indices=False)[0]
        return first + 2 * theta[i - 4]  # from -2 n to -n: the first row as well

    rows, starts = jnp.arange(10.0, 14.0), jnp.arange(-3, 0)
    run = lambda theta: hg.train(  # noqa: E731
        lambda w, theta, i: of(theta, i) * jnp.sum(w**2), jnp.ones(1), hg.SGD(0.0), lambda t: t - 3, theta=theta, steps=3
    )
    np.testing.assert_array_equal(run(rows).losses, [of(rows, i) for i in starts])
    found, expected = (
        jax.grad(f)(rows) for f in (lambda x: jnp.sum(run(x).losses), lambda x: sum(of(x, i) for i in starts))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)
