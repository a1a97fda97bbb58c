"""Which layers should ten networks share?

    python -m experiments.architecture_sharing [--data glyphs|omniglot] [--seeds 0 1 2]

Five alphabets and the same five turned by 90 degrees are ten tasks, each with a tanh network of its own. In each layer the
weights of the networks are mixtures of ten sets of parameters: w_i = sum_j A_ij z_j. A = I in every layer separates the
networks; equal entries tie them. Here each layer's A is a hyperparameter, a degree of sharing for every pair of tasks, 300
numbers in all: they descend the validation loss of trainings whose split into training and validation drawings changes with
every meta-step. At the end all these drawings are for training, and drawings that were never looked at judge.
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
from experiments import _architecture_sharing_plots, _characters, _config, _models, _plots, _record
from experiments._characters import Alphabet
from experiments._record import Row


ALPHABETS = {"omniglot": (0, 1, 2, 5, 7), "glyphs": (0, 2, 3, 4, 5)}
KINDS = ("separate", "tied", "learned")

PRESETS = {
    "glyphs": {"side": 14, "hidden": (40, 20), "classes": 10, "meta_steps": 20, "steps": 50},
    "omniglot": {"side": 28, "hidden": (400, 200), "classes": 55, "meta_steps": 20, "steps": 50},
    "tiny": {"side": 7, "hidden": (4,), "classes": 10, "meta_steps": 1, "steps": 4},
}


@dataclasses.dataclass(frozen=True)
class Config:
    data: _characters.Name = "glyphs"
    seeds: tuple[int, ...] = (0, 1, 2)  # initializations and splits
    meta_steps: int | None = None
    meta_learning_rate: float = 0.2  # plain gradient descent
    steps: int | None = None
    learning_rate: float = 1.0
    momentum: float = 0.9
    init_scale: float = float(np.exp(-2))
    penalty: float = float(np.exp(-4))  # of the sum of squares of all z
    side: int | None = None  # pixels
    hidden: tuple[int, ...] | None = None
    classes: int | None = None  # outputs of each network, those of the largest alphabet or more
    drawings: int = 12  # of each character, to train on at the end; the other eight are the test
    validation: int = 2  # of these twelve, while A is learned
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/architecture_sharing")


class Tasks(NamedTuple):
    """Drawings of a number of tasks with as many classes as the largest alphabet; `of` marks the real ones."""

    x: Array  # [tasks, characters, drawings, pixels]
    of: Array  # [tasks, characters], 1 or 0

    def nll(self, params: Any) -> Array:
        """[tasks]: mean negative log-likelihood of each, in nats, under its own network."""
        return self._mean(params, lambda log_p: -jnp.diagonal(log_p, axis1=0, axis2=2))

    def error(self, params: Any) -> Array:
        return self._mean(params, lambda log_p: (log_p.argmax(-1) != jnp.arange(len(log_p))[:, None]).T)

    def _mean(self, params: Any, measure: Any) -> Array:
        """measure: log-probabilities [characters, drawings, classes] -> [drawings, characters]."""

        def one(params: Any, x: Array, of: Array) -> Array:
            logits = _models.apply_mlp(params, x.reshape(-1, x.shape[-1]))
            log_p = jax.nn.log_softmax(logits).reshape(*x.shape[:2], -1)
            return jnp.mean(measure(log_p), axis=0) @ of / of.sum()

        return jax.vmap(one)(params, self.x, self.of)


def mixed(sharing: Any, z: Any) -> Any:
    """w_i = sum_j A_ij z_j, with the A of the layer, weights and biases alike."""
    return {layer: jax.tree.map(lambda z, a=a: jnp.tensordot(a, z, axes=1), z[layer]) for layer, a in sharing.items()}


class Experiment:
    """The functions that a user of the library writes, and the data they read."""

    def __init__(self, config: Config, alphabets: list[Alphabet]) -> None:
        self.config = config
        images, self.of = padded(alphabets)
        k = config.drawings
        mean = images[:, :, :k].sum(axis=(0, 1, 2)) / (self.of.sum() * k)
        self.known, self.test = (images[:, :, :k] - mean), (images[:, :, k:] - mean)
        self.sizes = (config.side**2, *config.hidden, config.classes)
        self.tasks = 2 * len(alphabets)
        self.size = (len(self.sizes) - 1) * self.tasks**2  # all A together

    def both_ways(self, images: Array) -> Tasks:
        """The tasks of the alphabets as they are, then turned by 90 degrees."""
        turned = jnp.rot90(images, -1, axes=(-2, -1))
        x = jnp.concatenate([images, turned]).reshape(self.tasks, *images.shape[1:3], -1)
        return Tasks(x, jnp.concatenate([self.of, self.of]))

    def split(self, key: Array) -> tuple[Tasks, Tasks]:
        """The known drawings at random in two, to train on and to validate on; a drawing and its turned copy together."""
        order = jnp.argsort(jax.random.uniform(key, self.known.shape[:3]), axis=2)[..., None, None]
        images, k = jnp.take_along_axis(jnp.asarray(self.known), order, axis=2), self.config.validation
        return self.both_ways(images[:, :, k:]), self.both_ways(images[:, :, :k])

    def loss(self, z: Any, sharing: Any, batch: Tasks) -> Array:
        squares = sum(jnp.vdot(x, x) for x in jax.tree.leaves(z))
        return jnp.sum(batch.nll(mixed(sharing, z))) + self.config.penalty * squares

    def arguments(self, sharing: Any, key: Array, data: Tasks) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `hg.train` and `hg.check_reversal` take."""
        config = self.config
        draw = lambda k: _models.init_mlp(k, self.sizes, config.init_scale)  # noqa: E731
        z = jax.jit(jax.vmap(draw))(jax.random.split(key, self.tasks))
        sgd = hg.SGD(config.learning_rate, config.momentum)
        return (self.loss, z, sgd, hg.full_batch(data)), {"theta": sharing, "steps": config.steps}

    def train_fn(self, sharing: Any, key: Array) -> Any:
        init_key, split_key = jax.random.split(key)
        train_set, validation_set = self.split(split_key)
        arguments, options = self.arguments(sharing, init_key, train_set)
        return mixed(sharing, hg.train(*arguments, **options).params), validation_set

    def val_fn(self, trained: Any) -> Array:
        params, validation_set = trained
        return jnp.sum(validation_set.nll(params))

    def sharing(self, kind: str) -> Any:
        """A of each layer: "separate", "tied" (the first layer is one for all), or the start of "learned"."""
        eye, same = jnp.eye(self.tasks), jnp.ones((self.tasks, self.tasks)) / self.tasks
        layers = [f"layer_{i + 1}" for i in range(len(self.sizes) - 1)]
        if kind == "learned":
            return dict.fromkeys(layers, 0.5 * eye + 0.5 * same)
        return {name: same if kind == "tied" and name == "layer_1" else eye for name in layers}

    def judge(self, sharing: Any, key: Array) -> dict[str, Array]:
        """Train on all known drawings; the NLL of these, and NLL and error of the test, each [tasks]."""
        arguments, options = self.arguments(sharing, key, self.both_ways(self.known))
        params, test = mixed(sharing, hg.train(*arguments, **options).params), self.both_ways(self.test)
        return {"train": arguments[3](0).nll(params), "test": test.nll(params), "error": test.error(params)}


