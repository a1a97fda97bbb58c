"""How much should each weight be held back?

    python -m experiments.per_weight_penalty [--data digits|mnist|fashion_mnist] [--seeds 0 1 2]

A logistic regression has one L2 penalty per weight. All start equal and descend the validation loss after 50 steps of
training, to which a small multiple of their squared norm is added: first as in the thesis, by plain gradient descent, then
for longer, by Adam. Beside them the best of 17 penalties that are the same for all weights, zero among them, by validation
loss. Each seed has its own split, initial weights and order of batches, and keeps these for all its meta-steps. Test images
are only looked at in the report.
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
from experiments import _config, _data, _models, _plots, _record
from experiments._data import Data
from experiments._record import Row


PRESETS = {
    "digits": {"batch_size": 100, "steps": 50, "meta_steps": 50, "longer": 100, "meta_learning_rate": 100.0},
    "mnist": {"batch_size": 200, "longer": 200, "meta_learning_rate": 1000.0},
    "fashion_mnist": {"batch_size": 200, "longer": 200, "meta_learning_rate": 1000.0},
    "tiny": {"batch_size": 20, "steps": 4, "meta_steps": 1, "longer": 0},
}
EQUAL = (0.0, *np.geomspace(1e-6, 0.1, 16).tolist())  # penalties tried for all weights at once


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    seeds: tuple[int, ...] = (0, 1, 2)
    batch_size: int | None = None
    steps: int | None = None
    meta_steps: int | None = None
    meta_learning_rate: float | None = None  # plain gradient descent on the logarithms of the penalties
    longer: int | None = None  # meta-steps of Adam, from the same start
    adam: float = 0.1  # its learning rate
    learning_rate: float = 1.0
    momentum: float = 0.9
    init_scale: float = float(np.exp(-4))
    penalty: float = float(0.01 * np.e)  # the start
    meta_penalty: float = 0.01  # of the sum of squared penalties
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/per_weight_penalty")


class Problem(NamedTuple):
    """What a seed stands for."""

    init_key: Array
    batch_key: Array
    data: Data


def problem(config: Config, seed: int) -> Problem:
    data = jax.tree.map(jnp.asarray, _data.load(config.data, seed))
    return Problem(*jax.random.split(jax.random.key(seed)), data)


class Experiment:
    """The functions that a user of the library writes. A `Problem` travels with the hyperparameters, as `hg.fixed`."""

    def __init__(self, config: Config, pixels: int) -> None:
        self.config, self.sizes = config, (pixels, 10)
        self.initial = jax.jit(lambda key: _models.init_mlp(key, self.sizes, config.init_scale))
        self.shapes = jax.eval_shape(lambda: _models.init_mlp(jax.random.key(0), self.sizes, 1.0))

    @staticmethod
    def loss(params: Any, penalties: Any, batch: Any) -> Array:
        penalty = jax.tree.map(lambda p, w: jnp.sum(p * w * w), penalties, params)
        return _models.cross_entropy(params, *batch) + jax.tree.reduce(jnp.add, penalty)

    def arguments(self, penalties: Any, problem: Problem) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `hg.train` and `hg.check_reversal` take."""
        config = self.config
        params = self.initial(problem.init_key)
        batches = hg.minibatches(tuple(problem.data.train), config.batch_size, problem.batch_key)
        sgd = hg.SGD(config.learning_rate, config.momentum)
        return (self.loss, params, sgd, batches), {"theta": penalties, "steps": config.steps}

    def train_fn(self, hypers: Any, _: Array) -> Any:
        """The key is not used: the same training at every meta-step."""
        arguments, options = self.arguments(hypers["penalties"], hypers["problem"])
        return hg.train(*arguments, **options).params, hypers

    def val_fn(self, trained: Any) -> Array:
        params, hypers = trained
        squares = sum(jnp.vdot(p, p) for p in jax.tree.leaves(hypers["penalties"]))
        return _models.cross_entropy(params, *hypers["problem"].data.validation) + self.config.meta_penalty * squares

    def measure(self, penalties: Any, problem: Problem) -> dict[str, Array]:
        """Of a training with these penalties, in natural units; the training loss includes them."""
        arguments, options = self.arguments(penalties, problem)
        params = hg.train(*arguments, **options).params
        return {
            "train": self.loss(params, penalties, problem.data.train),
            "validation": _models.cross_entropy(params, *problem.data.validation),
            "test": _models.cross_entropy(params, *problem.data.test),
            "test_error": _models.error_rate(params, *problem.data.test),
        }

    def equal(self, penalty: float) -> Any:
        return jax.tree.map(lambda w: jnp.full(w.shape, penalty, w.dtype), self.shapes)

    def learn(self, problems: list[Problem], meta_steps: int, meta_optimizer: Any) -> list[hg.Result]:
        """One result per problem, in their order."""
        start = hg.positive(self.equal(self.config.penalty))
        starts = [{"penalties": start, "problem": hg.fixed(p), "place": hg.fixed(i)} for i, p in enumerate(problems)]
        results = hg.restarts(
            self.train_fn, self.val_fn, starts, meta_steps=meta_steps, meta_optimizer=meta_optimizer,
            callbacks=[_record.EveryTenth(meta_steps)],
        )  # fmt: skip
        return sorted(results, key=lambda result: int(hg.natural(result.hypers)["place"]))


def path(result: hg.Result) -> list[Any]:
    """The penalties before each meta-step, and after the last, in natural units."""
    return [hg.natural(h["penalties"]) for h in (*(done.hypers for done in result.history), result.hypers)]


