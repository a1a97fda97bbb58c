"""Each optimizer's exactness: long reversals, hypergradients against other roads, learning curves against optax.

    python -m experiments.benchmarks.optimizer_family [--steps 5000] [--curve-steps 500] [--data mnist]

Reversal: a network with two hidden layers of 64 on real images, float32, by itself and two seeds at once, under `jax.vmap`
in `jax.jit`. Hypergradients: float64, a small network. Learning curves: the first network, in float64 (where the grid is
what differs) and in float32 (where rounding differs too); optax gets the rounded decays, or the nominal ones where the table
says so. Bits: "stored" counts words and what waits to become one, "content" the words alone.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import Array

import hypergrad as hg
from experiments import _data, _models


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
    "LARS": hg.LARS(2.0**-3, 0.875, 2.0**-3, 2.0**-3),
    "LAMB": hg.LAMB(2.0**-7, 0.875, 1 - 2.0**-5, 2.0**-7, 2.0**-3),
    "Muon": hg.Muon(2.0**-7, 0.875, 2.0**-3),
    "Muon, Nesterov": hg.Muon(2.0**-7, 0.875, 2.0**-3, nesterov=True),
    "NorMuon": hg.NorMuon(2.0**-7, 0.875, 2.0**-3, b2=0.875),
    "Shampoo, k = 10": hg.Shampoo(2.0**-5, 0.875, 1 - 2.0**-5, 2.0**-3, 0.25, 2.0**-7, 2.0**-10, every=10),
}


def rounded(decay: float) -> float:
    return round(decay * 2**16) / 2**16


class Images(NamedTuple):
    """Classification with two hidden layers, float32."""

    data: _data.Name
    steps: int

    def start(self, key: Array) -> Any:
        features = _data.load(self.data, 0).train.x.shape[1]
        return _models.init_mlp(key, (features, 64, 64, 10), 0.05)

    def batches(self) -> Callable[[Any], Any]:
        train = _data.load(self.data, 0).train
        return hg.minibatches((jnp.asarray(train.x, jnp.float32), jnp.asarray(train.y)), 100, jax.random.key(1))

    def loss(self, w: Any, _: Any, batch: Any) -> Array:
        return _models.cross_entropy(w, *batch)


def reversal(name: str, task: Images) -> hg.Certificate:
    start = task.start(jax.random.key(0))
    return hg.check_reversal(task.loss, start, FAMILY[name].ours, task.batches(), steps=task.steps)


def seeds_come_back(name: str, task: Images, seeds: int = 2) -> str:
    """Whether the certificate holds for each of the hypergradients under `jax.vmap` in `jax.jit`; and if they are finite,
    which they need not be where the loss has come to zero and the step of a rule still has a size."""
    batches = task.batches()

    def end(optimizer: Any, start: Any) -> Array:
        run = hg.train(task.loss, start, optimizer, batches, steps=task.steps)
        return task.loss(run.params, None, batches(0))

    starts = jax.vmap(task.start)(jax.random.split(jax.random.key(0), seeds))
    rule = jax.tree.map(jnp.float32, FAMILY[name].ours)
    try:
        found = jax.jit(jax.vmap(jax.grad(end), (None, 0)), compiler_options=hg.compiler_options())(rule, starts)
        finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(jax.block_until_ready(found)))
        return "True" if finite else "True, inf"
    except hg.ReversalError:
        return "False"


def hypergradient_errors(name: str, steps: int = 40) -> tuple[float, float]:
    """Largest relative errors over all hyperparameters: against `hg.Unrolled`, and against differences, the best of five
    steps: a kink, as of a clip, within one spoils it, and so does a decay off its grid. Where both are zero: 0."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {"a": jnp.asarray(rng.normal(size=(6, 5))), "b": jnp.asarray(rng.normal(size=(5, 3)))}
        x, y = jnp.asarray(rng.normal(size=(24, 6))), jnp.asarray(rng.normal(size=(24, 3)))
        optimizer = jax.tree.map(jnp.float64, DYADIC[name])

        def objective(optimizer: Any, adjoint: Any = hg.Reversible()) -> Array:  # noqa: B008 (frozen)
            run = hg.train(_squares, params, optimizer, hg.full_batch((x, y)), steps=steps, adjoint=adjoint)
            return _squares(run.params, None, (x + 0.1, y))

        reversed_, unrolled = (
            jax.tree.leaves(jax.jit(jax.grad(functools.partial(objective, adjoint=adjoint)))(optimizer))
            for adjoint in (hg.Reversible(), hg.Unrolled())
        )
        f = jax.jit(objective)
        errors = []
        for (field, value), gradient in zip(optimizer.hyperparameters().items(), reversed_, strict=True):
            along = lambda v, field=field: f(_with(optimizer, field, v))  # noqa: E731
            room = min(float(value), float(1 - value)) if value < 1 else float(value)
            found = [_difference(along, value, room / parts) for parts in (2, 8, 64, 512, 4096)]
            errors.append(min(abs(x - float(gradient)) for x in found) / (abs(float(gradient)) or 1))
        other = [float(abs(a - b) / jnp.where(b == 0, 1, abs(b))) for a, b in zip(reversed_, unrolled, strict=True)]
        return max(other), max(errors)