def padded(alphabets: list[Alphabet]) -> tuple[np.ndarray, np.ndarray]:
    """Images [alphabets, characters, drawings, side, side], blank after an alphabet's last character, and which are real."""
    count = max(len(a.images) for a in alphabets)
    images = np.zeros((len(alphabets), count, *alphabets[0].images.shape[1:]), np.float32)
    of = np.zeros((len(alphabets), count), np.float32)
    for i, a in enumerate(alphabets):
        images[i, : len(a.images)], of[i, : len(a.images)] = a.images, 1
    return images, of


def correlation(a: Any) -> np.ndarray:
    """A A^T with ones on its diagonal: how much of the weights of two networks is common."""
    gram = np.asarray(a, np.float64) @ np.asarray(a, np.float64).T
    scale = np.sqrt(np.diag(gram))
    return gram / np.outer(scale, scale)


class Outcome(NamedTuple):
    """Of one seed."""

    judged: dict[str, dict[str, np.ndarray]]  # kind -> what `judge` says, [tasks] each
    learned: dict[str, np.ndarray]  # A of each layer
    values: list[float]  # the validation loss, a mean over tasks, at each meta-step
    proof: hg.Certificate  # of the training under the learned A


def outcome(experiment: Experiment, judge: Any, seed: int) -> Outcome:
    config = experiment.config
    print(f"seed {seed}: {experiment.size} degrees of sharing, {config.meta_steps} meta-steps", flush=True)
    result = hg.optimize(
        experiment.train_fn, experiment.val_fn, experiment.sharing("learned"), meta_steps=config.meta_steps,
        meta_optimizer=optax.sgd(config.meta_learning_rate), key=jax.random.key(seed),
        callbacks=[_record.EveryTenth(config.meta_steps)],
    )  # fmt: skip
    judged, key = {}, jax.random.key(1_000 + seed)
    for kind in KINDS:
        sharing = result.hypers if kind == "learned" else experiment.sharing(kind)
        judged[kind] = jax.tree.map(np.asarray, judge(sharing, key))
        train, test, error = (float(judged[kind][k].mean()) for k in ("train", "test", "error"))
        print(f"  {kind:9} train NLL {train:.4f}   test NLL {test:.4f}, error {error:.1%}", flush=True)
    arguments, options = experiment.arguments(result.hypers, key, experiment.both_ways(experiment.known))
    proof = hg.check_reversal(*arguments, **options)
    values = [done.value / experiment.tasks for done in result.history]
    return Outcome(judged, jax.tree.map(np.asarray, result.hypers), values, proof)


