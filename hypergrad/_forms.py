"""The form of what was read from a file or a storage, before anything is done with it.

Invariant: what has no misfit can be used as its form says, without another look at its types.
"""

import math
import reprlib
from collections.abc import Callable
from typing import Any


# A function says whether a value will do; [form]: a list of such; {key: form}: a dict of just these keys.
Form = Callable[[Any], bool] | list[Any] | dict[str, Any]

LARGEST = 2**31 - 1  # of the integers that mean a number of something: they go into int32


def misfit(value: Any, form: Form, where: str) -> str:
    """What of `value` is not of the form, in words; "" if all of it is. It goes only as deep as the form."""
    if callable(form):
        return "" if form(value) else f"{where} is {shown(value)}"
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{where} is {shown(value)}, not a list"
        parts = [(f"{where}[{i}]", x, form[0]) for i, x in enumerate(value)]
    else:
        if not isinstance(value, dict):
            return f"{where} is {shown(value)}, not a mapping"
        if value.keys() != form.keys():
            wrong = min(map(str, value.keys() ^ form.keys()))
            return f"{where} {'lacks' if wrong in form else 'has a strange entry'} {shown(wrong)}"
        parts = [(f"{where}[{key!r}]", value[key], form[key]) for key in form]
    return next((problem for part in parts if (problem := misfit(part[1], part[2], part[0]))), "")


def shown(value: Any) -> str:
    """A value in an error, short however large or deep it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # integers have a limit of digits beyond which Python does not print them
        return f"{type(value).__name__} with an integer too long to print"


def text(x: Any) -> bool:
    return isinstance(x, str)


def natural(x: Any) -> bool:
    """0, 1, 2, ..., as far as int32 goes. True is none."""
    return type(x) is int and 0 <= x <= LARGEST


def number(x: Any) -> bool:
    return (type(x) is int and abs(x) <= LARGEST) or (type(x) is float and math.isfinite(x))
