"""What `prepare` and `begin` return counts as it says, or is refused in words; Adam's bound holds only where it is one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer, Transformed
from hypergrad.optimizers.lay_out import lay_out, shared


BATCHES = hg.full_batch(jnp.zeros(1))
ADJOINTS = pytest.mark.parametrize("adjoint", [hg.Reversible(), long(hg.Unrolled())])


def loss(w: Any, _: Any, batch: Any) -> jax.Array:
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(w)) / 2


class Ball(Optimizer):
    """v <- m v - g;  w <- w + a c v."""

    learning_rate: Any
    momentum: Any = 0.5

    chain = (
        Link("velocity", lambda h, z, g: -g, decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * getattr(h, "c", 1.0) * z.velocity),
    )


def by_hand(w: float, v: float, momentum: float, c: Any) -> float:
    for factor in c:
        v = momentum * v - w
        w += 0.1 * factor * v
    return w


def of_prepare(made: Any, **members: Any) -> type[Ball]:
    """A rule whose `prepare` adds what `made` makes of the number of steps."""
    prepare = lambda self, h, steps: {**h, **made(steps)}  # noqa: E731
    return type("Made", (Ball,), {"__module__": __name__, "__annotations__": {}, "prepare": prepare, **members})


class BySign(Ball):
    """Decays of a leaf by the sign of what it begins with."""

    def begin(self, h: Any, z: Any) -> Any:
        return {**h, "momentum": jnp.where(jnp.max(z["velocity"]) > 0, 0.5, 0.875 + 1e-7) * jnp.ones_like(h["momentum"])}


@ADJOINTS
def test_a_decay_that_begin_makes_is_that_of_its_own_leaf(adjoint: Any) -> None:
    with jax.enable_x64(True):
        params, velocity = {"a": jnp.ones(2), "b": jnp.ones((2, 3))}, {"a": jnp.ones(2), "b": -jnp.ones((2, 3))}
        run = hg.train(loss, params, BySign(0.1), BATCHES, steps=2, state={"velocity": velocity}, adjoint=adjoint)
    np.testing.assert_allclose(run.params["a"], by_hand(1.0, 1.0, 0.5, [1, 1]), atol=1e-9)
    np.testing.assert_allclose(run.params["b"], by_hand(1.0, -1.0, 0.875, [1, 1]), atol=1e-9)


def test_decays_that_begin_takes_from_fields_share_their_schedules() -> None:
    params = {"a": jnp.ones((40, 40)), "b": jnp.ones((3, 4, 50)), "c": jnp.ones(30)}
    state = {name: jax.tree.map(jnp.ones_like, params) for name in ("mean", "square")}
    out = lay_out(hg.ADOPT(0.1), params, 3, state, None, unbounded=False)
    assert len(out.blocks) > 1 and len(set(shared(out.blocks, out.alike))) == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda h: None, "Ball.begin must return a dict"),
        (lambda h: {"learning_rate": h["learning_rate"]}, "Ball.begin leaves out momentum, which `prepare` returned"),
        (lambda h: {**h, "c": jnp.ones(2)}, r"Ball.begin: 'c' has shape \(2,\); its first axis must be steps=3"),
    ],
)
def test_what_begin_must_return(monkeypatch: pytest.MonkeyPatch, returned: Any, message: str) -> None:
    monkeypatch.setattr(Ball, "begin", lambda self, h, z: returned(h))
    with pytest.raises((TypeError, ValueError), match=message):
        hg.train(loss, jnp.ones(2), Ball(0.1), BATCHES, steps=3, state={"velocity": jnp.ones(2)})


@pytest.mark.parametrize(
    ("c", "message"),
    [
        (lambda steps: 1.0 + jnp.arange(steps + 1), r"Made.prepare: 'c' has shape \(4,\); its first axis must be steps=3"),
        (lambda steps: jnp.ones(steps - 1), r"'c' has shape \(2,\)"),
        (lambda steps: jnp.ones((1, 2, 2)), r"gives 'c' the shape \(1, 2, 2\) for params.*broadcast.*\(2,\)"),
        (lambda steps: None, "'c' must be a real number or an array of them; got NoneType"),
        (lambda steps: hg.PerStep(jnp.ones(steps)), "'c' must be a real number or an array of them; got PerStep"),
        (lambda steps: jnp.ones(1, complex), "'c' must be a real number or an array of them; got complex"),
    ],
)
def test_what_prepare_must_return(c: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        hg.train(loss, jnp.ones(2), of_prepare(lambda steps: {"c": c(steps)})(0.1), BATCHES, steps=3)


@pytest.mark.parametrize(
    ("c", "factors"),
    [
        long(lambda steps: 2.0, [2, 2, 2]),
        long(lambda steps: np.float64(2.0), [2, 2, 2]),
        long(lambda steps: jnp.float32(2.0), [2, 2, 2]),
        long(lambda steps: 2, [2, 2, 2]),
        (lambda steps: jnp.arange(steps), [0, 1, 2]),
        (lambda steps: np.arange(steps) > 0, [0, 1, 1]),
    ],
)
def test_numbers_of_any_kind_are_differentiated_as_floats(c: Any, factors: list[float]) -> None:
    rule = of_prepare(lambda steps: {"c": c(steps), "momentum": 0.5})

    def end(rate: Any) -> jax.Array:
        return hg.train(loss, jnp.ones(2), rule(rate), BATCHES, steps=3).params[0]

    value, slope = jax.value_and_grad(end)(0.1)
    np.testing.assert_allclose(value, by_hand(1.0, 0.0, 0.5, factors), rtol=1e-6)
    same = of_prepare(lambda steps: {"c": jnp.asarray(factors, jnp.float32)})
    other = lambda rate: hg.train(loss, jnp.ones(2), same(rate), BATCHES, steps=3).params[0]  # noqa: E731
    np.testing.assert_allclose(slope, jax.grad(other)(0.1), rtol=1e-6)


class Belief(Transformed):
    """What the square sees is how far the gradient lies from its mean."""

    reads = ("mean",)
    entrywise_transform = True

    @staticmethod
    def transform(h: Any, w: Any, g: Any, z: Any) -> Any:
        return [x - zj.mean for x, zj in zip(g, z, strict=True)]


def test_a_link_that_a_transformation_reads_is_undone_with_the_gradient_that_it_saw() -> None:
    hg.testing.check_inverse(Belief(hg.Adam(0.01)), steps=4)


class OfSquares(hg.Adam):
    """Another mean than Adam's, which its second moments do not bound."""

    chain = (hg.Adam.chain[0]._replace(increment=lambda h, z, g: (1 - h.b1) * 100 * g), *hg.Adam.chain[1:])


