"""Short forms of tests over many cases: enough of them always, the others where somebody has the time (`-m long`)."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def long(*values: Any, id: str | None = None) -> Any:
    """A case of `pytest.mark.parametrize` that the long form alone has."""
    return pytest.param(*values, id=id, marks=pytest.mark.long)


def some_of(name: str | tuple[str, ...], values: Iterable[Any], *short: Any, **options: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over the values, of which the short form has those of `short`."""
    cases = [x if x in short else long(*x) if isinstance(name, tuple) else long(x) for x in values]
    return pytest.mark.parametrize(name, cases, **options)


def of_bits(name: str | tuple[str, ...], values: Iterable[Any], short: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over the values, compiled as users do; the short form has one, compiled quickly."""
    marks = (pytest.mark.long, pytest.mark.of_bits)
    full = [pytest.param(*(x if isinstance(name, tuple) else (x,)), marks=marks, id=f"{x}, fully") for x in values]
    return pytest.mark.parametrize(name, [short, *full])


def every_value(names: str, *values: Iterable[Any], indirect: Any = False) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over combinations of the values of each name, as "a, b, c": of which the short form has so
    many that each value is in one."""
    lists = [list(of_name) for of_name in values]
    short = {tuple(k % len(of_name) for of_name in lists) for k in range(max(map(len, lists)))}
    cases = []
    for case in itertools.product(*(range(len(of_name)) for of_name in lists)):
        chosen = [of_name[i] for of_name, i in zip(lists, case, strict=True)]
        cases.append(pytest.param(*chosen) if case in short else long(*chosen))
    return pytest.mark.parametrize(names, cases, indirect=indirect)
