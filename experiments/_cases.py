"""A random case of training: a loss of the grammar, a rule, data, a mode, and what is differentiated. All by one number."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.special  # noqa: F401  for the sources
import numpy as np

import hypergrad as hg
from experiments import _bent_rules
from experiments._grammar import Shape, write_loss
from experiments._judge import Case


DISTINCT = 3  # batches
SHAPES: tuple[Shape, ...] = ((), (3,), (4,), (2, 3), (3, 4), (3, 3), (4, 3), (2, 2, 3))
MODES = {  # how the derivative is asked for, and how often
    "jit": 44, "vmap": 18, "eager": 12, "eager vmap": 3, "hypergradient": 6, "optimize": 5, "driver=host": 3,
    "buffer=host": 2, "buffer=gmpy2": 2, "host_batches": 2, "isolate": 3,
}  # fmt: skip
ADJOINTS = {
    "driver=host": hg.Reversible(driver="host"), "buffer=host": hg.Reversible(buffer="host"),
    "buffer=gmpy2": hg.Reversible(buffer="gmpy2"), "host_batches": hg.Reversible(), "isolate": hg.Reversible(isolate=True),
}  # fmt: skip
RULES: dict[str, tuple[Any, float, tuple[str, ...]]] = {  # the rule, a rate that suits, its decays
    "SGD": (hg.SGD, 0.3, ("momentum",)), "HeavyBall": (hg.HeavyBall, 0.05, ("momentum",)),
    "Adam": (hg.Adam, 0.03, ("b1", "b2")), "AdamW": (hg.AdamW, 0.03, ("b1", "b2")),
    "RMSProp": (hg.RMSProp, 0.01, ("decay", "momentum")), "Adagrad": (hg.Adagrad, 0.02, ("momentum",)),
}  # fmt: skip
LATER: dict[str, tuple[Any, float, tuple[str, ...]]] = {  # of the seeds from `LATER_SEEDS` on: all before stay as they were
    "Nesterov": (hg.Nesterov, 0.03, ("momentum",)), "NAdamW": (hg.NAdamW, 0.03, ("b1", "b2")),
    "AdEMAMix": (hg.AdEMAMix, 0.02, ("b1", "b2")), "ADOPT": (hg.ADOPT, 0.02, ("b1", "b2")),
    "smooth Lion": (functools.partial(hg.Lion, temperature=0.3), 0.02, ("b2",)),
    "ScheduleFreeAdamW": (hg.ScheduleFreeAdamW, 0.03, ("b2",)),
    "LARS": (functools.partial(hg.LARS, trust=0.1), 0.3, ("momentum",)), "LAMB": (hg.LAMB, 0.03, ("b1", "b2")),
}  # fmt: skip
LATER_SEEDS = 1_000_000
SEEDS_THAT_READ = 2_000_000  # rows of theta by index, and one value of it per step
SEEDS_IN_PARTS = 3_000_000  # train with microbatches
DECAYS = (0.3, 0.75, 0.9, 0.97)
TRANSFORMS = ("clip", "clip_by_global_norm", "add_decayed_weights", "freeze")


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
    mode = str(rng.choice(list(MODES), p=np.array(list(MODES.values())) / sum(MODES.values())))
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
    source, marks = write_loss(rng, params, theta, rough, evidence)
    rules = ("SGD", "SGD", "HeavyBall", "HeavyBall", "Adam", "Adam", *RULES) if seed < LATER_SEEDS else tuple(LATER)
    if seed >= SEEDS_IN_PARTS:
        rules = (*RULES, *LATER)
    steps, name = int(rng.integers(2, 9)), one(rules)
    arrays = _Arrays(rng)
    h = {"params": arrays.dict(params), "theta": arrays.dict(theta)}
    if "each" in theta:
        h["theta"]["each"] = arrays((8,))  # as many as there are steps are taken
    rule, said = _rule(arrays, one, chance, name, h)
    if evidence:
        h["means"] = {"seen": np.float64(0.1), "row": rng.normal(size=4)}
        h["statistics_decay"] = _decay(one, chance, np.float64(one(DECAYS)))
    parts = int(rng.integers(1, 4)) if seed >= SEEDS_IN_PARTS else None
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
    floats, compiled = "float64" if x64 else "float32", " compiled quickly" * quick
    batched = batches if parts is None else f"{batches} in {parts} parts"
    words = f"{said}, {steps} steps, batches {batched}, {floats}, {mode}{compiled}, in {' '.join(names)}"

    def make() -> Case:
        return _case(loss_of(source, seed), h, rule, data, batches, parts, steps, reads, varied)

    return Drawn(seed, source, words, mode, names, quick, x64, frozenset(marks), make)


class _Arrays:
    """Draws with float32's digits: the same numbers in every precision."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __call__(self, shape: Shape) -> np.ndarray:
        return np.asarray(self.rng.normal(size=shape), np.float32)

    def dict(self, shapes: dict[str, Shape]) -> dict[str, np.ndarray]:
        return {name: self(shape) for name, shape in shapes.items()}


def _decay(one: Any, chance: Any, value: Any) -> Any:
    return hg.unit_interval(value) if chance(0.5) else value


def _rule(arrays: _Arrays, one: Any, chance: Any, name: str, h: dict[str, Any]) -> tuple[Callable[..., Any], str]:
    """(natural h, steps) -> the optimizer, and its name; what it takes of h is added to h."""
    kind, size, decays = (RULES | LATER)[name]
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
            h[decay] = _decay(one, chance, value)
        else:
            fixed[decay] = float(value)
    wrappers = [one(TRANSFORMS)] * chance(0.45) + [one(TRANSFORMS)] * chance(0.1)
    for wrapper in wrappers:
        if wrapper != "freeze":
            h[wrapper] = np.float64({"clip": 0.05, "clip_by_global_norm": 0.2, "add_decayed_weights": 0.1}[wrapper])
    mask = {k: i > 0 for i, k in enumerate(h["params"])}

    def optimizer(h: dict[str, Any], steps: int) -> Any:
        rate = hg.PerStep(h["rate"][:steps]) if form == "per step" else h["rate"]
        found = kind(rate, **fixed, **{k: h[k] for k in decays if k in h})
        for wrapper in wrappers:
            found = hg.freeze(found, mask) if wrapper == "freeze" else getattr(hg, wrapper)(found, h[wrapper])
        return found

    return optimizer, " in ".join([f"{name} with a rate {form}", *wrappers])


def _theta(theta: dict[str, Any], steps: int) -> dict[str, Any]:
    return theta | ({"each": hg.PerStep(theta["each"][:steps])} if "each" in theta else {})


def _of_one_row(loss: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The loss of a microbatch whose only row is what the loss takes."""
    return lambda params, theta, batch: loss(params, theta, jax.tree.map(lambda x: x[0], batch))


def _case(
    loss: Any, h: Any, rule: Any, data: Any, batches: str, parts: int | None, steps: int, reads: tuple[bool, bool],
    varied: tuple[str, ...],
) -> Case:  # fmt: skip
    dtype = jnp.result_type(float)
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
        run = hg.train(
            loss if parts is None else _of_one_row(loss), h["params"], rule(h, steps), source(key, adjoint),
            theta=_theta(h["theta"], steps), steps=steps, statistics=statistics, adjoint=adjoint, microbatches=parts,
        )  # fmt: skip
        read = [run.params, run.statistics, run.losses if reads[0] else None, run.state if reads[1] else None]
        return sum(jnp.mean(jnp.sin(3 * x + i)) for i, x in enumerate(jax.tree.leaves(read)) if x.size)

    return Case(value, h, jax.random.key(7), varied)
