"""Chains that cannot be reversed are refused, with what is wrong and where."""

from typing import Any

import jax.numpy as jnp
import pytest

import hypergrad as hg
from hypergrad.optimizers.chain import Link, Optimizer


def trained(optimizer: Any) -> hg.Trained:
    return hg.train(lambda w, _, batch: jnp.sum(w**2), jnp.ones(2), optimizer, hg.full_batch(jnp.ones(1)), steps=2)


STILL = Link("params", lambda h, z: h.learning_rate * z.velocity)
LEAK = Link("velocity", lambda h, z, g: -g, decay="momentum")


def chained(*links: Link) -> type[Optimizer]:
    return type("Rule", (hg.SGD,), {"__module__": __name__, "__annotations__": {}, "chain": links, "linear": False})


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ((LEAK,), "the last called `params`; got \\['velocity'\\]"),
        ((STILL, LEAK), "the last called `params`"),
        ((LEAK, LEAK, STILL), "different names"),
        (
            (LEAK, STILL._replace(increment=lambda h: -h.learning_rate)),
            "increment of the link `params` must take \\(h, z\\)",
        ),
        ((LEAK._replace(denominator=1000), STILL), "link `velocity`: denominator must be a power of two .* got 1000"),
        ((LEAK._replace(denominator=2**25), STILL), "from 2\\^12 to 2\\^24"),
    ],
)
def test_chains_that_cannot_be_reversed_are_refused(links: tuple[Link, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        chained(*links)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ((STILL,), "plain SGD would: that step has no explicit inverse. Use momentum"),
        ((LEAK, STILL._replace(increment=lambda h, z, g: -g)), "`params` must take \\(h, z\\), not the gradient"),
    ],
)
def test_chains_without_inverse_are_refused_where_they_are_used(links: tuple[Link, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        trained(chained(*links)(0.1, 0.9))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ((LEAK._replace(increment=lambda h, z, g: -z.velocity * g), STILL), "`velocity` reads `velocity`, .* own value"),
        ((LEAK, STILL._replace(increment=lambda h, z: z.params)), "`params` reads `params`, .*it has: velocity"),
        ((LEAK._replace(increment=lambda h, z, g: h.rate * g), STILL), "`velocity` reads `rate`, .* learning_rate, mom"),
    ],
)
def test_an_increment_that_reads_what_it_may_not_says_why(links: tuple[Link, ...], message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        trained(chained(*links)(0.1, 0.9))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ((LEAK._replace(increment=lambda h, z, g: -jnp.ones(7)), STILL), r"`velocity` has shape \(7,\), .* holds, \(\d,\)"),
        ((LEAK._replace(increment=lambda h, z, g: -g[..., None]), STILL), r"`velocity` has shape \(\d, 1\), .* \(\d,\)"),
        ((LEAK, STILL._replace(increment=lambda h, z: z.velocity.sum() * jnp.ones((2, 2)))), r"`params` has shape \(2, 2\)"),
    ],
)
def test_an_increment_of_another_shape_is_refused(links: tuple[Link, ...], message: str) -> None:
    rule = chained(*links)(0.1, 0.9)
    for use in (trained, hg.testing.check_optimizer):
        with pytest.raises(TypeError, match=message):
            use(rule)


def test_a_rule_without_a_chain_and_fields_without_annotation_are_told() -> None:
    bare = type("Bare", (Optimizer,), {"__module__": __name__, "__annotations__": {"rate": Any}})
    for use in (trained, hg.testing.check_optimizer):
        with pytest.raises(TypeError, match="Bare has no `chain`, which is its update"):
            use(bare(0.1))
        with pytest.raises(TypeError, match="got the class SGD itself"):
            use(hg.SGD)
    chain = (LEAK._replace(decay=None, increment=lambda h, z, g: -h.rate * g), STILL)
    plain = type("Plain", (Optimizer,), {"__module__": __name__, "rate": 0.1, "chain": chain})
    with pytest.raises(AttributeError, match="`velocity` reads `rate`, .*which needs an annotation, `rate: Any`"):
        trained(plain())


@pytest.mark.parametrize("name", ["NAdam", "Adadelta"])
def test_rules_without_inverse_are_refused_by_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"hg.{name} does not exist: the rule has no exact inverse.* Take hg."):
        getattr(hg, name)


@pytest.mark.parametrize("optimizer", [hg.SGD(0.1, 0.0), hg.RMSProp(0.1, momentum=0.0), hg.Adagrad(0.1, momentum=0.0)])
def test_rules_without_momentum_are_refused_with_the_reason(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    with pytest.raises(hg.RangeError, match=rf"momentum.* got 0.0.* no inverse \(.*{name}.* without momentum"):
        hg.testing.check_inverse(optimizer)
