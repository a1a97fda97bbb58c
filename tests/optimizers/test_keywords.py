"""Keywords that a rule does not have, and what is said of them."""

from typing import Any

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
