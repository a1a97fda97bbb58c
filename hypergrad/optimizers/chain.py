"""An optimizer as a chain of leaky links: z_k <- rho_k z_k + increment_k for k = 1..K, the last link being the parameters.

Invariant: increment_k reads nothing that undoing the links K..k in that order has not recovered. So it may read the NEW
values of links before k, the OLD values of links after k, the hyperparameters of the step, and the gradient at the old
parameters; the last link may not read the gradient (it is recomputed only once the parameters are back).
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from hypergrad.exact import MOMENTUM_DENOMINATOR, WIDE_DENOMINATOR
from hypergrad.optimizers.keywords import check_keywords


PARAMS = "params"
STATISTICS = "statistics"  # of `hg.train`: a name that no link of an optimizer may have, and what these follow
GRADIENT = "gradient"


class Link(NamedTuple):
    """z <- rho z + increment, for one leaf of the parameters.

    increment(h, z, g): h.<hyperparameter> at this step, z.<link> other links' values, g the gradient; arrays that
    broadcast against the leaf. Of running statistics, z.statistics has the new values. The link called "params" is last and
    takes (h, z); one that takes (h, z, g) has an inverse by `with_gradient_link` alone.
    """

    name: str
    increment: Callable[..., Array] | None  # None: nothing is added (frozen parameters)
    decay: str | None = None  # the hyperparameter (or `prepare`d value) that is rho; None: rho = 1, nothing is lost
    denominator: int = MOMENTUM_DENOMINATOR  # d of rho = n/d, a power of two from 2^12 to 2^24
    may_be_one: bool = False  # whether rho = 1 (nothing decays) makes sense here
    start: Callable[[Array], Array] = (
        jnp.zeros_like
    )  # parameter leaf -> initial value, and so the link's shape; a number: everywhere
    wide: bool = False  # two integers a value: 2^8 times the range, 2^-38 times the quantum (for means of squares)
    bits_a_step: float = 1.0  # room in the buffer where the decay is not known beforehand: enough for rho >= 2^-bits
    signal: str = GRADIENT  # what the increment is given as g: the gradient, or an entry of `Optimizer.signals`
    position: bool = False  # whether it is another place of the parameters, which rests with them where they are frozen


Signal = Callable[[Callable[..., Any], Any, Any, Any, Array], Any]


def check_fits(link: Link, update: tuple[int, ...], held: tuple[int, ...]) -> None:
    """That what a link adds broadcasts to what it holds; both shapes."""
    ends = list(zip(reversed(update), reversed(held), strict=False))
    if len(update) > len(held) or any(n not in (1, m) for n, m in ends):
        raise TypeError(
            f"the increment of link `{link.name}` has shape {update}, which does not fit what the link holds, {held}."
        )


def foreign(function: Any) -> bool:
    """Whether a function of a rule is not the library's: it may compute something else at the next call."""
    return not str(getattr(function, "__module__", "")).startswith("hypergrad.")


class View:
    """Values by attribute, as an increment reads them; what it may not read is an error that says why."""

    def __init__(self, values: Mapping[str, Any], owner: str) -> None:
        self.__dict__.update(values)
        self.__dict__["_owner"] = owner

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(k for k in self.__dict__ if k != "_owner")
        why = "A link's own value is never available: the increment could not be undone."
        if name != self._owner:
            why = "Is it spelt as the field (which needs an annotation, `rate: Any`), the link, or what `prepare` returns?"
        raise AttributeError(
            f"the increment of link `{self._owner}` reads `{name}`, which is not available to it (it has: {known}). {why}"
        )


def first_value(link: Link, leaf: Array) -> Array:
    """`Link.start`, as floats."""
    x = link.start(leaf)
    if isinstance(x, (bool, int, float)):
        return jnp.full_like(leaf, x)
    return as_float(x, leaf.dtype, f"`start` of link `{link.name}`")


def as_float(x: Any, dtype: Any, what: str) -> Array:
    """An array as it is if it has floats; a number, or another array, with this dtype. what: for the error of a complex
    one, whose imaginary part would be lost."""
    x = jnp.asarray(x, dtype if isinstance(x, (bool, int, float)) else None)
    check_real(what, x)
    whole = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
    return x.astype(dtype) if whole else x


def check_real(what: str, x: Any) -> None:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{what} must be real; got {x.dtype.name}{list(x.shape)}. Take its real part, or its magnitude.")


