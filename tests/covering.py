"""Fewer cases than all combinations: any two options have each pair of their values at least once."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest


ALL = "HYPERGRAD_ALL_CASES" in os.environ  # all combinations, for who has the time


def every_pair(names: str, *values: Iterable[Any], indirect: Any = False) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over combinations of the values of each name, as "a, b, c": enough for all pairs."""
    lists = [list(of_name) for of_name in values]
    places = [range(len(of_name)) for of_name in lists]
    rest = list(itertools.product(*places))
    missing = {pair for case in rest for pair in _pairs(case)}
    chosen: list[tuple[int, ...]] = []
    while rest and (missing or ALL):
        best = max(rest, key=lambda case: len(missing & _pairs(case)))
        rest.remove(best)
        missing -= _pairs(best)
        chosen.append(best)
    cases = [tuple(of_name[i] for of_name, i in zip(lists, case, strict=True)) for case in sorted(chosen)]
    return pytest.mark.parametrize(names, cases, indirect=indirect)


def _pairs(case: tuple[int, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(case), 2))
