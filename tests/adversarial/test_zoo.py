"""Losses as people write them have one hypergradient, by `hg.Reversible` as by `hg.Unrolled`: the short form of
`experiments.zoo`, which also tries every rule and mode on each, float32, and the oracle itself."""

import itertools

import pytest
import zoo
from covering import some_of

from experiments import zoo as script
from experiments._judge import Verdict


# Several losses make one program, trained as the sum of their losses. Each loss is in one, its rule and mode by turns.
GROUPS = script.groups(size=7)[::3]
RULES = list(script.RULES)
MODES = ("jit", "vmap", "eager")
OTHERS = (script.MICROBATCHES, *script.WAYS, script.PULLS)
ALONE = [group for group in script.groups() if len(group) == 1][:3]
SHORT = {0}  # images


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


def test_a_difference_is_told_and_each_rule_has_each_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    asked = set()

    def judged(group: list[zoo.Entry], rule: str, modes: list[str], turn: int, steps: int) -> list[tuple[str, Verdict]]:
        asked.update((group[0].name, rule, mode) for mode in modes)
        if (rule, modes) == ("adam", ["vmap"]):
            raise KeyError("planted")
        return [("in theta", Verdict("DIFFERENT" if (rule, modes) == ("sgd", ["jit"]) else "equal"))]

    monkeypatch.setattr(script, "in_float64", judged)
    monkeypatch.setattr(script, "groups", lambda: ALONE)
    assert script.main(script.parser().parse_args(["--together", "--modes", *MODES])) == 1
    assert len(asked) == 9 and {(rule, mode) for _, rule, mode in asked} == set(itertools.product(RULES, MODES))
    text = capsys.readouterr().out
    assert "9 cases of 3 losses" in text and "1 DIFFERENT" in text and "1 CRASHED" in text and "7 equal" in text


@pytest.mark.long
@pytest.mark.parametrize("i", range(len(GROUPS)))
def test_by_microbatches_and_in_every_way_to_run(i: int) -> None:
    group, rule, mode = GROUPS[i], RULES[i % len(RULES)], OTHERS[i % len(OTHERS)]
    for asked, verdict in script.in_float64(group, rule, [mode], turn=i, steps=4):
        assert verdict.fine, (asked, [entry.name for entry in group], verdict)