class Optimizer(eqx.Module):
    """Base of reversible optimizers: dataclass fields are the hyperparameters, `chain` is the update.

    Each field is a scalar, a `PerStep`, an array of a parameter's shape, or a pytree prefix of the parameters with such
    leaves. `linear`: every gradient enters its increment linearly, with a factor made of hyperparameters alone (the reverse
    pass is then cheaper by one linearization). `entrywise`: what becomes of an entry depends on no other entry of its leaf,
    nor on its shape (small leaves are then laid side by side: less to compile). `weights`: what else than links a run must
    know to go on where another ended, {entry of `state`: decay}: 1 - the product of that decay over all steps before, which
    `prepare` finds in h where `state` has it. `signals`: what links see that do not see the gradient, {name: function(loss,
    params, theta, batch, key) -> pytree like the parameters, leaves of the shape that the link holds}, at the old
    parameters; loss(params, theta, batch) is the user's, key the step's own. `of_examples`: its signals see the loss of each
    example, of which the loss is the mean: tested where values are concrete. `by_step`: `prepare` makes the values of a step
    of that step's alone, and of `weights`. `bounds`: entries of h that hold only where the chain has these links and all of
    them see the same gradient, {entry: links}; 0 otherwise. `approximate`: what of the update its derivative leaves out, a
    phrase for the status.
    """

    chain: ClassVar[tuple[Link, ...]]
    approximate: ClassVar[str] = ""
    weights: ClassVar[Mapping[str, str]] = {}
    bounds: ClassVar[Mapping[str, tuple[Link, ...]]] = {}
    signals: ClassVar[Mapping[str, Signal]] = {}
    linear: ClassVar[bool] = False
    entrywise: ClassVar[bool] = False
    by_step: ClassVar[bool] = False
    of_examples: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_keywords(cls, kwargs)
        return super().__new__(cls, *args, **kwargs)

    def hyperparameters(self) -> dict[str, Any]:
        """Its differentiable fields by name."""
        own = [field for field in dataclasses.fields(self) if field.name != "inner" and not field.metadata.get("static")]
        return {field.name: getattr(self, field.name) for field in own}

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        """Hyperparameters of one leaf -> what its increments read as `h`; runs once for all leaves that have the same, under
        ordinary autodiff.

        Every array has a leading step axis of length `steps`, or 1 where it is constant, and broadcasts against
        [steps, *leaf shape], or the shape of a link. Decays come as the exact n/d. Of what it returns, a number or an array
        without axes holds at all steps, and integers and bools become floats; anything else is an error.
        """
        del steps
        return h

    def begin(self, h: dict[str, Array], z: dict[str, Array]) -> dict[str, Array]:
        """What increments read as `h` where a run begins with a `state`; z: the initial values of the links, of one leaf.

        It gets what `prepare` returned, and returns all of it, as {**h, ...}; the rules for what `prepare` returns hold here
        too. A decay that it changes is rounded to n/d.
        """
        del z
        return h

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for flag, of in _SAID_OF.items():
            says = next((c for c in cls.__mro__ if {flag, *of} & vars(c).keys()), None)
            if says is not None and flag not in vars(says):
                setattr(cls, flag, False)  # what a class says of its own chain says nothing of another's
        chain = cls.__dict__.get("chain")
        if isinstance(chain, list):
            raise TypeError(f"{cls.__name__}.chain must be a tuple of links; got a list.")
        if isinstance(chain, tuple):
            _check_chain(cls.__name__, chain, {GRADIENT, *cls.signals})


# What a class may say, and of what it has.
_SAID_OF = {
    **dict.fromkeys(("linear", "entrywise"), ("chain", "rule_chain")),
    **dict.fromkeys(("linear_transform", "entrywise_transform"), ("transform",)),
}


def early(chain: tuple[Link, ...], read: set[str]) -> int:
    """How many links move before the gradient is transformed: up to the last that a transformation reads."""
    return max((i + 1 for i, link in enumerate(chain) if link.name in read), default=0)


def _check_chain(name: str, chain: tuple[Link, ...], signals: set[str]) -> None:
    names = [link.name for link in chain]
    if STATISTICS in names:
        raise TypeError(f"{name}.chain: `{STATISTICS}` is what hg.train calls its running statistics. Rename the link.")
    if not names or names[-1] != PARAMS or len(set(names)) != len(names):
        raise TypeError(f"{name}.chain must be links with different names, the last called `params`; got {names}.")
    try:
        inspect.signature(chain[-1].increment).bind(*[None] * (3 if reads_gradient(chain) else 2))  # type: ignore[arg-type]
    except TypeError as e:
        raise TypeError(f"{name}: the increment of the link `params` must take (h, z).") from e
    for link in chain:
        d = link.denominator
        if link.signal not in signals:
            raise TypeError(
                f"{name}, link `{link.name}`: there is no signal {link.signal!r}. There is {GRADIENT!r}, and what "
                f"`signals` has functions for: {sorted(signals - {GRADIENT})}."
            )
        if link.decay is not None and not isinstance(link.decay, str):
            raise TypeError(f"{name}, link `{link.name}`: decay must be the name of a hyperparameter; got {link.decay!r}.")
        if d < 2**12 or d > 2**24 or d & (d - 1):
            raise TypeError(f"{name}, link `{link.name}`: denominator must be a power of two from 2^12 to 2^24; got {d}.")
        if link.wide and link.decay and d > WIDE_DENOMINATOR:
            raise TypeError(f"{name}, link `{link.name}`: a wide link has a denominator of at most 2^16; got {d}.")


def reads_gradient(chain: tuple[Link, ...]) -> bool:
    """Whether the parameters' own increment takes the gradient, as (h, z, g)."""
    increment = chain[-1].increment
    if increment is None:
        return False
    try:
        inspect.signature(increment).bind(None, None, None)
    except TypeError:
        return False
    return True


def check_has_chain(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if not hasattr(type(optimizer), "chain"):
        raise TypeError(
            f"{name} has no `chain`, which is its update: a tuple of links, the last called `params`. "
            "docs/your-own-optimizer.md has an example."
        )


def check_invertible(optimizer: Optimizer) -> None:
    """Refuse a rule whose parameters move by the gradient at the parameters that they leave."""
    name, chain = type(optimizer).__name__, optimizer.chain
    if reads_gradient(chain):
        raise TypeError(
            f"{name}: the increment of the link `params` must take (h, z), not the gradient. The gradient at the parameters "
            "that a step leaves (plain SGD, Nesterov's momentum) is unknown when undoing it: no explicit inverse. "
            f"hg.with_gradient_link({name}(...)) passes it through one more link, at 4 bits a parameter and step."
        )
    if len(chain) == 1:
        raise TypeError(
            f"{name}.chain has only the link `params`, and nothing that it could move by: its increment may not read the "
            "gradient at the parameters that it leaves, as plain SGD would: that step has no explicit inverse. Use momentum "
            "(hg.SGD), or hg.with_gradient_link."
        )
