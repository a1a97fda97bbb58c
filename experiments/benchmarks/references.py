"""Each rule beside its reference, from the same start on the same batches: losses of three networks.

    python -m experiments.benchmarks.references [--steps 1000] [--data mnist] [--only Muon SOAP]

References are optax's, and for rules that it does not have, plain ones from the papers (`reference_rules`), both with decays
as they are rounded here. Rules with a gradient link have one of 16 bits: what is 2^-16 of it then is not in the originals,
nor is what the link of held roots keeps of the roots before. Largest |ours - theirs| / theirs of the training losses of all
steps: in float64, where the grid alone differs, and in float32, where rounding does too; and what rounding does to each of
the two, beside the reference in float64.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import Array

import hypergrad as hg
from experiments import _data, _models
from experiments.benchmarks import reference_rules
from experiments.benchmarks.rules import FAMILY, Member, fine, rounded


NETWORKS: dict[str, tuple[int, ...]] = {"softmax regression": (), "two layers": (64, 64), "four layers": (32, 32, 32, 32)}
BITS = 16
REST = 1e-3  # the rate of all that is no matrix


def beside_adamw(rule: Any) -> Any:
    labels = lambda w: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", w)  # noqa: E731
    return hg.partition({"matrix": rule, "rest": hg.AdamW(REST, weight_decay=0.0)}, labels)


def of_matrices(rule: Any, theirs: Callable[[Any], optax.GradientTransformation]) -> Member:
    return Member(beside_adamw(rule), lambda r: reference_rules.beside_adamw(theirs(r), REST, r(0.9), r(0.999)))


def of_curvature(rule: Any, theirs: Callable[..., optax.GradientTransformation]) -> Member:
    quantity = next(iter(rule.signals)).split(",")[0]
    return Member(rule, lambda r: theirs(loss, quantity, rule.learning_rate, rule.damping, r(rule.momentum), r(rule.decay)))


def loss(w: Any, _: Any, batch: Any) -> Array:
    return _models.cross_entropy(w, *batch)


REFERENCES = {name: FAMILY[name] for name in ("SGD", "HeavyBall", "Adam", "AdamW", "RMSProp", "Adagrad", "ADOPT")} | {
    "AdEMAMix": Member(
        hg.AdEMAMix(1e-3), lambda r: optax.contrib.ademamix(1e-3, r(0.9), r(0.999), fine(0.9999), weight_decay=0.0)
    ),
    "Lion": FAMILY["Lion"],
    "LARS": FAMILY["LARS"],
    "LAMB": Member(hg.LAMB(1e-3, weight_decay=1e-3, bits=BITS), FAMILY["LAMB"].theirs),
    "Nesterov": Member(hg.Nesterov(0.05, bits=BITS), FAMILY["Nesterov"].theirs),
    "NAdamW": Member(hg.NAdamW(1e-3, weight_decay=0.0, bits=BITS), FAMILY["NAdamW"].theirs),
    "ScheduleFreeAdamW": Member(hg.ScheduleFreeAdamW(1e-3, bits=BITS), FAMILY["ScheduleFreeAdamW"].theirs),
    "DiagonalGGN": of_curvature(hg.DiagonalGGN(0.01), reference_rules.diagonal),
    "DiagonalGGNMC": of_curvature(hg.DiagonalGGNMC(0.01), reference_rules.diagonal),
    "KFAC": of_curvature(hg.KFAC(0.01), reference_rules.kronecker),
    "KFLR": of_curvature(hg.KFLR(0.01), reference_rules.kronecker),
    "KFRA": of_curvature(hg.KFRA(0.01), reference_rules.kronecker),
    "Muon": Member(
        hg.muon_with_adamw(0.002, adam_learning_rate=REST),
        lambda r: optax.contrib.muon(
            0.002, beta=r(0.95), nesterov=False, adam_b1=r(0.9), adam_b2=r(0.999), adam_learning_rate=REST
        ),
    ),
    "Muon, Nesterov": of_matrices(
        hg.Muon(0.002, nesterov=True, bits=BITS), lambda r: reference_rules.nesterov_muon(0.002, r(0.95))
    ),
    "NorMuon": of_matrices(hg.NorMuon(0.002), lambda r: reference_rules.normuon(0.002, r(0.95), r(0.95))),
    "Shampoo, k = 10": of_matrices(
        hg.Shampoo(0.01, every=10, graft="adam"), lambda r: reference_rules.shampoo(0.01, r(0.9), r(0.999))
    ),
    "SOAP, k = 10": of_matrices(hg.SOAP(1e-3), lambda r: reference_rules.soap(1e-3, r(0.95), r(0.95), r(0.95))),
}


def by_optax(rule: optax.GradientTransformation, params: Any, batches: Any, steps: int) -> Array:
    """Losses: [steps]. The rule is told the batch, and the key of the step."""
    told = optax.with_extra_args_support(rule)

    def step(carry: Any, t: Array) -> Any:
        w, state = carry
        value, g = jax.value_and_grad(loss)(w, None, batches(t))
        key = jax.random.fold_in(jax.random.key(0), t)
        updates, state = told.update(g, state, w, batch=batches(t), key=key)
        return (optax.apply_updates(w, updates), state), value

    start = params, rule.init(params)
    return jax.jit(lambda: jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))[1])()


def losses(member: Member, data: _data.Data, hidden: tuple[int, ...], steps: int, dtype: Any) -> tuple[Any, Any]:
    """Ours and the reference's, from the same start in float32, on the same images: NumPy [steps] each."""
    with jax.enable_x64(False):
        sizes = (data.train.x.shape[1], *hidden, 10)
        scale = {f"layer_{i + 1}": {"weights": n**-0.5, "biases": 0.0} for i, n in enumerate(sizes[:-1])}
        start = jax.tree.map(np.asarray, _models.init_mlp(jax.random.key(0), sizes, scale))
    with jax.enable_x64(dtype == jnp.float64):
        params = jax.tree.map(lambda w: jnp.asarray(w, dtype), start)
        x, y = jnp.asarray(np.asarray(data.train.x, np.float32), dtype), jnp.asarray(data.train.y)
        batches = hg.minibatches((x, y), 100, jax.random.key(1))
        ours = jax.tree.map(lambda a: jnp.asarray(a, dtype), member.ours)
        assert member.theirs is not None
        run = jax.jit(lambda: hg.train(loss, params, ours, batches, steps=steps).losses)()
        return np.asarray(run), np.asarray(by_optax(member.theirs(rounded), params, batches, steps))


