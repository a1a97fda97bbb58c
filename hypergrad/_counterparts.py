"""What of ours comes nearest to an optax transformation, for the error where one is passed to `hg.train`.

Invariant: all of ours are named, and one of them first where optax's can be told by its parts.
"""

from collections.abc import Iterator
from typing import Any


_HEAVY_BALL = "hg.HeavyBall(learning_rate, momentum)"
_ADAM = "hg.Adam(learning_rate, b1, b2, eps)"
_RMSPROP = "hg.RMSProp(learning_rate, decay, momentum, eps)"
_NEAREST = {  # by the parts that make the rule, in their order
    "trace": _HEAVY_BALL,
    "scale_by_adam": _ADAM,
    "scale_by_adam, add_decayed_weights": "hg.AdamW(learning_rate, b1, b2, eps, weight_decay)",
    "scale_by_rms": _RMSPROP,
    "scale_by_rms, trace": _RMSPROP,
    "scale_by_rss": "hg.Adagrad(learning_rate, momentum, eps)",
    "add_decayed_weights, trace": f"hg.add_decayed_weights({_HEAVY_BALL}, weight_decay)",
    "add_decayed_weights, scale_by_adam": f"hg.add_decayed_weights({_ADAM}, weight_decay)",
}
_RATES = ("scale_by_learning_rate", "scale_by_schedule")
_ALL = (
    "There are hg.HeavyBall (optax.sgd with momentum), hg.SGD, hg.Adam, hg.AdamW, hg.RMSProp and hg.Adagrad with momentum, "
    "and around them hg.clip, hg.clip_by_global_norm, hg.add_decayed_weights and hg.freeze."
)


def nearest(transformation: Any) -> str:
    """What to take in place of an optax transformation, in sentences."""
    parts = dict.fromkeys(_parts(transformation.update, set()))
    makes = lambda x: x in ("trace", "add_decayed_weights") or (x.startswith("scale_by_") and x not in _RATES)  # noqa: E731
    rule = ", ".join(filter(makes, parts))
    return f"Take {_NEAREST[rule]}. {_ALL}" if rule in _NEAREST else _ALL


def _parts(function: Any, seen: set[int]) -> Iterator[str]:
    """The functions of optax that made this one and those inside of it: "scale_by_adam" of scale_by_adam.<locals>.update_fn.

    optax keeps no names, so this reads what closures hold; what it does not find is only not named.
    """
    if isinstance(function, (tuple, list)):
        for x in function:
            yield from _parts(x, seen)
    if id(function) in seen or not str(getattr(function, "__module__", "")).startswith("optax."):
        return
    seen.add(id(function))
    maker, inside, _ = getattr(function, "__qualname__", "").partition(".<locals>.")
    if inside and maker != "with_extra_args_support":
        yield maker
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield from _parts(cell.cell_contents, seen)
        except ValueError:  # an empty cell
            continue
