"""What the way back costs by how it takes the gradient and its derivative.

    python -m experiments.benchmarks.second_order [--only NAME ...] [--rounds 7] [--tiny]

For the benchmark networks and two losses that XLA rounds otherwise beside their derivative: J u from one jvp of the gradient
(a loss without derivative rules of its own), J^T u from one vjp (with such a rule; here one that changes nothing), each with
the gradient taken from beside its derivative or computed apart (isolate=True). By turns in one process, in units of plain
training compiled with the same options; medians over rounds.
"""

import argparse
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import hypergrad as hg
from experiments.benchmarks import opponents
from experiments.benchmarks._measure import Limits, Measured, measure
from experiments.benchmarks.roads import Road, trained
from experiments.benchmarks.workloads import WORKLOADS, Task


@jax.custom_vjp
def as_it_is(x: Any) -> Any:
    """The identity, with a derivative rule that the library cannot know."""
    return x


as_it_is.defvjp(lambda x: (x, None), lambda _, ct: (ct,))


def ruled(task: Task) -> Task:
    loss = task.loss
    return task._replace(loss=lambda w, batch: as_it_is(loss(as_it_is(w), batch)))


def hypergradient(isolate: bool | None, own_rule: bool, task: Task, rates: Array) -> Array:
    adjoint = hg.Reversible(driver="scan", isolate=isolate)
    chosen = ruled(task) if own_rule else task
    return jax.grad(lambda a: task.validation(trained(chosen, a, adjoint)))(rates)


def road(name: str, kind: str, function: Callable[..., Array]) -> Road:
    return Road(name, function, kind, options=hg.compiler_options)


ROADS = (
    road("plain training", "plain", opponents.plain),
    road("J u", "ours", functools.partial(hypergradient, None, False)),
    road("J u, gradients apart", "ours", functools.partial(hypergradient, True, False)),
    road("J^T u", "ours", functools.partial(hypergradient, None, True)),
    road("J^T u, gradients apart", "ours", functools.partial(hypergradient, True, True)),
)


def silu_task(steps: int, size: int = 8, batch_size: int = 16, examples: int = 64) -> Task:
    """Two 3x3 convolutions to 4 and 8 channels, silu, 2x2 means by a reshape, and a linear layer."""
    k = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(k[0], (examples, size, size, 3))
    params = {
        "first": jax.random.normal(k[1], (3, 3, 3, 4)) / 5,
        "second": jax.random.normal(k[2], (3, 3, 4, 8)) / 6,
        "out": jax.random.normal(k[3], (8 * (size // 4) ** 2, 4)) / 6,
    }

    def loss(w: Any, batch: Any) -> Array:
        x, y = batch
        for kernel in (w["first"], w["second"]):
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            n, height, width, depth = x.shape
            x = jax.nn.silu(x).reshape(n, height // 2, 2, width // 2, 2, depth).mean(axis=(2, 4))
        logits = jax.nn.log_softmax(x.reshape(len(x), -1) @ w["out"])
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))

    return Task(loss, params, (x, jax.random.randint(k[4], (examples,), 0, 4)), batch_size, steps, examples)


def rotated_task(steps: int, size: int = 12, batch_size: int = 16, examples: int = 64) -> Task:
    """A tanh network on images that are turned by a learned angle, interpolated linearly."""
    k = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(k[0], (examples, size, size))
    params = {
        "angle": jnp.asarray(0.3),
        "w": jax.random.normal(k[1], (size * size, 16)) / size,
        "out": jax.random.normal(k[2], (16, 4)) / 4,
    }
    grid = jnp.stack(jnp.meshgrid(jnp.arange(size), jnp.arange(size), indexing="ij")) - (size - 1) / 2.0

    def loss(w: Any, batch: Any) -> Array:
        x, y = batch
        cos, sin = jnp.cos(w["angle"]), jnp.sin(w["angle"])
        places = jnp.einsum("ij,jkl->ikl", jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])]), grid)
        turned = jax.vmap(lambda image: jax.scipy.ndimage.map_coordinates(image, list(places + (size - 1) / 2.0), order=1))(
            x
        )
        logits = jax.nn.log_softmax(jnp.tanh(turned.reshape(len(x), -1) @ w["w"]) @ w["out"])
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))

    return Task(loss, params, (x, jax.random.randint(k[3], (examples,), 0, 4)), batch_size, steps, examples)


TASKS: dict[str, tuple[Callable[[], Task], Callable[[], Task]]] = {  # as it is measured, and in miniature
    **{name: (work.task, work.tiny) for name, work in WORKLOADS.items()},
    "silu": (lambda: silu_task(200), lambda: silu_task(4)),
    "rotated": (lambda: rotated_task(200), lambda: rotated_task(4)),
}


def rows(task: Task, rounds: int) -> list[Measured]:
    limits = Limits(rounds=rounds, seconds=60.0, total=600.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure(task, ROADS, limits)
    said = {str(w.message) for w in caught if issubclass(w.category, UserWarning)}
    if said:
        print("   warned:", *sorted(said), sep="\n   ")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    for name in options.only:
        print(name, flush=True)
        for row in rows(TASKS[name][options.tiny](), options.rounds):
            low, high = min(row.ratios), max(row.ratios)
            print(
                f"   {row.name:24s} {row.ratio:5.2f} ({low:.2f} to {high:.2f}), {(row.bytes or 0) / 2**20:7.2f} MiB",
                flush=True,
            )
        jax.clear_caches()
    return 0


if __name__ == "__main__":
    sys.exit(main())
