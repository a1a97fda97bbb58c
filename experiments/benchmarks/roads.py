"""Every road to the hypergradient, ours and the opponents': what is measured, in the order of the tables."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

import hypergrad as hg
from experiments.benchmarks import loops as python_loops
from experiments.benchmarks import opponents, plain_shampoo
from experiments.benchmarks.workloads import Task, batch_of


def shampoo(learning_rate: Any) -> Any:
    rule, rest = hg.Shampoo(learning_rate, every=plain_shampoo.EVERY, graft="adam"), hg.AdamW(learning_rate)
    return hg.partition({"matrix": rule, "rest": rest}, lambda w: jax.tree.map(lambda x: KIND[x.ndim == 2], w))


KIND = {True: "matrix", False: "rest"}
OURS: dict[str, Callable[[Any], Any]] = {  # a key of `opponents.RULES` -> optimizer
    "sgd": hg.SGD, "adam": hg.Adam, "muon": hg.muon_with_adamw, "shampoo": shampoo,
}  # fmt: skip


def reversible(task: Task, learning_rates: Array) -> Array:
    return jax.grad(lambda a: task.validation(trained(task, a)))(learning_rates)


def reversed_by(adjoint: Any, task: Task, learning_rates: Array) -> Array:
    return jax.grad(lambda a: task.validation(trained(task, a, adjoint)))(learning_rates)


def optimized(task: Task, learning_rates: Array) -> Array:
    """As `hg.optimize` compiles it, which reads the certificate itself, and compiles again where gradients must be apart."""
    return reversed_by(hg.Reversible(driver="scan", isolate=False), task, learning_rates)


def exact_forward(task: Task, learning_rates: Array) -> Array:
    """Training on the grid, without a derivative."""
    return task.validation(trained(task, learning_rates))


def trained(task: Task, learning_rates: Array, adjoint: Any = None, loss: Any = None) -> Any:
    """loss: the task's with three arguments, where it must be the same object in every call."""
    optimizer = OURS[task.rule](hg.PerStep(learning_rates))
    batches = jax.tree_util.Partial(batch_of, task.data, task.batch_size)  # the data may be traced
    run = hg.train(
        loss or three_arguments(task), task.params, optimizer, batches, steps=task.steps,
        adjoint=adjoint or hg.Reversible(driver="scan"),
    )  # fmt: skip
    return run.params


def three_arguments(task: Task) -> Callable[[Any, Any, Any], Array]:
    loss = task.loss  # alone: the rest of the task may be traced
    return lambda w, _, batch: loss(w, batch)


def host_reversible(task: Task, adjoint: Any = hg.Reversible(driver="host")) -> python_loops.Run:  # noqa: B008 (frozen)
    loss, validation = three_arguments(task), jax.jit(task.validation)
    return jax.grad(lambda a: validation(trained(task, a, adjoint, loss)))


SAME = ", the same options"  # those of `hg.compiler_options`


class Road(NamedTuple):
    name: str
    function: Callable[..., Any]
    kind: str  # "plain": float training; "exact": on the grid; "elsewhere": not in JAX; "ours", "opponent": a hypergradient
    loop: bool = False  # function: task -> (rates -> result), run from Python; else (task, rates) -> result, compiled whole
    bytes: Callable[[], int] | None = None  # what runs have taken, where neither XLA nor this process knows
    options: Callable[[], Any] = lambda: None  # for the compiler, where it is compiled whole


ROADS = (
    Road("plain training, scan", opponents.plain, "plain"),
    Road(f"plain training, scan{SAME}", opponents.plain, "plain", options=hg.compiler_options),
    Road("plain training, loop", python_loops.plain, "plain", loop=True),
    Road("exact training, scan", exact_forward, "exact"),
    Road("exact training, as hg.optimize compiles", exact_forward, "exact", options=hg.compiler_options),
    Road("hg.Reversible, scan", reversible, "ours"),
    Road("hg.Reversible, as hg.optimize compiles", optimized, "ours", options=hg.compiler_options),
    Road("hg.Reversible, host", host_reversible, "ours", loop=True),
    Road("unroll", opponents.unrolled, "opponent"),
    Road("remat", opponents.remat, "opponent"),
    Road("sqrt-remat", opponents.sqrt_remat, "opponent"),
    Road("equinox, 8 states", opponents.equinox_checkpointed, "opponent"),
    Road("equinox, default", functools.partial(opponents.equinox_checkpointed, checkpoints=None), "opponent"),
    Road("replay tree, 4-ary", opponents.tree, "opponent"),
    Road("unroll, loop", python_loops.unrolled, "opponent", loop=True),
    Road("remat, loop", python_loops.remat, "opponent", loop=True),
    Road("sqrt-remat, loop", python_loops.sqrt_remat, "opponent", loop=True),
    Road("replay tree, 4-ary, loop", python_loops.tree, "opponent", loop=True),
)


def roads_for(loops: bool, options: bool = False) -> list[Road]:
    """loops: opponents as Python loops too. options: opponents once more, compiled with the options that ours get."""
    chosen = [road for road in ROADS if loops or not (road.loop and road.kind == "opponent")]
    compiled = [road for road in chosen if road.kind == "opponent" and not road.loop]
    same = [road._replace(name=f"{road.name}{SAME}", options=hg.compiler_options) for road in compiled]
    return chosen + (same if options else [])