def common(outcomes: list[Outcome]) -> dict[str, list[dict[str, float]]]:
    """Layer -> per seed, mean correlation of the weights of two tasks: "any" two, or an alphabet and the "turned" one."""
    found: dict[str, list[dict[str, float]]] = {}
    for o in outcomes:
        for layer, a in o.learned.items():
            c = correlation(a)
            pairs = c[np.triu_indices(len(c), 1)]
            turned = np.diagonal(c, len(c) // 2)
            found.setdefault(layer, []).append({"any": float(pairs.mean()), "turned": float(turned.mean())})
    return found


THESIS = {"separate": (0.6070, 1.3425), "tied": (0.8974, 1.2462), "learned": (0.6039, 1.1301)}  # train, test
_OTHERS = (
    "Other alphabets, of 17 to 26 characters; images shrunk by means over blocks; 8 test drawings of each instead of 3."
)


def rows(config: Config, outcomes: list[Outcome]) -> list[Row]:
    if config.data != "omniglot":
        return []
    found = []
    for kind, thesis in THESIS.items():
        for part, number in zip(("train", "test"), thesis, strict=True):
            values = [o.judged[kind][part].mean() for o in outcomes]
            found.append(Row("6.9", f"{part} NLL, {kind} (nats)", number, *_record.mean_and_spread(values), _OTHERS))
    for worse, better in (("separate", "tied"), ("tied", "learned")):
        gaps = [o.judged[worse]["test"].mean() - o.judged[better]["test"].mean() for o in outcomes]
        number = THESIS[worse][1] - THESIS[better][1]
        quantity = f"test NLL, {worse} minus {better}, in pairs (nats)"
        found.append(Row("6.9", quantity, number, *_record.mean_and_spread(gaps), "As above; the sign is what compares."))
    thesis_any = {"layer_1": 0.608, "layer_2": 0.258, "layer_3": 0.363}
    for layer, seeds in common(outcomes).items():
        quantity = f"mean correlation of two tasks, {layer.replace('_', ' ')}"
        values = [seed["any"] for seed in seeds]
        found.append(Row("6.9", quantity, thesis_any[layer], *_record.mean_and_spread(values), "Other alphabets."))
    values = [seed["turned"] for seed in common(outcomes)["layer_3"]]
    quantity = "mean correlation of an alphabet and its turned copy, layer 3"
    found.append(Row("6.9", quantity, 0.727, *_record.mean_and_spread(values), "Other alphabets."))
    return found


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    config = _config.filled(config, PRESETS)
    every = _characters.load(config.data, config.side)
    alphabets = [every[i] for i in ALPHABETS[config.data]]
    experiment = Experiment(config, alphabets)
    judge = jax.jit(experiment.judge)
    outcomes = [outcome(experiment, judge, seed) for seed in config.seeds]
    numbers = {
        "hyperparameters": experiment.size,
        "alphabets": {a.name: len(a.images) for a in alphabets},
        "judged": {kind: [o.judged[kind] for o in outcomes] for kind in KINDS},
        "learned": [o.learned for o in outcomes],
        "correlations": common(outcomes),
        "values": [o.values for o in outcomes],
    }
    matrices = {layer: np.mean([correlation(o.learned[layer]) for o in outcomes], axis=0) for layer in outcomes[0].learned}
    tests = {kind: [float(o.judged[kind]["test"].mean()) for o in outcomes] for kind in KINDS}
    thesis = {kind: pair[1] for kind, pair in THESIS.items()} if config.data == "omniglot" else {}
    figures = _architecture_sharing_plots.draw(alphabets, matrices, tests, thesis, [o.values for o in outcomes])
    drawn = _plots.save(config.out, figures)
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "architecture_sharing", config, numbers, seeds=config.seeds, seconds=seconds,
        certificate={f"seed {s}": o.proof for s, o in zip(config.seeds, outcomes, strict=True)},
        thesis=rows(config, outcomes), pictures=drawn,
    )  # fmt: skip
    _plots.announce(record, drawn, seconds)
    return numbers


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
