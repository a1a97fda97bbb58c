"""The rules of random cases: which, in what form their hyperparameters are, and what is around them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import hypergrad as hg
from experiments._case_own_rules import OWN, OWN_TRANSFORMS
from experiments._grammar import Shape
from hypergrad.optimizers import Link, Optimizer


RULES: dict[str, tuple[Any, float, tuple[str, ...]]] = {  # the rule, a rate that suits, its decays
    "SGD": (hg.SGD, 0.3, ("momentum",)), "HeavyBall": (hg.HeavyBall, 0.05, ("momentum",)),
    "Adam": (hg.Adam, 0.03, ("b1", "b2")), "AdamW": (hg.AdamW, 0.03, ("b1", "b2")),
    "RMSProp": (hg.RMSProp, 0.01, ("decay", "momentum")), "Adagrad": (hg.Adagrad, 0.02, ("momentum",)),
}  # fmt: skip
LATER: dict[str, tuple[Any, float, tuple[str, ...]]] = {
    "Nesterov": (hg.Nesterov, 0.03, ("momentum",)), "NAdamW": (hg.NAdamW, 0.03, ("b1", "b2")),
    "AdEMAMix": (hg.AdEMAMix, 0.02, ("b1", "b2")), "ADOPT": (hg.ADOPT, 0.02, ("b1", "b2")),
    "smooth Lion": (functools.partial(hg.Lion, temperature=0.3), 0.02, ("b2",)),
    "ScheduleFreeAdamW": (hg.ScheduleFreeAdamW, 0.03, ("b2",)),
    "LARS": (functools.partial(hg.LARS, trust=0.1), 0.3, ("momentum",)), "LAMB": (hg.LAMB, 0.03, ("b1", "b2")),
}  # fmt: skip


def _normuon(rate: Any, momentum: Any, b2: Any) -> Any:
    """Of matrices."""
    rules = {"matrix": hg.NorMuon(rate, momentum, b2=b2), "other": hg.AdamW(rate)}
    return hg.partition(rules, lambda params: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "other", params))


def _mixed(rate: Any, momentum: Any, b2: Any) -> Any:
    """Every other leaf by another rule."""
    rules = {"even": hg.HeavyBall(rate, momentum), "odd": hg.clip(hg.Adam(rate, 0.9, b2), 0.3)}
    return hg.partition(rules, lambda params: _by_turns(params, ("even", "odd")))


def _by_turns(params: Any, labels: tuple[str, str]) -> Any:
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [labels[i % 2] for i in range(len(leaves))])


class _QuasiHyperbolic(Optimizer):
    """w <- w - a (g + v) / 2, which has an inverse by a gradient link alone."""

    learning_rate: Any
    momentum: Any
    chain = (
        Link("velocity", lambda h, z, g: (1 - h.momentum) * g, decay="momentum"),
        Link("params", lambda h, z, g: -h.learning_rate * (g + z.velocity) / 2),
    )


def _with_link(rate: Any, momentum: Any) -> Any:
    return hg.with_gradient_link(_QuasiHyperbolic(rate, momentum), 2)


_shampoo = functools.partial(hg.Shampoo, ridge=1e-2, eps=1e-4)
WIDE: dict[str, tuple[Any, float, tuple[str, ...]]] = {
    "Muon beside AdamW": (hg.muon_with_adamw, 0.03, ("momentum", "b2")),
    "NorMuon beside AdamW": (_normuon, 0.02, ("momentum", "b2")),
    "Shampoo": (_shampoo, 0.03, ("momentum", "b2")),
    "Shampoo, held": (functools.partial(_shampoo, every=2, graft="adam"), 0.03, ("momentum", "b2")),
    "a partition": (_mixed, 0.03, ("momentum", "b2")),
    "a rule with a gradient link": (_with_link, 0.3, ("momentum",)),
}  # fmt: skip
DECAYS = (0.3, 0.75, 0.9, 0.97)
TRANSFORMS = ("clip", "clip_by_global_norm", "add_decayed_weights", "freeze")
_SIZES = {"clip": 0.05, "clip_by_global_norm": 0.2, "add_decayed_weights": 0.1}
_SIZES |= {name: size for name, (_, size) in OWN_TRANSFORMS.items()}


class Arrays:
    """Draws with float32's digits: the same numbers in every precision."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __call__(self, shape: Shape) -> np.ndarray:
        return np.asarray(self.rng.normal(size=shape), np.float32)

    def dict(self, shapes: dict[str, Shape]) -> dict[str, np.ndarray]:
        return {name: self(shape) for name, shape in shapes.items()}


def decay_of(one: Any, chance: Any, value: Any) -> Any:
    return hg.unit_interval(value) if chance(0.5) else value


def rule_of(
    arrays: Arrays, one: Any, chance: Any, name: str, h: dict[str, Any], transforms: tuple[str, ...]
) -> tuple[Callable[..., Any], str]:
    """(natural h, steps) -> the optimizer, and its name; what it takes of h is added to h. transforms: to draw from."""
    kind, size, decays = (RULES | LATER | WIDE | OWN)[name]
    form = one(("scalar", "scalar", "per leaf", "per weight", "per step"))
    spread = lambda shape: size * np.exp(0.3 * arrays(shape))  # noqa: E731
    forms: dict[str, Callable[[], Any]] = {
        "scalar": lambda: spread(()),
        "per leaf": lambda: {k: spread(()) for k in h["params"]},
        "per weight": lambda: {k: spread(w.shape) for k, w in h["params"].items()},
        "per step": lambda: spread((8,)),  # as many as there are steps are taken
    }
    h["rate"] = hg.positive(forms[form]()) if chance(0.5) else forms[form]()
    fixed = {}
    for decay in decays:
        value = np.float64(one(DECAYS))
        if chance(0.4):
            h[decay] = decay_of(one, chance, value)
        else:
            fixed[decay] = float(value)
    wrappers = [one(transforms)] * chance(0.45) + [one(transforms)] * chance(0.1)
    for wrapper in wrappers:
        if wrapper != "freeze":
            h[wrapper] = np.float64(_SIZES[wrapper])
    mask = {k: i > 0 for i, k in enumerate(h["params"])}

    def optimizer(h: dict[str, Any], steps: int) -> Any:
        rate = hg.PerStep(h["rate"][:steps]) if form == "per step" else h["rate"]
        found = kind(rate, **fixed, **{k: h[k] for k in decays if k in h})
        for wrapper in wrappers:
            if wrapper == "freeze":
                found = hg.freeze(found, mask)
            else:
                around = OWN_TRANSFORMS[wrapper][0] if wrapper in OWN_TRANSFORMS else getattr(hg, wrapper)
                found = around(found, h[wrapper])
        return found

    return optimizer, " in ".join([f"{name} with a rate {form}", *wrappers])