def _difference(f: Callable[[Array], Array], x: Array, step: float) -> float:
    """Derivative by central differences of sixth order."""
    fine, middle, coarse = (float(f(x + h) - f(x - h)) / (2 * h) for h in (step / 4, step / 2, step))
    return (64 * fine - 20 * middle + coarse) / 45


def _with(optimizer: Any, field: str, value: Any) -> Any:
    return eqx.tree_at(lambda rule: getattr(rule, field), optimizer, value)


def _squares(w: Any, _: Any, batch: Any) -> Array:
    x, y = batch
    return jnp.mean(hg.curvature.likelihood("squared_error", jnp.tanh(x @ w["a"]) @ w["b"], y))


SMALL = 1e-5  # below it a root mean square of gradients counts as small


class Curve(NamedTuple):
    loss: float  # largest relative difference of the losses
    params: float  # largest absolute difference of a parameter at the end
    final: float
    update: float  # weights whose gradients are not small: largest relative difference of a step, |ours - theirs| / |theirs|
    small: float  # the others: largest update of a weight, over the learning rate
    small_theirs: float  # the same of optax: Adam's own may reach (1 - b1) / sqrt(1 - b2) = 3.2


def curve(
    name: str,
    data: _data.Name,
    steps: int,
    dtype: Any,
    rounding: Callable[[float], float],
    hidden: tuple[int, ...] = (64, 64),
) -> Curve:
    """Our training beside optax's: from the same start on the same batches, and step by step on our gradients."""
    with jax.enable_x64(dtype == jnp.float64):
        train = _data.load(data, 0).train
        x, y = jnp.asarray(train.x, dtype), jnp.asarray(train.y)
        params = _models.init_mlp(jax.random.key(0), (x.shape[1], *hidden, 10), 0.05)
        params = jax.tree.map(lambda w: w.astype(dtype), params)
        batches = hg.minibatches((x, y), 100, jax.random.key(1))
        theirs = FAMILY[name].theirs
        assert theirs is not None, f"{name} has no counterpart in optax"
        ours, rule = jax.tree.map(lambda a: jnp.asarray(a, dtype), FAMILY[name].ours), theirs(rounding)
        visited: dict[int, Any] = {}

        def loss(w: Any, _: Any, batch: Any) -> Array:
            return _models.cross_entropy(w, *batch)

        def watched(w: Any, _: Any, batch: Any) -> Array:
            t, *batch = batch
            jax.debug.callback(lambda t, w: visited.update({int(t): jax.tree.map(np.array, w)}), t, w)
            return loss(w, _, batch)

        run = jax.jit(lambda: hg.train(watched, params, ours, lambda t: (t, *batches(t)), steps=steps))()
        jax.block_until_ready(run)
        jax.effects_barrier()

        def free(carry: Any, t: Array) -> Any:
            w, state = carry
            value, g = jax.value_and_grad(loss)(w, None, batches(t))
            updates, state = rule.update(g, state, w)
            return (optax.apply_updates(w, updates), state), value

        def led(carry: Any, x: Any) -> Any:
            state, squares = carry
            t, w, after = x
            g = jax.grad(loss)(w, None, batches(t))
            theirs, state = rule.update(g, state, w)
            squares = jax.tree.map(lambda s, g: s + g**2, squares, g)
            ours, theirs, root = map(_flat, (jax.tree.map(jnp.subtract, after, w), theirs, squares))
            seen = jnp.sqrt(root / (t + 1)) >= SMALL
            error = jnp.linalg.norm(jnp.where(seen, ours - theirs, 0)) / jnp.linalg.norm(jnp.where(seen, theirs, 0))
            return (state, squares), (error, *(jnp.max(jnp.where(seen, 0, jnp.abs(x))) for x in (ours, theirs)))

        t = jnp.arange(steps, dtype=jnp.int32)
        (w, _), losses = jax.jit(lambda: jax.lax.scan(free, (params, rule.init(params)), t))()
        way = jax.tree.map(lambda *w: np.stack(w), *(visited[t] for t in range(steps)), run.params)
        xs = (t, jax.tree.map(lambda w: w[:-1], way), jax.tree.map(lambda w: w[1:], way))
        first = rule.init(params), jax.tree.map(jnp.zeros_like, params)
        _, (errors, *small) = jax.jit(lambda xs: jax.lax.scan(led, first, xs))(xs)
        return Curve(
            float(jnp.max(jnp.abs(run.losses / losses - 1))),
            float(jnp.max(jnp.abs(_flat(w) - _flat(run.params)))),
            float(losses[-1]),
            float(jnp.max(errors)),
            *(float(jnp.max(x) / ours.learning_rate) for x in small),
        )