@pytest.mark.parametrize(
    ("rule", "mean_of", "square_of"),
    [
        (lambda: Belief(hg.Adam(0.01, 0.875, 0.9375)), lambda g: g, lambda g, m: g - m),
        (lambda: OfSquares(0.01, 0.875, 0.9375), lambda g: 100 * g, lambda g, m: g),
    ],
    ids=["belief", "another mean"],
)
def test_adam_whose_moments_see_different_gradients_is_not_bounded(rule: Any, mean_of: Any, square_of: Any) -> None:
    gradients = np.array([1.0, 1.0, 1.0, 1.0])
    w, m, s = 1.0, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        m = 0.875 * m + 0.125 * mean_of(g)
        s = 0.9375 * s + 0.0625 * square_of(g, m) ** 2
        w -= 0.01 * m / (1 - 0.875**t) / (np.sqrt(s / (1 - 0.9375**t)) + 1e-8)
    run = hg.train(lambda w, _, x: jnp.sum(w), jnp.ones(1), rule(), BATCHES, steps=len(gradients))
    np.testing.assert_allclose(run.params[0], w, rtol=1e-5)


def test_a_transformation_takes_the_parameters_as_w(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Belief, "reads", ("params",))
    with pytest.raises(TypeError, match="Belief reads `params`, whose new values come after.*The old ones are w"):
        hg.train(loss, jnp.ones(2), Belief(hg.Adam(0.1)), BATCHES, steps=1)


