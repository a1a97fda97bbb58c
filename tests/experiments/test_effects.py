"""Settings of rules beside optax's in float64: equal over many decades, and a setting that comes to nothing is found."""

import pytest

import hypergrad as hg
from experiments import effects


def kinds(seeds):
    return {seed: effects.judged(effects.draw(seed)) for seed in seeds}


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.long)])
def test_a_setting_does_what_it_does_in_optax(seeds):
    found = kinds(seeds)
    assert all(verdict.kind != "DIFFERENT" for verdict in found.values()), found
    assert sum(verdict.kind == "equal" for verdict in found.values()) >= len(found) / 2, found


@pytest.mark.parametrize("factor", [0.0, pytest.param(1.05, marks=pytest.mark.long)])
def test_a_decay_that_is_another_is_found(factor):
    case = effects.Case(0, "AdamW", {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
                        "weight_decay", 0.0, "network", 1.0, 300)  # fmt: skip
    sound = effects.RULES["AdamW"]
    lie = sound._replace(ours=lambda weight_decay, **rest: hg.AdamW(**rest, weight_decay=factor * weight_decay))
    assert effects.judged(case).kind == "equal"
    assert effects.judged(case, lie).kind == "DIFFERENT"
