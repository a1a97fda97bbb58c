"""Beyond the thesis: a language model at rates that are stable and at rates that are not

    python -m experiments.language_model [--rates 3e-3 1.2e-3] [--seeds 3] [--tiny]

Two transformer blocks over characters, trained for 300 steps by AdamW on source code of Python's standard library. A
learning rate and a weight decay for each step descend the validation loss, averaged over seeds; b1 and b2 stay as they are.
Each start is a constant rate, and runs with the defaults of `hg.optimize`: it says at its first meta-step whether training
amplifies small changes, weighs down a seed whose hypergradient explodes, and stops where hypergradients stay long. The last
start is run once more with a plain mean and without a stop.
"""

import dataclasses
import pathlib
import time
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array

import hypergrad as hg
from experiments import _language_model_plots, _plots, _record, _text
from experiments._record import Row


@dataclasses.dataclass(frozen=True)
class Config:
    rates: tuple[float, ...] = (3e-3, 1.2e-3)  # constant, to start from
    seeds: int = 3
    steps: int = 300
    meta_steps: int = 12
    meta_learning_rate: float = 0.3  # so long that the loop comes to where training is chaotic
    batch_size: int = 8
    context: int = 32  # characters
    width: int = 48
    blocks: int = 2
    heads: int = 4
    validation: int = 32  # windows
    tiny: bool = False  # a run of seconds, for the tests
    out: pathlib.Path = pathlib.Path("results/language_model")

    plain: bool = True  # once more from the last rate, with aggregate="mean" and stop_on_growth=False

    def shrunk(self) -> "Config":
        small = {"seeds": 2, "steps": 3, "meta_steps": 2, "batch_size": 2, "context": 4, "width": 4, "blocks": 1, "heads": 1}
        return dataclasses.replace(self, rates=self.rates[-1:], validation=2, **small)


