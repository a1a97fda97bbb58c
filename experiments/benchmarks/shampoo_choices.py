"""What each choice of Shampoo's does: one measured row for each, every other choice as in the first row.

    python -m experiments.benchmarks.shampoo_choices [--data mnist] [--steps 300] [--hidden 128 128] [--only ...]

A network of matrices by Shampoo and biases by AdamW, float32, one seed. Losses are those of the best of six rates, by the
validation loss; bits are of the information buffer; times are medians of five runs, of training on the grid and of the
hypergradient of the rate, exponent and ridge, each in units of plain training by SGD with momentum.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import hypergrad as hg
from experiments import _data, _models


FIRST: dict[str, Any] = {"every": 10, "block_size": 128, "graft": "adam"}
CHOICES: dict[str, dict[str, Any]] = {
    "block 128, k = 10, graft adam": {},
    "block 16": {"block_size": 16},
    "block 32": {"block_size": 32},
    "block 64": {"block_size": 64},
    "k = 1": {"every": 1},
    "k = 5": {"every": 5},
    "k = 25": {"every": 25},
    "k = 100": {"every": 100},
    "graft none": {"graft": "none"},
    "graft sgd": {"graft": "sgd"},
    "graft adagrad": {"graft": "adagrad"},
    "graft rmsprop": {"graft": "rmsprop"},
    "exponent 1/8": {"exponent": 0.125},
    "exponent 1/2": {"exponent": 0.5},
    "diagonal above 100": {"max_size": 100, "block_size": None},
    "diagonal everywhere": {"max_size": 1, "block_size": None},
    "sums, graft adagrad": {"b2": None, "graft": "adagrad"},
    "ridge 1e-3": {"ridge": 1e-3},
    "ridge 1e-3, root newton": {"ridge": 1e-3, "root": "newton"},
    "constant preconditioner": {"preconditioner": "constant"},
}
RATES = tuple(10.0 ** (-x / 2) for x in range(1, 7))


class Cost(NamedTuple):
    training: float  # x plain
    hypergradient: float
    compile_seconds: float
    bits: float  # per parameter and step
    exact: bool


class Network:
    def __init__(self, data: _data.Data, hidden: tuple[int, ...], steps: int) -> None:
        self.data, self.steps = data, steps
        sizes = (data.train.x.shape[1], *hidden, 10)
        scale = {f"layer_{i + 1}": {"weights": n**-0.5, "biases": 0.0} for i, n in enumerate(sizes[:-1])}
        self.params = _models.init_mlp(jax.random.key(0), sizes, scale)
        x, y = (jnp.asarray(part) for part in data.train)
        self.batches = hg.minibatches((x, y), 100, jax.random.key(1))

    def loss(self, params: Any, _: Any, batch: Any) -> Array:
        return _models.cross_entropy(params, *batch)

    def rule(self, rate: Any, choices: dict[str, Any]) -> Any:
        labels = lambda w: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", w)  # noqa: E731
        return hg.partition({"matrix": hg.Shampoo(rate, **FIRST | choices), "rest": hg.AdamW(rate)}, labels)

    def train(self, rule: Any) -> Any:
        return hg.train(self.loss, self.params, rule, self.batches, steps=self.steps)

    def validation(self, rule: Any) -> tuple[Array, Array]:
        """(of the trained parameters, training loss): the mean of the last twenty steps."""
        run = self.train(rule)
        return _models.cross_entropy(run.params, *self.data.validation), jnp.mean(run.losses[-20:])

    def plain_seconds(self) -> float:
        rule = optax.sgd(0.1, 0.9)

        def step(carry: Any, t: Array) -> Any:
            params, state = carry
            updates, state = rule.update(jax.grad(self.loss)(params, None, self.batches(t)), state, params)
            return (optax.apply_updates(params, updates), state), None

        start = self.params, rule.init(self.params)
        return timed(jax.jit(lambda start: jax.lax.scan(step, start, jnp.arange(self.steps))[0][0]), start)[0]

    def cost(self, rule: Any, plain: float) -> Cost:
        """Of training and of the hypergradient of all that the rule has."""
        rule = jax.tree.map(jnp.float32, rule)
        trained = jax.jit(self.validation, compiler_options=hg.compiler_options())
        gradient = jax.jit(jax.grad(lambda rule: self.validation(rule)[0]), compiler_options=hg.compiler_options())
        forward, (backward, compiled) = timed(trained, rule)[0], timed(gradient, rule)
        proof = hg.check_reversal(self.loss, self.params, rule, self.batches, steps=self.steps)
        return Cost(forward / plain, backward / plain, compiled, proof.bits_per_parameter_step, proof.exact)

    def best(self, choices: dict[str, Any]) -> tuple[float, float, float]:
        """(validation loss, training loss, rate), of the rates that have one."""
        trained = jax.jit(self.validation, compiler_options=hg.compiler_options())
        at = lambda rate: jax.tree.map(jnp.float32, self.rule(rate, choices))  # noqa: E731
        found = [(*map(float, trained(at(rate))), rate) for rate in RATES]
        return min(x for x in found if np.isfinite(x[0]))


def timed(function: Callable[..., Any], *args: Any) -> tuple[float, float]:
    """(median of five runs, compilation), in seconds."""
    begin = time.perf_counter()
    program: Any = function
    compiled = program.lower(*args).compile()
    compilation = time.perf_counter() - begin
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), compilation


def chosen(doc: str | None, names: Iterable[str]) -> tuple[Network, list[str]]:
    """From the command line: the network, and which rows to measure."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("digits", "mnist", "fashion_mnist"), default="digits")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, nargs="*", default=[128, 128])
    parser.add_argument("--only", nargs="*", default=list(names), choices=list(names))
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; {options.steps} steps on {options.data}")
    return Network(_data.load(options.data, 0), tuple(options.hidden), options.steps), options.only


def main() -> None:
    network, names = chosen(__doc__, CHOICES)
    plain = network.plain_seconds()
    print(f"plain training by SGD: {plain / network.steps * 1e3:.2f} ms a step\n")
    print("| | rate | training loss | validation | exact | bits | training | hypergradient | s to compile |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for name in names:
        validation, loss, rate = network.best(CHOICES[name])
        cost = network.cost(network.rule(rate, CHOICES[name]), plain)
        print(
            f"| {name} | {rate:.3g} | {loss:.4f} | {validation:.4f} | {cost.exact} | {cost.bits:.2f} "
            f"| {cost.training:.1f} | {cost.hypergradient:.1f} | {cost.compile_seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
