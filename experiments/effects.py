"""Each setting of a rule beside optax's rule in float64: does it do what it does there, at sizes that nobody tests?

    python -m experiments.effects [--minutes 10 | --cases N] [--first SEED] [--only SEED ...]

All adjoints of this library train on the same grid, so that no comparison among them sees what the grid takes from training
itself. Here optax trains beside, in floats, and JAX differentiates it:

    the way         w_T - w_0
    the effect      of one setting: w_T of another value less w_T of this one
    the derivative  of c . w_T in each setting, c fixed

A case is made of its number alone: a rule, settings over many decades, one of five tasks, a number of steps, the setting
that changes, and whether parameters are float32 here. It is equal where each of the three is right to 1%, beside what the
pages name: 2^-24 of a weight that decays, and some quanta of the grid (2^-52, and 2^-36 of what decays; of float32 2^-48 and
2^-32). It is unclear where the reference differs by a tenth of that when its start and each increment of a mean are moved by
ten quanta, and gradients by ten roundings. A warning that names the grid is an answer as well. Exit status 1 if one differs
in silence.
"""

import argparse
import collections
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import hypergrad as hg
from experiments import _quick, _seeds
from experiments._effects_tasks import TASKS, Params, Task
from experiments.benchmarks.rules import rounded


SHARE = 0.01  # which ours may differ by
OF_LARGEST = 1e-4  # a derivative counts as at least this share of the largest, each times its setting
OF_DECAY = 2.0**-24  # of a weight: what rounding leaves of a decay goes to the next step
QUANTA = 1000  # which may come to nothing in all steps together
MOVED, NOISE = 10, 10.0  # by so many quanta the reference is moved; ours may differ by so many times what that changes

Settings = dict[str, Any]
Answers = dict[str, np.ndarray]


class Rule(NamedTuple):
    draws: dict[str, Any]  # setting -> (decades from, to), or the values to choose from
    ours: Callable[..., Any]
    theirs: Callable[..., optax.GradientTransformation]


RATES, DECAYS, EPS = (-7.0, -1.5), (-9.0, -1.0), (-10.0, -2.0)
B1, B2, SLOW = (
    [rounded(b) for b in of]
    for of in ((2.0**-16, 0.01, 0.5, 0.9, 0.95, 0.99), (0.9, 0.95, 0.99, 0.999), (0.99, 0.999, 0.9999))
)
MOMENTS = {"b1": B1, "b2": B2, "eps": EPS}
RULES = {
    "SGD": Rule(
        {"learning_rate": (-5.0, 0.0), "momentum": B1}, hg.SGD,
        lambda learning_rate, momentum: optax.sgd(learning_rate * (1 - momentum), momentum),
    ),
    "HeavyBall": Rule({"learning_rate": (-6.0, -1.0), "momentum": B1}, hg.HeavyBall, optax.sgd),
    "decayed HeavyBall": Rule(
        {"learning_rate": (-5.0, -1.0), "momentum": B1, "weight_decay": (-6.0, -1.0)},
        lambda weight_decay, **rest: hg.add_decayed_weights(hg.HeavyBall(**rest), weight_decay),
        lambda weight_decay, **rest: optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(**rest)),
    ),
    "Adam": Rule({"learning_rate": RATES} | MOMENTS, hg.Adam, optax.adam),
    "AdamW": Rule({"learning_rate": RATES, "weight_decay": DECAYS} | MOMENTS, hg.AdamW, optax.adamw),
    "NAdamW": Rule(
        {"learning_rate": RATES, "weight_decay": DECAYS} | MOMENTS, functools.partial(hg.NAdamW, bits=16), optax.nadamw
    ),
    "RMSProp": Rule({"learning_rate": (-7.0, -2.5), "decay": B2, "momentum": B1, "eps": EPS}, hg.RMSProp, optax.rmsprop),
    "Adagrad": Rule(
        {"learning_rate": (-6.0, -2.5), "momentum": B1, "eps": EPS}, hg.Adagrad,
        lambda learning_rate, momentum, eps: optax.chain(
            optax.scale_by_rss(0.0, eps), optax.scale_by_learning_rate(learning_rate), optax.trace(momentum)
        ),
    ),
    "Lion": Rule({"learning_rate": (-7.0, -2.5), "b1": B1, "b2": B2, "weight_decay": DECAYS}, hg.Lion, optax.lion),
    "ADOPT": Rule({"learning_rate": RATES, "b1": B1, "b2": SLOW}, hg.ADOPT, optax.contrib.adopt),
    "AdEMAMix": Rule(
        {"learning_rate": RATES, "weight_decay": DECAYS, "b3": SLOW, "alpha": (-1.0, 1.0)} | MOMENTS,
        hg.AdEMAMix, optax.contrib.ademamix,
    ),
    "LAMB": Rule(
        {"learning_rate": (-5.0, -1.5), "weight_decay": (-6.0, -1.0)} | MOMENTS,
        functools.partial(hg.LAMB, bits=16), optax.lamb,
    ),
    "Schedule-Free AdamW": Rule(
        {"learning_rate": (-6.0, -1.5), "weight_decay": DECAYS, "b1": [0.5, 0.9, 0.95], "b2": B2, "eps": EPS},
        functools.partial(hg.ScheduleFreeAdamW, bits=16), optax.contrib.schedule_free_adamw,
    ),
    "LARS": Rule(
        {"learning_rate": (-4.0, 0.0), "momentum": B1, "weight_decay": (-7.0, -1.0), "trust": (-4.0, -1.0)}, hg.LARS,
        lambda trust, **rest: optax.lars(**rest, trust_coefficient=trust),
    ),
}  # fmt: skip
DECAYING = ("AdamW", "NAdamW", "Lion", "ADOPT", "AdEMAMix", "Schedule-Free AdamW")


