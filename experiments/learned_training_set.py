"""What is the best training set of ten images?

    python -m experiments.learned_training_set [--data digits|mnist|fashion_mnist] [--seeds 0 1 2]

A logistic regression is trained for 20 steps on made-up images alone, and their pixels, at first blank, descend its loss on
real validation images: ten images as in the thesis, by plain gradient descent and from the same initial weights at every
meta-step; then for longer, by Adam and from others each time; then a hundred, ten of each class. At last the labels of the
hundred are learned too, each a distribution over the classes, from random ones: which classes get more images? The L2
penalty is always learned beside them. For comparison, as many real images drawn at random. Each seed has its own split,
initial weights and blank images; the report trains from initial weights that were not learned with.
"""

import dataclasses
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array

import hypergrad as hg
from experiments import _config, _data, _learned_training_set_plots, _models, _plots, _record
from experiments._data import Data
from experiments._record import Row


class Arm(NamedTuple):
    many: bool  # a hundred images, else ten
    soft: bool = False  # labels are learned
    adam: bool = True  # for `longer` meta-steps; else plain descent, as in the thesis


ARMS = {
    "ten, as in the thesis": Arm(many=False, adam=False),
    "ten": Arm(many=False),
    "hundred": Arm(many=True),
    "hundred, learned labels": Arm(many=True, soft=True),
}
THESIS, LARGEST = "ten, as in the thesis", "hundred, learned labels"  # the two that are drawn

PRESETS = {
    "digits": {"arms": tuple(ARMS), "steps": 20, "meta_steps": 40, "longer": 200, "many": 100},
    "tiny": {"arms": (THESIS, LARGEST), "steps": 3, "meta_steps": 1, "longer": 1, "many": 10},
}


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    seeds: tuple[int, ...] = (0, 1, 2)
    arms: tuple[str, ...] | None = None
    many: int | None = None  # images of a large training set
    steps: int | None = None
    meta_steps: int | None = None
    meta_learning_rate: float = 1.0  # plain gradient descent
    longer: int | None = None  # meta-steps of Adam
    adam: float = 0.03  # its learning rate
    learning_rate: float = 1.0
    momentum: float = 0.9
    init_scale: float = float(np.exp(-4))
    penalty: float = 0.01  # the start
    blank: float = 0.01  # standard deviation of the pixels at the start
    opinion: float = 1.0  # standard deviation of the logits of learned labels at the start
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/learned_training_set")


class Problem(NamedTuple):
    """What a seed stands for."""

    seed: int
    data: Data

    @property
    def key(self) -> Array:
        """Of the initial weights, where they stay the same."""
        return jax.random.key(self.seed)