class Experiment:
    """The functions that a user of the library writes, and the data they read."""

    def __init__(self, config: Config) -> None:
        self.config, self.text = config, _text.load()
        self.train_set, validation = (jnp.asarray(part) for part in (self.text.train, self.text.validation))
        starts = np.linspace(0, len(validation) - config.context - 1, config.validation).astype(int)
        self.windows = validation[starts[:, None] + np.arange(config.context + 1)]

    def init(self, key: Array) -> Any:
        """Normal draws over the root of what comes in; embeddings 0.1."""
        c, n = self.config, len(self.text.alphabet)
        shapes = {"characters": (n, c.width), "positions": (c.context, c.width)}
        for i in range(c.blocks):
            shapes |= {f"block_{i}": {"qkv": (c.width, 3 * c.width), "mix": (c.width, c.width),
                                      "up": (c.width, 4 * c.width), "down": (4 * c.width, c.width)}}  # fmt: skip
        leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(leaves))
        paths = [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(tree.unflatten([0] * len(leaves)))]
        scales = [
            0.1 if name in ("characters", "positions") else s[0] ** -0.5 for name, s in zip(paths, leaves, strict=True)
        ]
        drawn = [a * jax.random.normal(k, s) for a, k, s in zip(scales, keys, leaves, strict=True)]
        return tree.unflatten(drawn)

    def logits(self, params: Any, x: Array) -> Array:
        """x: [windows, context]."""
        h = params["characters"][x] + params["positions"][: x.shape[1]]
        for i in range(self.config.blocks):
            block = params[f"block_{i}"]
            h = h + self.attended(block, _normalized(h))
            h = h + jax.nn.gelu(_normalized(h) @ block["up"]) @ block["down"]
        return _normalized(h) @ params["characters"].T

    def attended(self, block: Any, h: Array) -> Array:
        heads = self.config.heads
        q, k, v = (x.reshape(*x.shape[:-1], heads, -1) for x in jnp.split(h @ block["qkv"], 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(past, scores, -1e9), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape) @ block["mix"]

    def cross_entropy(self, params: Any, windows: Array) -> Array:
        logits = self.logits(params, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    def loss(self, params: Any, _: Any, starts: Array) -> Array:
        return self.cross_entropy(params, self.train_set[starts[:, None] + jnp.arange(self.config.context + 1)])

    def train_fn(self, hypers: Any, key: Array) -> Any:
        c, (init_key, batch_key) = self.config, jax.random.split(key)
        starts = jax.random.randint(batch_key, (c.steps, c.batch_size), 0, len(self.train_set) - c.context - 1)
        return hg.train(self.loss, self.init(init_key), self.optimizer(hypers), hg.stacked(starts)).params

    def optimizer(self, hypers: Any) -> Any:
        return hg.AdamW(hypers["learning_rate"], 0.9, 0.99, 1e-8, hypers["weight_decay"])

    def val_fn(self, params: Any) -> Array:
        return self.cross_entropy(params, self.windows)

    def hypers(self, rate: float) -> Any:
        same = lambda x: hg.positive(hg.PerStep(jnp.full(self.config.steps, x)))  # noqa: E731
        return {"learning_rate": same(rate), "weight_decay": same(1e-2)}

    def learned(self, rate: float, **options: Any) -> "Learned":
        """What `hg.optimize` finds from a constant rate, and what it says on its way."""
        c, key = self.config, jax.random.key(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = hg.optimize(
                self.train_fn, self.val_fn, self.hypers(rate), seeds_per_step=c.seeds, meta_steps=c.meta_steps, key=key,
                meta_optimizer=optax.adam(c.meta_learning_rate), callbacks=[hg.callbacks.Progress()], **options,
            )  # fmt: skip
        said = [str(w.message) for w in caught if "hg.optimize" in str(w.message)]
        print("\n".join(said), flush=True)
        return Learned(result, said)

    def certificate(self, hypers: Any) -> hg.Certificate:
        """Of one training."""
        c, starts = self.config, jnp.arange(self.config.steps)[:, None] + jnp.arange(self.config.batch_size)
        optimizer = self.optimizer(hg.natural(hypers))
        return hg.check_reversal(self.loss, self.init(jax.random.key(c.steps)), optimizer, hg.stacked(starts))


class Learned(NamedTuple):
    result: hg.Result
    said: list[str]  # by hg.optimize, in warnings


def _normalized(h: Array) -> Array:
    return h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    config = config.shrunk() if config.tiny else config
    experiment = Experiment(config)
    runs = {f"from {rate:g}": experiment.learned(rate) for rate in config.rates}
    if config.plain:
        plain = experiment.learned(config.rates[-1], aggregate="mean", stop_on_growth=False)
        runs[f"from {config.rates[-1]:g}, plain mean, no stop"] = plain
    rows = [row for name, run in runs.items() for row in _rows(name, run)]
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, _language_model_plots.figures({k: run.result.history for k, run in runs.items()}))
    proof = experiment.certificate(next(iter(runs.values())).result.hypers)
    numbers = {
        name: {"said": run.said, "history": [done.record() for done in run.result.history]} for name, run in runs.items()
    }
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "language_model", config, numbers,
        seeds=range(config.seeds), seconds=seconds, certificate=proof, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return numbers | {"certificate": proof._asdict()}


def _rows(name: str, run: Learned) -> list[Row]:
    history, best = run.result.history, run.result.best
    last = "best" if run.result.hypers is best.hypers else "last"
    found = {
        "validation loss at the start": history[0].value,
        "growth of the derivative at the start": history[0].growth,
        "signal to noise at the start": history[0].signal_to_noise,
        "lowest validation loss": best.value,
        "meta-step of the lowest": best.step,
        "meta-steps made": len(history),
        "hypers returned are those of the": f"{last} meta-step",
        "longest hypergradient": max(done.gradient_norm for done in history),
        "hypergradients weighed down": sum(done.clipped_seeds for done in history),
        "said": "; ".join(f"at meta-step {_step(text)}: {_what(text)}" for text in run.said) or "nothing",
    }
    return [Row("new", f"{name}: {what}", None, x, why="new") for what, x in found.items()]


def _step(text: str) -> str:
    return text.partition("meta-step ")[2].partition(":")[0]


def _what(text: str) -> str:
    return "stop" if "hg.optimize stops" in text else text.partition(": ")[2].partition(".")[0].partition(",")[0]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