class Floats(NamedTuple):
    dtype: type
    quantum: float  # of the grid
    coarse: float  # of what decays, which is held at 16 bits less
    rounding: float  # of a gradient and of a weight, relative


DOUBLE, SINGLE = Floats(np.float64, 2.0**-52, 2.0**-36, 2.0**-53), Floats(np.float32, 2.0**-48, 2.0**-32, 2.0**-24)


class Case(NamedTuple):
    seed: int
    rule: str
    settings: Settings
    changed: str
    to: float
    task: str
    unit: float
    steps: int
    floats: Floats = DOUBLE

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={x:.3g}" for name, x in self.settings.items())
        where = f"{self.task} x {self.unit:.0e}, {self.steps} steps, {self.floats.dtype.__name__}"
        return f"{self.seed}: {self.rule}({settings}), {self.changed} -> {self.to:.3g}; {where}"


def draw(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    name = str(rng.choice(list(RULES)))
    drawn = {k: _setting(rng, of) for k, of in RULES[name].draws.items()}
    changed = str(rng.choice(list(drawn)))
    of = RULES[name].draws[changed]
    if changed == "weight_decay":
        to = 0.0
    else:
        to = drawn[changed] * 1.25 if isinstance(of, tuple) else float(rng.choice([x for x in of if x != drawn[changed]]))
    unit = 10.0 ** int(rng.integers(-4, 2))
    task, steps = str(rng.choice(list(TASKS))), int(rng.choice([50, 300, 1500]))
    floats = DOUBLE if rng.integers(2) else SINGLE
    as_held = lambda x: float(floats.dtype(x))  # noqa: E731
    return Case(seed, name, {k: as_held(x) for k, x in drawn.items()}, changed, as_held(to), task, unit, steps, floats)


def _setting(rng: np.random.Generator, of: Any) -> float:
    return float(10 ** rng.uniform(*of)) if isinstance(of, tuple) else float(rng.choice(of))


class Verdict(NamedTuple):
    kind: str  # "equal", "warned", "refused", "unclear", "DIFFERENT"
    detail: str = ""


def judged(case: Case, rule: Rule | None = None) -> Verdict:
    """rule: in place of the case's own, for a lie."""
    rule = RULES[case.rule] if rule is None else rule
    with jax.enable_x64(True):
        task = TASKS[case.task](np.random.default_rng([case.seed, 1]), case.unit)
        held = lambda dtype, start=task.start: jax.tree.map(lambda x: x.astype(case.floats.dtype).astype(dtype), start)  # noqa: E731
        task, own = task._replace(start=held(np.float64)), task._replace(start=held(case.floats.dtype))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                ours = answers(functools.partial(by_us, rule.ours, own, case.steps), task, case, case.floats.dtype)
            except (hg.HypergradError, ValueError) as e:
                return Verdict("refused", f"{type(e).__name__}: {str(e).splitlines()[0][:120]}")
        by_optax = jax.jit(functools.partial(plainly, rule.theirs, task, case.steps))
        by = MOVED * case.floats.coarse / min(1 - case.settings.get(name, 0.0) for name in ("momentum", "b1", "b3"))
        moves = (0.0, 0.0), (by, MOVED * case.floats.rounding)
        theirs, moved = (answers(functools.partial(by_optax, x), task, case) for x in moves)
    if not np.isfinite(theirs["way"]).all():
        return Verdict("unclear", "the reference diverges")
    for what, floor in floors(case, task, theirs).items():
        apart, noise = (np.abs(x[what] - theirs[what]) for x in (ours, moved))
        wrong = apart > SHARE * (np.abs(theirs[what]) if what == "derivative" else np.abs(theirs[what]).max()) + floor
        if wrong.any():
            i = np.argmax(apart * wrong)
            warned = any("grid" in str(w.message) for w in said)
            kind = "warned" if warned else "unclear" if apart[i] < NOISE * np.max(noise) else "DIFFERENT"
            where = f" in {list(case.settings)[i]}, times that" if what == "derivative" else ""
            return Verdict(kind, f"the {what}{where}: {ours[what][i]:.3e}, of optax {theirs[what][i]:.3e}")
    return Verdict("equal")


def floors(case: Case, task: Task, theirs: Answers) -> dict[str, float]:
    """What the grid may take from each of the answers. Where weights rest, the reference may have no derivative."""
    floor = QUANTA * case.floats.quantum + 2 * case.floats.rounding * np.abs(flat(task.start)).max()
    if case.rule in DECAYING:
        decays = case.settings.get("weight_decay", 0.0) > 0
        floor += 4 * case.steps**0.5 * case.floats.coarse + decays * OF_DECAY * np.abs(flat(task.start)).max()
    allowed = {"way": floor, "effect": 2 * floor, "derivative": OF_LARGEST * np.abs(theirs["derivative"]).max()}
    return {what: x for what, x in allowed.items() if np.isfinite(theirs[what]).all()}


def answers(train: Callable[[Settings], Any], task: Task, case: Case, dtype: type = np.float64) -> Answers:
    """train: dtype [], of each setting -> parameters."""

    def along(settings: Settings) -> tuple[jax.Array, np.ndarray]:
        end = jnp.concatenate([x.ravel().astype(np.float64) for x in jax.tree.leaves(train(settings))])
        return jnp.cos(jnp.arange(end.size)) @ end, end

    one, other = (
        {k: jnp.asarray(x, dtype) for k, x in s.items()} for s in (case.settings, case.settings | {case.changed: case.to})
    )
    (_, end), slopes = jax.value_and_grad(along, has_aux=True)(one)
    derivative = np.array([float(slopes[k]) * x for k, x in case.settings.items()])
    return {"way": np.asarray(end) - flat(task.start), "effect": np.asarray(along(other)[1] - end), "derivative": derivative}


def by_us(rule: Callable[..., Any], task: Task, steps: int, settings: Settings) -> Params:
    return hg.train(task.loss, task.start, rule(**settings), task.batches, steps=steps).params


def plainly(rule: Callable[..., Any], task: Task, steps: int, moved: Any, settings: Settings) -> Params:
    """By optax; moved: by about how much the start and each gradient are other than they are, and by what share of it."""
    by, share = moved
    update = rule(**settings).update

    def other(tree: Any, t: Any) -> Any:
        return jax.tree.map(lambda x: x + (by + share * x) * jnp.cos(jnp.arange(x.size) + t).reshape(x.shape), tree)

    def step(carry: Any, t: jax.Array) -> Any:
        w, state = carry
        updates, state = update(other(jax.grad(task.loss)(w, None, task.batches(t)), t), state, w)
        return (optax.apply_updates(w, updates), state), None

    start = other(task.start, 0)
    return jax.lax.scan(step, (start, rule(**settings).init(start)), jnp.arange(steps))[0][0]


def flat(params: Params) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _seeds.add_arguments(parser, 10.0)
    arguments = parser.parse_args()
    _quick.whole_process()
    counts: collections.Counter[str] = collections.Counter()
    for case in map(draw, _seeds.seeds(arguments)):
        verdict = judged(case)
        counts[verdict.kind] += 1
        if arguments.only or verdict.kind != "equal":
            print(f"{verdict.kind} {verdict.detail} [{case}]", flush=True)
        if counts.total() % 25 == 0:
            jax.clear_caches()
            print(f"seed {case.seed}: {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}", flush=True)
    print(f"{counts.total()} cases: {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}, jax {jax.__version__}")
    return int(counts["DIFFERENT"] > 0)


if __name__ == "__main__":
    sys.exit(main())
