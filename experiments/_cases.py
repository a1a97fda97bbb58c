"""A random case of training: a loss of the grammar, a rule, data, a mode, and what is differentiated. All by one number."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.special  # noqa: F401  for the sources
import numpy as np

import hypergrad as hg
from experiments import _bent_rules
from experiments._case_own_rules import OWN, OWN_TRANSFORMS, ROUND
from experiments._case_roads import ROADS, trained
from experiments._case_rules import DECAYS, LATER, RULES, TRANSFORMS, WIDE, Arrays, decay_of, rule_of
from experiments._grammar import Shape, write_loss
from experiments._grammar_operations import FIRST, WHOLE
from experiments._judge import Case


DISTINCT = 3  # batches
SHAPES: tuple[Shape, ...] = ((), (3,), (4,), (2, 3), (3, 4), (3, 3), (4, 3), (2, 2, 3))
MODES = {  # how the derivative is asked for, and how often
    "jit": 44, "vmap": 18, "eager": 12, "eager vmap": 3, "hypergradient": 6, "optimize": 5, "driver=host": 3,
    "buffer=host": 2, "buffer=gmpy2": 2, "host_batches": 2, "isolate": 3,
}  # fmt: skip
LATER_SEEDS = 1_000_000  # of rules that came later: all before stay as they were
SEEDS_THAT_READ = 2_000_000  # rows of theta by index, and one value of it per step
SEEDS_IN_PARTS = 3_000_000  # train with microbatches
WIDE_SEEDS = 4_000_000  # of rules of matrices and partitions, other roads back, runs that go on, and metrics
COMPLEX_SEEDS = 5_000_000  # of those, with a complex number in theta, made of two real hyperparameters
OWN_SEEDS = 6_000_000  # of those, with rules and transformations of one's own, narrow parameters, and more of JAX
NARROW = ("bfloat16", "float16", "float32")


class Drawn(NamedTuple):
    """A case, and what there is to say of it."""

    seed: int
    source: str  # of the loss
    what: str  # all else, in words
    mode: str
    names: tuple[str, ...]  # what is differentiated
    quick: bool  # whether it is compiled with few optimizations, in half of the time, and not as users do
    x64: bool
    marks: frozenset[str]  # what the loss has: "own rule", "16 bits", "32 bits"
    make: Callable[[], Case]  # inside of `jax.enable_x64(x64)`


def loss_of(source: str, seed: int) -> Callable[[Any, Any, Any], Any]:
    """The function that a source defines."""
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, **{k: v for k, v in vars(_bent_rules).items() if k[0] != "_"}}
    exec(compile(source, f"<loss {seed}>", "exec"), names)  # noqa: S102
    return names["loss"]


def clean(source: str) -> str:
    """The source without its narrow floats."""
    for dtype in ("bfloat16", "float16", "float32"):
        source = source.replace(f".astype(jnp.{dtype})", ".astype(float)")
    return source


def draw(seed: int) -> Drawn:
    rng = np.random.default_rng(seed)
    one = lambda options: options[int(rng.integers(len(options)))]  # noqa: E731
    chance = lambda p: bool(rng.random() < p)  # noqa: E731
    wide, own = seed >= WIDE_SEEDS, seed >= OWN_SEEDS
    modes = MODES | ROADS if wide else MODES
    mode = str(rng.choice(list(modes), p=np.array(list(modes.values())) / sum(modes.values())))
    x64, rough = mode == "optimize" or chance(0.8), chance(0.2)
    params = {name: one(SHAPES) for name in "abc"[: int(rng.integers(1, 4))]}
    if chance(0.05):
        params["empty"] = (0, 2)
    theta: dict[str, Shape] = {f"s{i}": () for i in range(int(rng.integers(1, 3)))}
    if chance(0.4):
        theta["v"] = one(((3,), (4,), (4, 3)))
    if seed >= SEEDS_THAT_READ:
        theta |= {"rows": (7, 3), "each": ()}
    evidence = chance(0.2)
    source, marks = write_loss(rng, params, theta, rough, evidence, WHOLE if own else FIRST)
    casts = {name: one(NARROW) for name in (*params, "s0") if chance(0.4)} if own and rough and "fft" not in source else {}
    marks |= {"32 bits" if dtype == "float32" else "16 bits" for dtype in casts.values()}
    rules = ("SGD", "SGD", "HeavyBall", "HeavyBall", "Adam", "Adam", *RULES) if seed < LATER_SEEDS else tuple(LATER)
    if seed >= SEEDS_IN_PARTS:
        rules = (*RULES, *LATER)
    if wide:
        rules = (*RULES, *LATER, *WIDE, *WIDE, *WIDE)
    if own:
        rules = (*rules, *OWN, *OWN)
    steps, name = int(rng.integers(2, 9)), one(rules)
    arrays = Arrays(rng)
    h = {"params": arrays.dict(params), "theta": arrays.dict(theta)}
    if "each" in theta:
        h["theta"]["each"] = arrays((8,))  # as many as there are steps are taken
    if seed >= COMPLEX_SEEDS:
        h["theta"]["plane"] = arrays((2,))
    rule, said = rule_of(arrays, one, chance, name, h, (*TRANSFORMS, *OWN_TRANSFORMS) if own else TRANSFORMS)
    marks |= {"16 bits"} if name in ROUND else set()
    if evidence:
        h["means"] = {"seen": np.float64(0.1), "row": rng.normal(size=4)}
        h["statistics_decay"] = decay_of(one, chance, np.float64(one(DECAYS)))
    parts = int(rng.integers(1, 4)) if seed >= SEEDS_IN_PARTS and (not wide or chance(0.25)) else None
    lead = (DISTINCT,) if parts is None else (DISTINCT, parts)
    data = {
        "x": rng.normal(size=(*lead, 4, 3)),
        "y": rng.normal(size=(*lead, 4)),
        "places": rng.integers(0, 100, (*lead, 5)),
        "which": rng.integers(0, 100, lead),
    }
    batches = "host" if mode == "host_batches" else one(("stacked", "function", "full"))
    names = tuple(n for n in h if chance(0.6)) or ("params",)
    varied = (one((*names, "key")),) if "vmap" in mode and batches != "full" else (one(names),)
    reads = (chance(0.4), chance(0.3))  # the learning curve, the final accumulators
    quick = chance(0.75)
    again, measured = wide and chance(0.2), wide and chance(0.25) and mode != "record"
    floats, compiled = "float64" if x64 else "float32", " compiled quickly" * quick
    batched = batches if parts is None else f"{batches} in {parts} parts"
    words = f"{said}, {steps} steps, batches {batched}, {floats}, {mode}{compiled}, in {' '.join(names)}"
    words += ", then trained on" * again + ", measured" * measured
    words += "".join(f", {name} in {dtype}" for name, dtype in casts.items())

    def make() -> Case:
        return _case(loss_of(source, seed), h, rule, data, batches, parts, steps, reads, varied, again, measured, casts)

    return Drawn(seed, source, words, mode, names, quick, x64, frozenset(marks), make)


def _cast(tree: dict[str, Any], casts: dict[str, str]) -> dict[str, Any]:
    return {name: x.astype(casts[name]) if name in casts else x for name, x in tree.items()}


def _theta(theta: dict[str, Any], steps: int) -> dict[str, Any]:
    each = {"each": hg.PerStep(theta["each"][:steps])} if "each" in theta else {}
    return theta | each | ({"plane": jax.lax.complex(*theta["plane"])} if "plane" in theta else {})


def _in_the_plane(loss: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The loss with a number that a complex one moves, by both of its parts."""

    def moved(params: Any, theta: Any, batch: Any) -> Any:
        z = theta["plane"]
        return loss(params, theta | {"s0": theta["s0"] + jnp.real(z) / 2 + jnp.imag(z * z) / 3}, batch)

    return moved


