"""What it costs to add the gradients of microbatches as integers, beside adding them as floats.

    python -m experiments.benchmarks.microbatches [--rounds 9] [--steps 20]

Milliseconds a step on one device, the best of interleaved rounds, of three networks whose batches are cut into 4 and 16
parts. Training: a plain loop that adds float gradients part by part, and `hg.train(..., microbatches=M)`. Hypergradients:
`hg.train` of a loss that goes through the parts by itself (a scan under `jax.checkpoint`), and microbatches.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import hypergrad as hg
from experiments.benchmarks.workloads import Task, batch_of, mlp_task, transformer_task


PARTS = (4, 16)


def tasks(steps: int, small: bool) -> dict[str, Task]:
    if small:
        return {"dense 8-8": mlp_task(steps, (784, 8, 8, 10), batch_size=16)}
    return {
        "dense 64-64": mlp_task(steps, (784, 64, 64, 10), batch_size=256),
        "dense 300-300": mlp_task(steps, (784, 300, 300, 10), batch_size=256),
        "transformer": transformer_task(steps, width=64, depth=2, length=32, batch_size=32, examples=128),
    }


def cut(batch: Any, parts: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)


def plain(task: Task, parts: int, rate: Any) -> Any:
    """Heavy ball in floats, gradients added part by part."""

    def step(carry: Any, t: Any) -> tuple[Any, Any]:
        w, v = carry
        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), w))

        def add(sums: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(lambda s, g: s + g / parts, sums, jax.value_and_grad(task.loss)(w, part)), None

        (loss, g), _ = jax.lax.scan(add, zeros, cut(batch_of(task.data, task.batch_size, t), parts))
        v = jax.tree.map(lambda v, g: 0.9 * v - 0.1 * g, v, g)
        return (jax.tree.map(lambda w, v: w + rate * v, w, v), v), loss

    start = task.params, jax.tree.map(jnp.zeros_like, task.params)
    return jax.lax.scan(step, start, jnp.arange(task.steps))[0][0]


def trained(task: Task, parts: int | None, rate: Any, loss: Callable[..., Any] | None = None) -> Any:
    batches = lambda t: batch_of(task.data, task.batch_size, t)  # noqa: E731
    loss = loss or (lambda w, _, batch: task.loss(w, batch))
    return hg.train(loss, task.params, hg.SGD(rate), batches, steps=task.steps, microbatches=parts).params


def in_the_loss(task: Task, parts: int, rate: Any) -> Any:
    def loss(w: Any, _: Any, batch: Any) -> Any:
        one = jax.checkpoint(lambda part: task.loss(w, part))
        return jax.lax.scan(lambda sum, part: (sum + one(part), None), jnp.float32(0), cut(batch, parts))[0] / parts

    return trained(task, None, rate, loss)


def compare(task: Task, parts: int, rounds: int) -> dict[str, float]:
    """Seconds of the best round."""
    of = lambda made: jax.jit(jax.grad(lambda rate: task.loss(made(rate), batch_of(task.data, task.batch_size, 0))))  # noqa: E731
    programs = {
        "plain": jax.jit(lambda rate: plain(task, parts, rate)),
        "ours": jax.jit(lambda rate: trained(task, parts, rate)),
        "in the loss": of(lambda rate: in_the_loss(task, parts, rate)),
        "reversed": of(lambda rate: trained(task, parts, rate)),
    }
    best = dict.fromkeys(programs, float("inf"))
    for run in programs.values():
        jax.block_until_ready(run(jnp.float32(0.05)))
    for _ in range(rounds):
        for name, run in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(jnp.float32(0.05)))
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def main(arguments: argparse.Namespace) -> None:
    print(f"{'':16s}{'parts':>6s}{'floats':>9s}{'ours':>8s}{'ratio':>7s}  |{'in the loss':>12s}{'ours':>8s}{'ratio':>7s}")
    for name, task in tasks(arguments.steps, arguments.small).items():
        for parts in PARTS:
            found = {k: 1e3 * s / arguments.steps for k, s in compare(task, parts, arguments.rounds).items()}
            there, back = found["ours"] / found["plain"], found["reversed"] / found["in the loss"]
            print(
                f"{name:16s}{parts:6d}{found['plain']:9.2f}{found['ours']:8.2f}{there:7.2f}  |"
                f"{found['in the loss']:12.2f}{found['reversed']:8.2f}{back:7.2f}",
                flush=True,
            )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a network for tests")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