class Experiment:
    """The functions that a user of the library writes. A `Problem` travels with the hyperparameters, as `hg.fixed`."""

    def __init__(self, config: Config, pixels: int) -> None:
        self.config, self.sizes = config, (pixels, 10)
        self.initial = jax.jit(lambda key: _models.init_mlp(key, self.sizes, config.init_scale))

    @staticmethod
    def loss(params: Any, learned: Any, _: Any) -> Array:
        """Cross-entropy with soft labels, and the L2 penalty: made of hyperparameters alone."""
        log_p = jax.nn.log_softmax(_models.apply_mlp(params, learned["images"]))
        nll = -jnp.mean(jnp.sum(jax.nn.softmax(learned["labels"]) * log_p, axis=1))
        return nll + learned["penalty"] * sum(jnp.vdot(w, w) for w in jax.tree.leaves(params))

    def arguments(self, learned: Any, key: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `hg.train` and `hg.check_reversal` take. There is no batch: what is learned has to come through theta."""
        params = self.initial(key)
        sgd = hg.SGD(self.config.learning_rate, self.config.momentum)
        return (self.loss, params, sgd, hg.full_batch(())), {"theta": learned, "steps": self.config.steps}

    def train(self, learned: Any, key: Array) -> Any:
        arguments, options = self.arguments(learned, key)
        return hg.train(*arguments, **options).params

    def train_fn(self, arm: Arm) -> Any:
        def train_fn(hypers: Any, key: Array) -> Any:
            problem = hypers["problem"]
            fresh = jax.random.fold_in(key, problem.seed)
            params = self.train(hypers["learned"], fresh if arm.adam else problem.key)
            return params, problem.data.validation

        return train_fn

    @staticmethod
    def val_fn(trained: Any) -> Array:
        params, validation = trained
        return _models.cross_entropy(params, *validation)

    def measure(self, learned: Any, problem: Problem) -> dict[str, Array]:
        """After training on `learned`, in natural units: from the weights learned with ("same"), and from others."""
        same, other = (self.train(learned, key) for key in (problem.key, jax.random.fold_in(problem.key, 1)))
        validation, test = problem.data.validation, problem.data.test
        wrong = jnp.argmax(_models.apply_mlp(other, test.x), axis=1) != test.y
        return {
            "train": self.loss(same, learned, None),
            "validation": _models.cross_entropy(same, *validation),
            "test, same weights": _models.cross_entropy(same, *test),
            "test": _models.cross_entropy(other, *test),
            "test_error": jnp.mean(wrong),
            "class_error": jax.ops.segment_sum(wrong.astype(jnp.float32), test.y, 10) / jnp.bincount(test.y, length=10),
        }

    def images(self, arm: Arm) -> int:
        return self.config.many if arm.many else 10

    def start(self, arm: Arm, problem: Problem) -> Any:
        """Blank images; labels are logits: random, or 0 to 9 in turn and so certain that float32 knows no other class."""
        pixels, logits = jax.random.split(jax.random.fold_in(problem.key, 2))
        blank = self.config.blank * jax.random.normal(pixels, (self.images(arm), self.sizes[0]))
        opinions = self.config.opinion * jax.random.normal(logits, (self.images(arm), 10))
        labels = opinions if arm.soft else hg.fixed(1e3 * jax.nn.one_hot(jnp.arange(self.images(arm)) % 10, 10))
        return {"images": blank, "labels": labels, "penalty": hg.positive(self.config.penalty)}

    def real(self, images: int, problem: Problem) -> Any:
        """As many real images, the same number of each class, in place of learned ones."""
        train = problem.data.train
        order = np.random.default_rng(0).permutation(len(train.y))
        labels = np.asarray(train.y)[order]
        chosen = np.concatenate([order[labels == c][: images // 10] for c in range(10)])
        own = 1e3 * jax.nn.one_hot(train.y[chosen], 10)
        return {"images": train.x[chosen], "labels": own, "penalty": jnp.float32(self.config.penalty)}

    def learn(self, arm: Arm, problems: list[Problem]) -> list[hg.Result]:
        """One result per problem, in their order."""
        config = self.config
        starts = [{"learned": self.start(arm, p), "problem": hg.fixed(p)} for p in problems]
        meta_steps = config.longer if arm.adam else config.meta_steps
        schedule = optax.cosine_decay_schedule(config.adam, meta_steps, 0.1)
        results = hg.restarts(
            self.train_fn(arm), self.val_fn, starts, meta_steps=meta_steps,
            meta_optimizer=optax.adam(schedule) if arm.adam else optax.sgd(config.meta_learning_rate),
            callbacks=[_record.EveryTenth(meta_steps)],
        )  # fmt: skip
        return sorted(results, key=lambda result: config.seeds.index(int(hg.natural(result.hypers)["problem"].seed)))


class Outcome(NamedTuple):
    """Of one arm and one seed."""

    measured: dict[str, np.ndarray]  # what `measure` says at the end
    curve: dict[str, np.ndarray]  # and before each meta-step and after the last, for the arm of the thesis
    learned: Any  # in natural units
    values: list[float]  # validation loss at each meta-step
    proof: hg.Certificate


def outcomes(experiment: Experiment, problems: list[Problem], name: str, measure: Any) -> list[Outcome]:
    """Of one arm, for each seed."""
    print(f"training set {name}, {len(problems)} seeds in turn:", flush=True)
    found = []
    for problem, result in zip(problems, experiment.learn(ARMS[name], problems), strict=True):
        learned = hg.natural(result.hypers["learned"])
        path = [hg.natural(done.hypers["learned"]) for done in result.history] if name == THESIS else []
        rows = [jax.tree.map(np.asarray, measure(x, problem)) for x in (*path, learned)]
        arguments, options = experiment.arguments(learned, problem.key)
        found.append(
            Outcome(
                rows[-1],
                {k: np.asarray([row[k] for row in rows]) for k in ("train", "validation", "test, same weights")},
                jax.tree.map(np.asarray, learned),
                [done.value for done in result.history],
                hg.check_reversal(*arguments, **options),
            )
        )
    return found


def in_order(outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """Learned images [images, pixels] and labels [images, classes], sorted by the largest class of the label."""
    soft = np.asarray(jax.nn.softmax(outcome.learned["labels"]))
    order = np.argsort(soft.argmax(axis=1), kind="stable")
    return outcome.learned["images"][order], soft[order]


def hardship(outcome: Outcome) -> float:
    """Correlation, over the classes, of a class's share of the learned labels and its test error."""
    return float(np.corrcoef(in_order(outcome)[1].mean(axis=0), outcome.measured["class_error"])[0, 1])


def rows(config: Config, found: dict[str, list[Outcome]], real: dict[str, Any]) -> list[Row]:
    if config.data != "mnist":
        return []
    seen = {  # quantity: (key, thesis, why ours differs)
        "test loss": ("test, same weights", 0.50, "All 10,000 test images, the thesis the first 1,000."),
        "validation loss": ("validation", 0.43, "Drawn at random, by seed; the thesis took the first 10,000."),
        "training loss": ("train", 0.75, "With the penalty, on the ten images."),
    }
    result = []
    for quantity, (key, thesis, why) in seen.items():
        values = [o.measured[key] for o in found[THESIS]]
        result.append(Row("6.7", f"{quantity}, {THESIS} (nats)", thesis, *_record.mean_and_spread(values), why))
    arms = {name: [o.measured for o in arm] for name, arm in found.items()} | real
    for name, measured in arms.items():
        for quantity, key in (("test loss from other initial weights", "test"), ("test error", "test_error")):
            values = [row[key] for row in measured]
            result.append(Row("6.7", f"{quantity}, {name}", None, *_record.mean_and_spread(values), "Not in the thesis."))
    quantity = "correlation over the classes of their share of the learned labels and their test error"
    why = 'The thesis only suggests that learned labels "might shed light on which classes are difficult to distinguish".'
    result.append(Row("6.7", quantity, None, *_record.mean_and_spread([hardship(o) for o in found[LARGEST]]), why))
    return result


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    config = _config.filled(config, PRESETS)
    data = [jax.tree.map(jnp.asarray, _data.load(config.data, seed)) for seed in config.seeds]
    problems = [Problem(seed, d) for seed, d in zip(config.seeds, data, strict=True)]
    experiment = Experiment(config, data[0].train.x.shape[1])
    measure = jax.jit(experiment.measure)
    found = {name: outcomes(experiment, problems, name, measure) for name in config.arms}
    sizes = sorted({experiment.images(ARMS[name]) for name in found})
    real = {f"{n} real ones": [jax.tree.map(np.asarray, measure(experiment.real(n, p), p)) for p in problems] for n in sizes}
    measured = {name: [o.measured for o in arm] for name, arm in found.items()} | real
    for name, seeds in measured.items():
        test, error = (np.mean([row[k] for row in seeds]) for k in ("test", "test_error"))
        print(f"{name:23} test loss {test:.4f}, error {error:.2%}")
    numbers = {
        "hyperparameters": {n: 1 + experiment.images(ARMS[n]) * (experiment.sizes[0] + 10 * ARMS[n].soft) for n in found},
        "measured": measured,
        "curve": {k: [o.curve[k] for o in found[THESIS]] for k in found[THESIS][0].curve},
        "values": {name: [o.values for o in arm] for name, arm in found.items()},
        "penalty": {name: [o.learned["penalty"] for o in arm] for name, arm in found.items()},
        "learned_labels": [in_order(o)[1] for o in found[LARGEST]],
        "correlation_of_label_share_and_class_error": [hardship(o) for o in found[LARGEST]],
    }
    figures = _learned_training_set_plots.draw(
        found[THESIS][0].learned["images"], in_order(found[LARGEST][0])[0],
        np.concatenate([in_order(o)[1] for o in found[LARGEST]]),
        [o.measured["class_error"] for o in found[LARGEST]],
        {k: [o.curve[k] for o in found[THESIS]] for k in found[THESIS][0].curve},
        {name: [row["test"] for row in seeds] for name, seeds in measured.items()},
        real, 0.50 if config.data == "mnist" else None,
    )  # fmt: skip
    drawn = _plots.save(config.out, figures)
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "learned_training_set", config, numbers, seeds=config.seeds, seconds=seconds,
        certificate={f"{name}, seed {s}": o.proof for name in found for s, o in zip(config.seeds, found[name], strict=True)},
        thesis=rows(config, found, real), pictures=drawn,
    )  # fmt: skip
    _plots.announce(record, drawn, seconds)
    return numbers


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
