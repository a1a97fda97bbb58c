"""Losses as people write them have one hypergradient, by `hg.Reversible` as by `hg.Unrolled`: the short form of
`experiments.zoo`, which also tries every rule and mode on each, float32, and the oracle itself."""

import pytest
import zoo
from covering import some_of

from experiments import zoo as script


# Several losses make one program, trained as the sum of their losses. Each loss is in one, its rule and mode by turns.
GROUPS = script.groups(size=7)[::3]
RULES = list(script.RULES)
MODES = ("jit", "vmap", "eager")
OTHERS = (script.MICROBATCHES, *script.WAYS)
SHORT = {0, 6}  # images, and derivative rules of one's own


def test_the_zoo_is_as_large_as_it_says() -> None:
    entries = zoo.entries()
    assert len(entries) >= 100 and sum(len(group) for group in GROUPS) >= 40
    assert sorted(entry.name for group in script.groups() for entry in group) == sorted(entries)
    assert sum(entry.own_rule for entry in entries.values()) >= 20


@some_of("i", range(len(GROUPS)), *SHORT, ids=lambda i: f"{GROUPS[i][0].name} and {len(GROUPS[i]) - 1} more")
def test_losses_of_the_zoo(i: int) -> None:
    group, rule = GROUPS[i], RULES[i % len(RULES)]
    for asked, verdict in script.in_float64(group, rule, [MODES[(i // len(RULES)) % len(MODES)]], turn=i, steps=4):
        assert verdict.fine, (asked, [entry.name for entry in group], verdict)


@pytest.mark.long
@pytest.mark.parametrize("i", range(len(GROUPS)))
def test_by_microbatches_and_in_every_way_to_run(i: int) -> None:
    group, rule, mode = GROUPS[i], RULES[i % len(RULES)], OTHERS[(i // len(RULES)) % len(OTHERS)]
    for asked, verdict in script.in_float64(group, rule, [mode], turn=i, steps=4):
        assert verdict.fine, (asked, [entry.name for entry in group], verdict)