class Outcome(NamedTuple):
    """Of one seed."""

    measured: dict[str, dict[str, float]]  # by arm
    curve: dict[str, np.ndarray]  # what `measure` says along the plain descent
    penalties: np.ndarray  # [10, pixels], learned by it
    equal: float  # the best of `EQUAL`
    proof: hg.Certificate


def outcomes(config: Config) -> list[Outcome]:
    problems = [problem(config, seed) for seed in config.seeds]
    experiment = Experiment(config, problems[0].data.train.x.shape[1])
    measure = jax.jit(experiment.measure)
    print(f"{len(problems)} seeds in turn, plain descent:", flush=True)
    plain = [path(r) for r in experiment.learn(problems, config.meta_steps, optax.sgd(config.meta_learning_rate))]
    longer = [[]] * len(problems)
    if config.longer:
        print("Adam, for longer:", flush=True)
        longer = [path(r) for r in experiment.learn(problems, config.longer, optax.adam(config.adam))]
    found = []
    for p, penalties, more in zip(problems, plain, longer, strict=True):
        rows = [measure(x, p) for x in penalties]
        tried = {x: measure(experiment.equal(x), p) for x in EQUAL}
        equal = min(tried, key=lambda x: float(tried[x]["validation"]))
        arms = {"start": rows[0], "none": tried[0.0], "best equal": tried[equal], "per weight": rows[-1]}
        arms |= {"per weight, longer": measure(more[-1], p)} if more else {}
        arguments, options = experiment.arguments(penalties[-1], p)
        found.append(
            Outcome(
                {arm: {k: float(v) for k, v in row.items()} for arm, row in arms.items()},
                {k: np.asarray([row[k] for row in rows]) for k in rows[0]},
                np.asarray(penalties[-1]["layer_1"]["weights"]).T,
                equal,
                hg.check_reversal(*arguments, **options),
            )
        )
    return found


def pictures(config: Config, outcomes: list[Outcome]) -> dict[str, tuple[Any, str]]:
    learned = outcomes[0].penalties
    side = int(round(learned.shape[1] ** 0.5))
    images = hg.plots.images(learned, (side, side), columns=5, label="L2 penalty")
    images.set_title("learned penalties of the weights to each output, 0 to 9")
    figure, (left, right) = _plots.panels(2)
    steps = np.arange(config.meta_steps + 1)
    for name, color, dash in zip(("train", "validation", "test"), _plots.COLOURS, _plots.DASHES, strict=False):
        label = "train, with penalties" if name == "train" else name
        _plots.band(left, steps, [o.curve[name] for o in outcomes], label=label, color=color, linestyle=dash)
    left.set(xlabel="meta-step", ylabel="loss (nats)", title="learning a penalty per weight")
    if config.data == "mnist":
        left.axhline(0.45, label="thesis: test at the end", **_plots.THESIS)
    left.legend()
    tests = {arm: [o.measured[arm]["test"] for o in outcomes] for arm in outcomes[0].measured}
    _plots.bars(right, tests, grey=("start", "none", "best equal"))
    right.set(xlabel="test loss (nats)", ylabel="penalties")
    return {
        "penalties": (images.figure, "Learned penalties, an image per output; colours end at the 2nd and 98th percentile."),
        "losses": (figure, "Losses along the plain descent (band: one standard deviation over seeds), and test losses."),
    }


_TEST = (
    "Here the 10,000 test images, there 1,000 training images kept apart; here random splits, initial weights and batches."
)
ROWS = {  # arm: (the thesis's test loss, read off the authors' picture; why ours differs)
    "start": (0.71, _TEST),
    "per weight": (0.45, _TEST),
    "per weight, longer": (None, "Adam instead of plain descent."),
    "best equal": (None, "One penalty for all weights, the best of 17 by validation loss."),
    "none": (
        None,
        "Most of the gain of the figure is over a start whose penalty is too large for nearly all weights.",
    ),
}


def rows(config: Config, outcomes: list[Outcome]) -> list[Row]:
    found = []
    for arm, (thesis, why) in ROWS.items() if config.data == "mnist" else ():
        for name, number in (("test", thesis), ("test_error", None)):
            values = [o.measured[arm][name] for o in outcomes]
            quantity = f"{'test loss (nats)' if name == 'test' else 'test error'}, penalties: {arm}"
            found.append(Row("6.6", quantity, number, *_record.mean_and_spread(values), why if name == "test" else ""))
    return found


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    config = _config.filled(config, PRESETS)
    found = outcomes(config)
    for arm in found[0].measured:
        test, error = (np.mean([o.measured[arm][k] for o in found]) for k in ("test", "test_error"))
        print(f"penalties: {arm:19} test loss {test:.4f}, error {error:.2%}")
    numbers = {
        "hyperparameters": found[0].penalties.size + 10,
        "measured": {arm: [o.measured[arm] for o in found] for arm in found[0].measured},
        "best_equal": [o.equal for o in found],
        "curve": {k: [o.curve[k] for o in found] for k in found[0].curve},
    }
    drawn = _plots.save(config.out, pictures(config, found))
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "per_weight_penalty", config, numbers, seeds=config.seeds, seconds=seconds,
        certificate={f"seed {s}": o.proof for s, o in zip(config.seeds, found, strict=True)},
        thesis=rows(config, found), pictures=drawn,
    )  # fmt: skip
    _plots.announce(record, drawn, seconds)
    return numbers


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
