"""Beyond the thesis: what does a gradient link change?

    python -m experiments.gradient_links [--data digits|mnist|fashion_mnist] [--seeds 5] [--tiny]

Nesterov's momentum, NAdamW and Muon with Nesterov's momentum move the parameters by the gradient at those very parameters,
and have no inverse. A gradient link gives them one: of each gradient, 2^-k comes a step late, at k bits a parameter and
step. Three networks are trained by each rule with k = 1 to 8, and by optax's own, which has no link, from the same
initializations on the same batches.

The loss is that on validation images at the end; a difference is that of the means over seeds, relative to optax's. Muon's
own differs from optax's in its first steps, too, where optax corrects for the start of the average.
"""

import abc
import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import tyro
from jax import Array

import hypergrad as hg
from experiments import _data, _gradient_links_plots, _models, _plots, _record
from experiments._record import Row


NETWORKS = {"no hidden layer": (), "two of 32": (32, 32), "four of 64": (64, 64, 64, 64)}


@dataclasses.dataclass(frozen=True)
class Config:
    data: _data.Name = "digits"
    seeds: int = 5
    steps: int = 300
    batch_size: int = 50
    bits: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    networks: tuple[str, ...] = tuple(NETWORKS)
    tiny: bool = False  # a run of seconds, for the tests
    out: pathlib.Path = pathlib.Path("results/gradient_links")

    def shrunk(self) -> "Config":
        return dataclasses.replace(self, seeds=2, steps=5, bits=(4,), networks=("no hidden layer",))


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    rate: float

    @abc.abstractmethod
    def ours(self, bits: int) -> Any: ...

    @abc.abstractmethod
    def theirs(self) -> optax.GradientTransformation: ...


class Nesterov(Rule):
    def ours(self, bits: int) -> Any:
        return hg.Nesterov(self.rate, 0.9, bits=bits)

    def theirs(self) -> optax.GradientTransformation:
        return optax.sgd(self.rate, 0.9, nesterov=True)


class NAdamW(Rule):
    def ours(self, bits: int) -> Any:
        return hg.NAdamW(self.rate, weight_decay=0.01, bits=bits)

    def theirs(self) -> optax.GradientTransformation:
        return optax.nadamw(self.rate, weight_decay=0.01)


class Muon(Rule):
    def ours(self, bits: int) -> Any:
        return hg.muon_with_adamw(self.rate, adam_learning_rate=0.003, nesterov=True, bits=bits)

    def theirs(self) -> optax.GradientTransformation:
        muon = optax.contrib.muon(self.rate, nesterov=True)
        labels = lambda params: jax.tree.map(lambda x: "muon" if x.ndim == 2 else "adamw", params)  # noqa: E731
        return optax.multi_transform({"muon": muon, "adamw": optax.adamw(0.003, weight_decay=0.0)}, labels)


RULES = {"Nesterov": Nesterov(0.05), "NAdamW": NAdamW(0.003), "Muon, Nesterov": Muon(0.005)}


class Experiment:
    """Trainings of one network on all seeds at once."""

    def __init__(self, config: Config, data: _data.Data, hidden: tuple[int, ...]) -> None:
        self.config, self.data = config, data
        self.x, self.y = (jnp.asarray(part) for part in data.train)
        self.sizes = (data.train.x.shape[1], *hidden, 10)
        self.keys = jax.random.split(jax.random.key(0), config.seeds)

    def loss(self, params: Any, _: Any, batch: Any) -> Array:
        return _models.cross_entropy(params, *batch)

    def drawn(self, key: Array) -> tuple[Any, Any]:
        """(initial parameters, batches)"""
        first, second = jax.random.split(key)
        scale = {f"layer_{i + 1}": {"weights": n**-0.5, "biases": 0.0} for i, n in enumerate(self.sizes[:-1])}
        return _models.init_mlp(first, self.sizes, scale), hg.minibatches((self.x, self.y), self.config.batch_size, second)

    def linked(self, rule: Rule, bits: int) -> np.ndarray:
        """Validation losses: [seeds]"""

        def one(key: Array) -> Array:
            params, batches = self.drawn(key)
            run = hg.train(self.loss, params, rule.ours(bits), batches, steps=self.config.steps)
            return _models.cross_entropy(run.params, *self.data.validation)

        return np.asarray(jax.jit(jax.vmap(one))(self.keys))

    def certificate(self, rule: Rule, bits: int) -> hg.Certificate:
        params, batches = self.drawn(self.keys[0])
        return hg.check_reversal(self.loss, params, rule.ours(bits), batches, steps=self.config.steps)

    def original(self, rule: Rule) -> np.ndarray:
        optimizer = rule.theirs()

        def one(key: Array) -> Array:
            params, batches = self.drawn(key)

            def step(carry: Any, t: Array) -> Any:
                params, state = carry
                updates, state = optimizer.update(jax.grad(self.loss)(params, None, batches(t)), state, params)
                return (optax.apply_updates(params, updates), state), None

            (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(self.config.steps))
            return _models.cross_entropy(params, *self.data.validation)

        return np.asarray(jax.jit(jax.vmap(one))(self.keys))


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    config = config.shrunk() if config.tiny else config
    data = _data.load(config.data, 0)
    originals: dict[str, dict[str, np.ndarray]] = {}
    proofs: dict[str, hg.Certificate] = {}  # rule -> of the last network at 4 bits
    losses: dict[str, dict[str, np.ndarray]] = {}  # rule -> network -> [bits, seeds]
    for name, rule in RULES.items():
        originals[name], losses[name] = {}, {}
        for network in config.networks:
            experiment = Experiment(config, data, NETWORKS[network])
            originals[name][network] = experiment.original(rule)
            losses[name][network] = np.stack([experiment.linked(rule, bits) for bits in config.bits])
            off = losses[name][network].mean(axis=1) / originals[name][network].mean() - 1
            shown = ", ".join(f"{bits}: {x:+.2%}" for bits, x in zip(config.bits, off, strict=True))
            print(f"{name:16} {network:16} loss {originals[name][network].mean():.4f}; off by bits {shown}", flush=True)
        proofs[name] = experiment.certificate(rule, 4)
    rows = [row for name in RULES for row in _rows(config, name, originals[name], losses[name])]
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, _gradient_links_plots.figures(config.bits, originals, losses))
    numbers = {"original": originals, "linked": losses}
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "gradient_links", config, numbers,
        seeds=range(config.seeds), seconds=seconds, certificate=proofs, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return numbers | {"certificate": {name: proof._asdict() for name, proof in proofs.items()}}


def _rows(config: Config, name: str, original: Any, linked: Any) -> list[Row]:
    """The largest difference over the networks, at 1 and at 4 bits."""
    rows = []
    for bits in sorted({1, 4} & set(config.bits)):
        off = [linked[n][config.bits.index(bits)].mean() / original[n].mean() - 1 for n in config.networks]
        worst = max(off, key=abs)
        length = f"{bits} bit{'s' * (bits > 1)}"
        rows.append(Row("", f"{name}, {length}: largest difference of the loss over the networks", None, f"{worst:+.2%}"))
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