class Differences(NamedTuple):
    """Largest relative ones of the losses of all steps."""

    wide: float  # ours beside the reference, both in float64
    narrow: float  # both in float32
    ours: float  # ours in float32 beside the reference in float64
    theirs: float  # the reference in float32 beside itself in float64


def differences(member: Member, data: _data.Data, hidden: tuple[int, ...], steps: int) -> Differences:
    of_type = functools.partial(losses, member, data, hidden, steps)
    (wide, reference), (narrow, rounded_reference) = of_type(jnp.float64), of_type(jnp.float32)
    pairs = (wide, reference), (narrow, rounded_reference), (narrow, reference), (rounded_reference, reference)
    return Differences(*(float(np.max(np.abs(x / y - 1))) for x, y in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--data", choices=("digits", "mnist", "fashion_mnist"), default="digits")
    parser.add_argument("--only", nargs="*", default=list(REFERENCES), choices=list(REFERENCES))
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; {arguments.steps} steps on {arguments.data}\n")
    head = "float64 | float32 | ours in float32, reference in float64 | reference in float32 and in float64"
    print("| | " + " | ".join(f"{name}: {head}" for name in NETWORKS) + " |")
    print("| --- |" + " ---: |" * (4 * len(NETWORKS)))
    data = _data.load(arguments.data, 0)
    for name in arguments.only:
        cells = [x for hidden in NETWORKS.values() for x in differences(REFERENCES[name], data, hidden, arguments.steps)]
        print(f"| {name} | " + " | ".join(f"{x:.1e}" for x in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
