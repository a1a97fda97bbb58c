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
from jax import Array

import hypergrad as hg
from experiments import _data, _models
from experiments.benchmarks.rules import DYADIC, FAMILY, rounded


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


FINE = 58  # bits after the point: values below 32
CLOSE = 1e-7  # as differences are where decays lie on their grid


def hypergradient_errors(name: str, steps: int = 20) -> tuple[float, float]:
    """Largest relative errors over all hyperparameters: against `hg.Unrolled`, and against differences, the best of twelve
    steps: a kink, as of a clip, within one spoils it, and so does a decay off its grid. Where both are zero: 0.

    Few steps, since kinks grow dense, and a fine grid: what training rounds to the usual one is noise to a difference, up
    to 1e-5 of a small derivative.
    """
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {"a": jnp.asarray(rng.normal(size=(6, 5))), "b": jnp.asarray(rng.normal(size=(5, 3)))}
        x, y = jnp.asarray(rng.normal(size=(24, 6))), jnp.asarray(rng.normal(size=(24, 3)))
        optimizer = jax.tree.map(jnp.float64, DYADIC[name])

        fine = hg.Reversible(fraction_bits=FINE), hg.Unrolled(fraction_bits=FINE)

        def objective(optimizer: Any, adjoint: Any = fine[0]) -> Array:
            run = hg.train(_squares, params, optimizer, hg.full_batch((x, y)), steps=steps, adjoint=adjoint)
            return _squares(run.params, None, (x + 0.1, y))

        reversed_, unrolled = (
            jax.tree.leaves(jax.jit(jax.grad(functools.partial(objective, adjoint=adjoint)))(optimizer)) for adjoint in fine
        )
        f = jax.jit(objective)
        errors = []
        for (field, value), gradient in zip(optimizer.hyperparameters().items(), reversed_, strict=True):
            along = lambda v, field=field: f(_with(optimizer, field, v))  # noqa: E731
            room = min(float(value), float(1 - value)) if value < 1 else float(value)
            found = [_difference(along, value, room / 2**k) for k in range(1, 13)]
            error = lambda xs, gradient=float(gradient): min(abs(x - gradient) for x in xs) / (abs(gradient) or 1)  # noqa: E731
            errors.append(error(found) if error(found) < CLOSE else error([*found, _fitted(along, value, room)]))
        other = [float(abs(a - b) / jnp.where(b == 0, 1, abs(b))) for a, b in zip(reversed_, unrolled, strict=True)]
        return max(other), max(errors)


def _difference(f: Callable[[Array], Array], x: Array, step: float) -> float:
    """Derivative by central differences of sixth order."""
    fine, middle, coarse = (float(f(x + h) - f(x - h)) / (2 * h) for h in (step / 4, step / 2, step))
    return (64 * fine - 20 * middle + coarse) / 45


def _fitted(f: Callable[[Array], Array], x: Array, room: float) -> float:
    """Derivative by central differences of 600 steps and an even polynomial through them: decays off their grid are rounded
    to it, a noise that only many steps take out."""
    share = np.linspace(0.1, 0.9, 600)
    both = jax.jit(jax.vmap(f))(x + np.concatenate([share, -share]) * room)
    differences = np.subtract(*np.split(np.asarray(both), 2)) / (2 * share * room)
    powers = share[:, None] ** (2 * np.arange(9) + 1)  # the noise of a difference falls with its step
    return float(np.linalg.lstsq(powers, differences * share)[0][0])


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