def _flat(tree: Any) -> Array:
    return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--curve-steps", type=int, default=500)
    parser.add_argument("--data", choices=("digits", "mnist", "fashion_mnist"), default="digits")
    parser.add_argument("--only", nargs="*", default=list(FAMILY), choices=list(FAMILY))
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print(f"\n{arguments.steps} steps on {arguments.data} and back, bits per parameter and step")
    columns = [f"{x:>9s}" for x in ("theory", "stored", "excess", "content", "excess", "seconds")]
    print(f"{'':18s} {'exact':>6s} {'vmap':>9s} {' '.join(columns)}")
    task = Images(arguments.data, arguments.steps)
    for name in arguments.only:
        begin, proof = time.perf_counter(), reversal(name, task)
        seconds, mapped = time.perf_counter() - begin, seeds_come_back(name, task)
        ideal = proof.ideal_bits_per_parameter_step
        columns = [
            f"{bits:9.5f} {bits / ideal - 1:9.2%}"
            for bits in (proof.bits_per_parameter_step, proof.content_bits_per_parameter_step)
        ]
        print(f"{name:18s} {proof.exact!s:>6s} {mapped:>9s} {ideal:9.5f} {' '.join(columns)} {seconds:9.1f}", flush=True)
    print(f"\nhypergradients in float64, largest relative error\n{'':18s} {'Unrolled':>9s} {'differences':>12s}")
    for name in (name for name in arguments.only if name in DYADIC):
        print("{:18s} {:9.1e} {:12.1e}".format(name, *hypergradient_errors(name)), flush=True)
    print(f"\n{arguments.curve_steps} steps on {arguments.data} beside optax: largest relative difference of the losses;")
    print(f"of an update, over the weights whose gradients are {SMALL:.0e} or more; of the others, largest update / rate")
    head = ("float64", "float32", "nominal, float32", "update", "others", "others in optax", "last loss")
    print(f"{'':18s} " + " ".join(f"{x:>16s}" for x in head))
    for name in (name for name in arguments.only if FAMILY[name].theirs is not None):
        run = functools.partial(curve, name, arguments.data, arguments.curve_steps)
        wide, narrow = run(jnp.float64, rounded), run(jnp.float32, rounded)
        nominal = run(jnp.float32, lambda decay: decay)
        numbers = (wide.loss, narrow.loss, nominal.loss, narrow.update, narrow.small, narrow.small_theirs)
        print(f"{name:18s} " + " ".join(f"{x:16.1e}" for x in numbers) + f" {narrow.final:16.4f}", flush=True)


if __name__ == "__main__":
    main()
