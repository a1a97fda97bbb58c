"""What a rule is made of: keywords that it does not have, and domains."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny import fails

import hypergrad as hg
from hypergrad.optimizers import Optimizer


UNKNOWN = {
    "of optax": (
        lambda: hg.AdamW(1e-3, lr=1e-3),
        "AdamW has no 'lr'; it takes learning_rate, b1, ",
        "mean `learning_rate`?",
    ),
    "misspelled": (lambda: hg.SGD(0.1, momentun=0.5), "SGD has no 'momentun'", "Did you mean `momentum`?"),
    "a wrapper's": (lambda: hg.SGD(0.1, weight_decay=0.1), "SGD has no 'weight_decay'", "hg.add_decayed_weights(rule, "),
    "a mask": (lambda: hg.AdamW(0.1, mask=None), "AdamW has no 'mask'", "weight_decay=jax.tree.map("),
    "of nobody": (lambda: hg.SGD(0.1, heat=1), "SGD has no 'heat'; it takes learning_rate, momentum."),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_keyword_that_a_rule_does_not_have_is_told_with_what_it_has(name: str) -> None:
    make, *fragments = UNKNOWN[name]
    with fails(TypeError, *fragments):
        make()


def test_what_a_rule_takes_by_itself_is_its_own() -> None:
    class Halved(Optimizer):
        rate: Any
        chain = hg.SGD.chain

        def __init__(self, lr: float, **others: Any) -> None:
            self.rate = lr / others.get("by", 2)

    assert Halved(lr=1.0).rate == 0.5 and Halved(lr=1.0, by=4).rate == 0.25


@pytest.mark.parametrize(
    "optimizer",
    [
        hg.clip(hg.SGD(hg.positive(0.1)), hg.positive(0.5)),
        hg.clip_by_global_norm(hg.SGD(hg.positive(0.1)), hg.positive(0.5)),
        hg.clip(hg.SGD(0.1), hg.bounded(0.25, 0.0, 1.0)),
    ],
    ids=["clip", "norm", "interval"],
)
def test_a_domain_is_checked_in_natural_units(optimizer: hg.SGD) -> None:
    """What it stores, log(0.5), is below zero."""
    train = lambda rule, _: hg.train(lambda w, *_: jnp.sum(w**2), jnp.ones(2), rule, hg.full_batch(jnp.zeros(1)), steps=3)  # noqa: E731
    value, slopes = hg.hypergradient(train, lambda run: jnp.sum(run.params), optimizer)
    assert jnp.isfinite(value) and all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(slopes))


def test_domains_of_rules_are_checked_in_natural_units() -> None:
    hg.Shampoo(0.1, exponent=hg.positive(0.25))
    hg.KFAC(0.1, damping=hg.positive(1.0))
    with pytest.raises(ValueError, match="`max_delta` must be at least 0; got .*-0.5"):
        hg.clip(hg.SGD(0.1), hg.bounded(-0.5, -1.0, 0.1))