@pytest.mark.parametrize(
    ("rule", "state", "error", "message"),
    [
        (
            lambda: hg.partition({"x": hg.Adam(0.1)}, "x"),
            {"mean_weight": 0.5},
            ValueError,
            r"state\['mean_weight'\] must be a dict with the labels of hg.partition, 'x' among them.*got float",
        ),
        (lambda: Counts(0.1), None, TypeError, "Counts.weights: 'w' counts 'made', which is no field of the rule"),
        (lambda: Summing(0.1), None, TypeError, "Summing.weights: 'square_weight' counts 'b2', and no link of its chain"),
    ],
    ids=["of no partition", "of no field", "of no link"],
)
def test_weights_that_cannot_be_counted(rule: Any, state: Any, error: Any, message: str) -> None:
    moments = {name: jnp.ones((2, 2)) for name in ("mean", "square")}
    with pytest.raises(error, match=message):
        hg.train(loss, jnp.ones((2, 2)), rule(), BATCHES, steps=1, state=state and moments | state)


class Counts(Ball):
    """It counts what it makes."""

    weights = {"w": "made"}

    def prepare(self, h: Any, steps: int) -> Any:
        return {**h, "made": h["momentum"]}


class Summing(hg.Adam):
    """Squares are summed, as Adagrad sums them."""

    chain = (hg.Adam.chain[0], hg.Adam.chain[1]._replace(decay=None), hg.Adam.chain[2])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: hg.SOAP(0.1, factor_decay=x), "SOAP: `factor_decay`"),
        (lambda x: hg.SOAP(0.1, b2=x), "SOAP: `b2`"),
        (lambda x: hg.NorMuon(0.1, b2=x), "NorMuon: `b2`"),
        (lambda x: hg.Shampoo(0.1, b2=x), "Shampoo: `b2`"),
    ],
)
def test_what_belongs_to_a_leaf_is_not_one_for_each_weight(make: Any, name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name} belongs to a whole leaf, as .* do: one value, or .*one for each of .2, 3."
    ):
        hg.train(loss, jnp.ones((2, 3)), make(jnp.full((2, 3), 0.5)), BATCHES, steps=1)


@pytest.mark.parametrize(
    ("start", "increment", "same"),
    [
        (lambda w: 2, lambda h, z, g: -jnp.sign(g).astype(int), (2.0, lambda g: -np.sign(g))),
        long(lambda w: 0.5, lambda h, z, g: 1, (0.5, lambda g: 1.0)),
        long(lambda w: jnp.ones(w.shape, int), lambda h, z, g: g > 0, (1.0, lambda g: float(g > 0))),
    ],
    ids=["signs", "numbers", "comparisons"],
)
def test_integers_of_links_are_floats(start: Any, increment: Any, same: Any) -> None:
    chain = (Link("velocity", increment, decay="momentum", start=start), Ball.chain[1])
    rule = type("Whole", (Ball,), {"__module__": __name__, "__annotations__": {}, "chain": chain})
    v, add = same
    w, rho = 1.0, 0.5
    for _ in range(3):
        v = rho * v + add(w)
        w += 0.125 * v

    def end(rate: Any) -> jax.Array:
        return hg.train(loss, jnp.ones(2), rule(rate), BATCHES, steps=3).params[0]

    value, slope = jax.value_and_grad(end)(0.125)
    np.testing.assert_allclose(value, w, rtol=1e-6)
    np.testing.assert_allclose(slope, (w - 1) / 0.125, rtol=1e-5)
