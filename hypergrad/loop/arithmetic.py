"""Which programs have the same bits whatever they are compiled with, so that both directions may compute them in the open.

Invariant: a compiler may contract a product with the sum that it enters, or not, as its surroundings have it, and it may
approximate what is not named here. What is named is rounded operation by operation.
"""

from jax.extend.core import Jaxpr, Var


_MULTIPLIES = {"mul", "square", "integer_pow"}
_SAME_DIGITS = {"neg", "broadcast_in_dim", "reshape", "convert_element_type"}
_CHOICES = {"select_n", "abs", "sign", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"}
_CALLS = {"jit", "closed_call", "custom_jvp_call", "custom_vjp_call"}
_ROUNDED = {"sqrt", "div", "max", "min"}  # a maximum compares its operands as they are rounded


def only_products(program: Jaxpr) -> bool:
    """Whether nothing but products is made of what goes in; sums of scalars do not count."""
    scalar_sum = lambda e: e.primitive.name in ("add", "sub") and not e.outvars[0].aval.shape  # noqa: E731
    return all(e.primitive.name in _MULTIPLIES | _SAME_DIGITS or scalar_sum(e) for e in program.eqns)


def ambiguous(program: Jaxpr) -> bool:
    """Whether a sum may take in a product, or something is computed that is not rounded operation by operation."""
    return _products(program, []) is None


def _products(program: Jaxpr, products: list[bool]) -> list[bool] | None:
    """Which results may be a product, or a choice that has one, given which inputs are; None: the program is ambiguous."""
    marked = {v for v, product in zip(program.invars, products or [False] * len(program.invars), strict=True) if product}
    among = lambda xs: [isinstance(x, Var) and x in marked for x in xs]  # noqa: E731
    for e in program.eqns:
        name, taken = e.primitive.name, among(e.invars)
        if name in _CALLS:
            called = e.params["jaxpr"] if "jaxpr" in e.params else e.params["call_jaxpr"]
            results = _products(called.jaxpr, taken)
            if results is None:
                return None
        elif name in _MULTIPLIES:
            results = [True]
        elif name in _SAME_DIGITS | _CHOICES:
            results = [any(taken)]
        elif name in _ROUNDED or (name in ("add", "sub") and not any(taken)):
            results = [False]
        else:
            return None
        marked.update(v for v, product in zip(e.outvars, results, strict=True) if product)
    return among(program.outvars)
