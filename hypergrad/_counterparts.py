"""What of ours comes nearest to an optax transformation, for the error where one is passed to `hg.train`.

Invariant: where optax's can be told by its parts, ours of the same rule is named first; what cannot be read is not named.
"""

import inspect
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
    "trace with nesterov": "hg.Nesterov(learning_rate, momentum)",
    "scale_by_adam with nesterov": "hg.NAdamW(learning_rate, b1, b2, eps, weight_decay=0.0)",
    "scale_by_adam with nesterov, add_decayed_weights": "hg.NAdamW(learning_rate, b1, b2, eps, weight_decay)",
    "scale_by_lion, add_decayed_weights": "hg.Lion(learning_rate, b1, b2, weight_decay)",
    "scale_by_adam, add_decayed_weights, scale_by_trust_ratio": "hg.LAMB(learning_rate, b1, b2, eps, weight_decay)",
    "add_decayed_weights, scale_by_trust_ratio, trace": "hg.LARS(learning_rate, momentum, weight_decay)",
    "scale_by_ademamix, add_decayed_weights": "hg.AdEMAMix(learning_rate, b1, b2, eps, weight_decay, b3, alpha)",
    "scale_by_adopt": "hg.ADOPT(learning_rate, b1, b2, eps)",
    "muon": "hg.muon_with_adamw",
    "schedule_free, scale_by_rms, add_decayed_weights": "hg.ScheduleFreeAdamW(learning_rate, b1, b2, eps, weight_decay)",
    "add_decayed_weights, trace": f"hg.add_decayed_weights({_HEAVY_BALL}, weight_decay)",
    "add_decayed_weights, scale_by_adam": f"hg.add_decayed_weights({_ADAM}, weight_decay)",
}
_RATES = ("scale_by_learning_rate", "scale_by_schedule")
_OTHERS = ("trace", "add_decayed_weights", "muon", "schedule_free")  # parts of rules that no scale_by_... makes
_NESTEROV = " with nesterov"
_ALL = (
    "There are hg.HeavyBall (optax.sgd with momentum), hg.SGD, hg.Adam, hg.AdamW, hg.RMSProp and hg.Adagrad with momentum, "
    "and around them hg.clip, hg.clip_by_global_norm, hg.add_decayed_weights and hg.freeze; all in docs/optimizers.md."
)


def nearest(transformation: Any) -> str:
    """What to take in place of an optax transformation, in sentences."""
    parts = dict.fromkeys(_parts(transformation.update, set()))
    own = lambda x: x.removesuffix(_NESTEROV)  # noqa: E731
    makes = lambda x: own(x) in _OTHERS or (x.startswith("scale_by_") and own(x) not in _RATES)  # noqa: E731
    rule = ", ".join(x for x in parts if makes(x) and x + _NESTEROV not in parts)
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
        yield maker + _NESTEROV * _has_nesterov(function)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield from _parts(cell.cell_contents, seen)
        except ValueError:  # an empty cell
            continue


def _has_nesterov(function: Any) -> bool:
    """Whether a function of optax was made with nesterov=True, where that can be read: not of one that is jitted."""
    return inspect.isfunction(function) and inspect.getclosurevars(function).nonlocals.get("nesterov") is True
