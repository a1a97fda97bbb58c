"""The optimizers that benchmarks compare, at typical values: beside their counterparts in optax, and for differences."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib

import hypergrad as hg


class Member(NamedTuple):
    """An optimizer at a typical learning rate, and the same rule in optax given its decays."""

    ours: Any
    theirs: Callable[[Callable[[float], float]], optax.GradientTransformation] | None  # how decays are rounded -> rule


def matrices_by(rule: Any) -> Any:
    labels = lambda w: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", w)  # noqa: E731
    return hg.partition({"matrix": rule, "rest": hg.AdamW(1e-3)}, labels)


def fine(decay: float) -> float:
    return round(decay * 2**24) / 2**24


FAMILY = {
    "SGD": Member(hg.SGD(0.5, 0.9), lambda r: optax.sgd(0.5 * (1 - r(0.9)), r(0.9))),
    "HeavyBall": Member(hg.HeavyBall(0.05, 0.9), lambda r: optax.sgd(0.05, r(0.9))),
    "Adam": Member(hg.Adam(1e-3), lambda r: optax.adam(1e-3, r(0.9), r(0.999))),
    "AdamW": Member(
        hg.AdamW(1e-3, weight_decay=2.0**-24 * 16_800 / 1e-3),
        lambda r: optax.adamw(1e-3, r(0.9), r(0.999), weight_decay=2.0**-24 * 16_800 / 1e-3),
    ),
    "RMSProp": Member(hg.RMSProp(1e-4), lambda r: optax.rmsprop(1e-4, r(0.9), momentum=r(0.9))),
    "Adagrad": Member(
        hg.Adagrad(1e-3),
        lambda r: optax.chain(optax.scale_by_rss(0.0, 1e-8), optax.scale_by_learning_rate(1e-3), optax.trace(r(0.9))),
    ),
    "AdEMAMix": Member(hg.AdEMAMix(1e-3), lambda r: optax.contrib.ademamix(1e-3, r(0.9), r(0.999), fine(0.9999))),
    "ADOPT": Member(hg.ADOPT(1e-3), lambda r: optax.contrib.adopt(1e-3, r(0.9), r(0.9999))),
    "Sophia": Member(hg.Sophia(1e-3), None),
    "SophiaG": Member(hg.SophiaG(1e-3), None),
    "Lion": Member(hg.Lion(1e-4, weight_decay=0.0), lambda r: optax.lion(1e-4, 0.9, r(0.99), weight_decay=0.0)),
    "Nesterov": Member(hg.Nesterov(0.05), lambda r: optax.sgd(0.05, r(0.9), nesterov=True)),
    "NAdamW": Member(hg.NAdamW(1e-3, weight_decay=0.0), lambda r: optax.nadam(1e-3, r(0.9), r(0.999))),
    "ScheduleFreeAdamW": Member(
        hg.ScheduleFreeAdamW(1e-3), lambda r: optax.contrib.schedule_free_adamw(1e-3, b1=0.9, b2=r(0.999))
    ),
    "DiagonalGGN": Member(hg.DiagonalGGN(0.01), None),
    "DiagonalGGNMC": Member(hg.DiagonalGGNMC(0.01), None),
    "KFAC": Member(hg.KFAC(0.01), None),
    "KFLR": Member(hg.KFLR(0.01), None),
    "KFRA": Member(hg.KFRA(0.01), None),
    "KFAC, k = 10": Member(hg.KFAC(0.01, every=10), None),
    "LARS": Member(hg.LARS(0.1, 0.9, 1e-3, 0.01), lambda r: optax.lars(0.1, 1e-3, trust_coefficient=0.01, momentum=r(0.9))),
    "LAMB": Member(hg.LAMB(1e-3, weight_decay=1e-3), lambda r: optax.lamb(1e-3, r(0.9), r(0.999), weight_decay=1e-3)),
    "Muon": Member(hg.muon_with_adamw(0.002), None),
    "Muon, Nesterov": Member(hg.muon_with_adamw(0.002, nesterov=True), None),
    "NorMuon": Member(matrices_by(hg.NorMuon(0.002)), None),
    "Shampoo, k = 10": Member(matrices_by(hg.Shampoo(0.01, every=10, graft="adam")), None),
    "SOAP, k = 10": Member(matrices_by(hg.SOAP(1e-3)), None),
}


# For differences: values and steps on the grids of decays, 2^-16 and 2^-24.
DYADIC = {
    "SGD": hg.SGD(0.25, 0.875),
    "HeavyBall": hg.HeavyBall(2.0**-5, 0.875),
    "Adam": hg.Adam(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-7),
    "AdamW": hg.AdamW(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-7, 2.0**-3),
    "RMSProp": hg.RMSProp(2.0**-7, 0.875, 0.875, 2.0**-7),
    "Adagrad": hg.Adagrad(2.0**-7, 0.875, 2.0**-7),
    "AdEMAMix": hg.AdEMAMix(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-7, 2.0**-3, 1 - 2.0**-7, 2.0),
    "ADOPT": hg.ADOPT(2.0**-7, 0.875, 1 - 2.0**-5, 0.5, 2.0**-3),
    "Sophia": hg.Sophia(2.0**-7, 0.875, 1 - 2.0**-5, 1.0, 2.0**-3, 2.0**-3),
    "SophiaG": hg.SophiaG(2.0**-7, 0.875, 1 - 2.0**-5, 1.0, 2.0**-3, 2.0**-3),
    "Lion": hg.Lion(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-3, temperature=0.25),
    "Nesterov": hg.Nesterov(2.0**-5, 0.875),
    "NAdamW": hg.NAdamW(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-7, 2.0**-3),
    "ScheduleFreeAdamW": hg.ScheduleFreeAdamW(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-7, 2.0**-3),
    **{
        name: rule(2.0**-5, 2.0**-4, 0.875, 1 - 2.0**-5, 2.0**-3)
        for name, rule in (
            ("DiagonalGGN", hg.DiagonalGGN),
            ("DiagonalGGNMC", hg.DiagonalGGNMC),
            ("KFAC", hg.KFAC),
            ("KFLR", hg.KFLR),
            ("KFRA", hg.KFRA),
        )
    },  # fmt: skip
    "KFAC, k = 10": hg.KFAC(2.0**-5, 2.0**-4, 0.875, 1 - 2.0**-5, 2.0**-3, every=10),
    "LARS": hg.LARS(2.0**-3, 0.875, 2.0**-3, 2.0**-3),
    "LAMB": hg.LAMB(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-7, 2.0**-3),
    "Muon": hg.Muon(2.0**-7, 0.875, 2.0**-3),
    "Muon, Nesterov": hg.Muon(2.0**-7, 0.875, 2.0**-3, nesterov=True),
    "NorMuon": hg.NorMuon(2.0**-7, 0.875, 2.0**-3, b2=0.875),
    "Shampoo, k = 10": hg.Shampoo(2.0**-5, 0.875, 1 - 2.0**-5, 2.0**-3, 0.25, 2.0**-7, 2.0**-10, every=10),
    "SOAP, k = 10": hg.SOAP(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-7, 2.0**-3, 1 - 2.0**-5, every=10),
}


def rounded(decay: float) -> float:
    return round(decay * 2**16) / 2**16