def _of_one_row(loss: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The loss of a microbatch whose only row is what the loss takes."""
    return lambda params, theta, batch: loss(params, theta, jax.tree.map(lambda x: x[0], batch))


def _metric(params: Any, theta: Any, batch: Any, state: Any, hypers: Any) -> dict[str, Any]:
    def mean(tree: Any) -> jax.Array:
        floats = [jnp.asarray(x) for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        return sum((jnp.mean(jnp.sin(jnp.real(x) + jnp.imag(x))) for x in floats if x.size), jnp.zeros(()))

    return {"params": mean(params), "theta": mean(theta), "state": mean(state), "hypers": mean(hypers)}


def _case(
    loss: Any, h: Any, rule: Any, data: Any, batches: str, parts: int | None, steps: int, reads: tuple[bool, bool],
    varied: tuple[str, ...], again: bool, measured: bool, casts: dict[str, str],
) -> Case:  # fmt: skip
    dtype = jnp.result_type(float)
    loss = _in_the_plane(loss) if "plane" in h["theta"] else loss
    h = jax.tree.map(lambda x: jnp.asarray(x, dtype), h)
    data = {k: np.asarray(x, np.int32 if x.dtype.kind == "i" else dtype) for k, x in data.items()}

    def source(key: Any, adjoint: Any) -> Any:
        if batches == "full":
            return hg.full_batch({k: jnp.asarray(x[0]) for k, x in data.items()})
        if batches == "host":  # the oracle has the same ones on the device
            order = np.arange(steps) % DISTINCT
            own = isinstance(adjoint, hg.Reversible)
            return (lambda x: hg.host_batches(lambda t: jax.tree.map(lambda a: a[t], x)) if own else hg.stacked(x))(
                {k: x[order] for k, x in data.items()}
            )
        arrays = jax.tree.map(jnp.asarray, data)
        order = jax.random.permutation(key, steps) % DISTINCT
        if batches == "stacked":
            return hg.stacked(jax.tree.map(lambda x: x[order], arrays))
        return eqx.Partial(lambda order, arrays, t: jax.tree.map(lambda x: x[order[t]], arrays), order, arrays)

    def value(h: Any, key: Any, adjoint: Any) -> jax.Array:
        h = hg.natural(h)
        statistics = hg.Statistics(h["means"], h["statistics_decay"]) if "means" in h else None
        run, params = None, _cast(h["params"], casts)
        for _ in range(1 + again):
            run = trained(
                adjoint, loss if parts is None else _of_one_row(loss), params if run is None else run.params,
                rule(h, steps), source(key, adjoint), theta=_cast(_theta(h["theta"], steps), casts), steps=steps,
                statistics=statistics, state=None if run is None else run.state, microbatches=parts,
                metric=_metric if measured else None,
            )  # fmt: skip
            if statistics is not None:
                statistics = hg.Statistics(run.statistics, h["statistics_decay"])
        read = [run.params, run.statistics, run.losses if reads[0] else None, run.state if reads[1] else None, run.metrics]
        return sum(jnp.mean(jnp.sin(3 * x + i)) for i, x in enumerate(jax.tree.leaves(read)) if x.size)

    return Case(value, h, jax.random.key(7), varied)
