"""What exactness costs by itself: nanoseconds per parameter and step, forward and back, on one core.

    python -m experiments.benchmarks.exact_layer [--parameters 50000] [--rounds 5]

Training on a loss that is linear in the parameters, so that its gradient is a constant and its second derivatives are zero:
what is left is decoding, encoding, multiplication, division and the buffer, and the floats around them. The time of a step
is the difference between long and short runs over the difference of their steps, so that neither start nor dispatch counts.
Beside it stands the same difference for float SGD and its unrolled derivative, which is not subtracted.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any


def measure(parameters: int, rounds: int, short: int = 64, long: int = 320) -> dict[str, float]:
    """Medians over rounds of interleaved runs of so many steps, in nanoseconds per parameter and step."""
    import jax  # once the process has its core
    import jax.numpy as jnp

    import hypergrad as hg
    from experiments.benchmarks import opponents
    from experiments.benchmarks.workloads import Task

    # Unequal entries, so that nothing is folded; small ones, so that the range holds.
    slope = jnp.linspace(-1e-3, 1e-3, parameters)
    linear = lambda w, _, batch: jnp.vdot(w, batch)  # noqa: E731

    def task(rates: Any, slope: Any) -> Task:
        return Task(lambda w, batch: jnp.vdot(w, batch[0][0]), jnp.zeros(parameters), (slope[None],), 1, len(rates), 1)

    def train(rates: Any, slope: Any) -> Any:
        run = hg.train(
            linear, jnp.zeros(parameters), hg.SGD(hg.PerStep(rates)), hg.full_batch(slope), steps=len(rates),
            adjoint=hg.Reversible(driver="scan"),
        )  # fmt: skip
        return jnp.vdot(run.params, slope)

    floats = lambda rates, slope: opponents.plain(task(rates, slope), rates)  # noqa: E731
    unrolled = lambda rates, slope: opponents.unrolled(task(rates, slope), rates)  # noqa: E731
    roads: dict[str, tuple[Any, Any]] = {
        "exact, forward": (train, None),
        "exact, forward and back": (jax.grad(train), None),
        "exact, forward, as hg.optimize compiles": (train, hg.compiler_options()),
        "exact, forward and back, as hg.optimize compiles": (jax.grad(train), hg.compiler_options()),
        "float, forward": (floats, None),
        "float, forward and back": (unrolled, None),
    }
    compiled = {}
    for name, (road, options) in roads.items():
        for steps in (short, long):
            rates = jnp.full(steps, 0.1)
            run = jax.jit(road).lower(rates, slope).compile(options)
            jax.block_until_ready(run(rates, slope))
            compiled[name, steps] = (run, rates)
    seconds: dict[Any, list[float]] = {key: [] for key in compiled}
    for _ in range(rounds):
        for key, (run, rates) in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(rates, slope))
            seconds[key].append(time.perf_counter() - begin)
    scale = 1e9 / (parameters * (long - short))
    return {
        name: scale * statistics.median(b - a for a, b in zip(seconds[name, short], seconds[name, long], strict=True))
        for name in roads
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[50_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts cores
    found = {str(count): measure(count, arguments.rounds) for count in arguments.parameters}
    if arguments.json:
        print(json.dumps(found))
        return
    for count, times in found.items():
        for name, nanoseconds in times.items():
            print(f"{int(count):10,} parameters, {name:48s} {nanoseconds:6.2f} ns per parameter and step")


if __name__ == "__main__":
    main()
