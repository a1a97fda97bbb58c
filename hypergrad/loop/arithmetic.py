"""Which programs have the same bits whatever they are compiled with, so that both directions may compute them in the open.

Invariant: a compiler may contract a product with the sum that it enters, or not, as its surroundings have it, and it may
approximate what is not named here. What is named is rounded operation by operation.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var


_MULTIPLIES = {"mul", "square", "integer_pow", "div"}  # XLA multiplies by the inverse of a divisor that is known
_SAME_DIGITS = {"neg", "broadcast_in_dim", "reshape", "convert_element_type"}
_CHOICES = {"select_n", "abs", "sign", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"}
_CALLS = {"jit", "closed_call", "custom_jvp_call", "custom_vjp_call"}
_PLAIN, _PRODUCT, _KNOWN = range(3)  # what a value may be: known are those made of literals alone


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.aval.shape)


def _half(x: Any) -> bool:
    return jnp.issubdtype(x.aval.dtype, jnp.floating) and x.aval.dtype.itemsize < 4


def only_products(program: Jaxpr) -> bool:
    """Whether nothing but products is made of what goes in; sums of scalars do not count."""
    scalar_sum = lambda e: e.primitive.name in ("add", "sub") and not _shape(e.outvars[0])  # noqa: E731
    return all(e.primitive.name in (_MULTIPLIES - {"div"}) | _SAME_DIGITS or scalar_sum(e) for e in program.eqns)


def ambiguous(program: Jaxpr, products: Sequence[bool]) -> bool:
    """Whether a sum may take in a product, or something is computed that is not rounded operation by operation.

    products: of each input, whether what makes it may end in one, and be compiled with the program.
    """
    return _kinds(program, [_PRODUCT if x else _PLAIN for x in products]) is None


def _kinds(program: Jaxpr, given: list[int]) -> list[int] | None:
    """What results may be, given what inputs are; None: the program is ambiguous."""
    kinds = dict(zip(program.invars, given, strict=True))
    kind = lambda x: kinds.get(x, _PLAIN) if isinstance(x, Var) else _KNOWN  # noqa: E731
    for e in program.eqns:
        name, taken = e.primitive.name, [kind(x) for x in e.invars]
        of_any = _KNOWN if all(k == _KNOWN for k in taken) else _PRODUCT if _PRODUCT in taken else _PLAIN
        if any(map(_half, e.outvars)):
            return None  # XLA may compute with more digits, and round once
        if name in _CALLS:
            called = e.params["jaxpr"] if "jaxpr" in e.params else e.params["call_jaxpr"]
            results = _kinds(called.jaxpr, taken)
            if results is None:
                return None
        elif name in _MULTIPLIES:
            results = [_KNOWN if of_any == _KNOWN else _PRODUCT]
        elif name in _SAME_DIGITS | _CHOICES:
            results = [of_any]
        elif name in ("max", "min"):
            # Of a choice with a known value, LLVM may add to either case by itself; else it compares what is rounded.
            results = [of_any if _KNOWN in taken or not _shape(e.outvars[0]) else _PLAIN]
        elif name == "sqrt" or (name in ("add", "sub") and _PRODUCT not in taken):
            results = [_PLAIN]
        else:
            return None
        kinds.update(zip(e.outvars, results, strict=True))
    return [kind(x) for x in program.outvars]
