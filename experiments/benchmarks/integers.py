"""The scheme as it was first written: an arbitrary-precision Python integer for every parameter, in an object array.

    python -m experiments.benchmarks.integers [--steps 32]

Positions and velocities are int64 on a grid of 2^-52, the lost digits of each velocity go into its own Python integer. The
gradients and the products with second derivatives are given to it for nothing better than it had: jitted functions called
step by step. So what is slow here is the arithmetic. The ratio of the decay is rounded once and used everywhere, so that the
hypergradient is that of the other roads.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from experiments.benchmarks import opponents
from experiments.benchmarks.workloads import WORKLOADS, Task


GRID = 2.0**52
DENOMINATOR = 2**16
MOMENTUM = round(0.9 * DENOMINATOR)


class Store:
    """One unbounded integer per parameter: a stack of digits of whatever bases they were pushed with."""

    def __init__(self, size: int) -> None:
        self.digits = np.zeros(size, object)  # Python integers: 0 is one

    def push(self, digit: np.ndarray, base: int) -> None:
        self.digits = self.digits * base + digit

    def pop(self, base: int) -> np.ndarray:
        digit = self.digits % base
        self.digits //= base
        return digit.astype(np.int64)


def multiply(x: np.ndarray, store: Store, n: int, d: int) -> np.ndarray:
    """x n / d, what is lost on the store (thesis, Algorithm 7); its inverse is itself with n and d exchanged."""
    store.push(x % d, d)
    return (x // d) * n + store.pop(n)


def to_grid(x: Array) -> np.ndarray:
    return (np.asarray(x, np.float64) * GRID).astype(np.int64)


def from_grid(x: np.ndarray) -> np.ndarray:
    return (x / GRID).astype(np.float32)


class Pass:
    """Training and its reversal, with the two derivatives that it asks for."""

    def __init__(self, task: Task) -> None:
        self.task = task
        flat, unflatten = ravel_pytree(task.params)
        self.start, self.size = np.asarray(flat), flat.size
        loss = lambda w, t: task.loss(unflatten(w), task.batch(t))  # noqa: E731
        self.gradient = jax.jit(jax.grad(loss))
        self.product = jax.jit(lambda w, t, u: jax.jvp(lambda w: jax.grad(loss)(w, t), (w,), (u,))[1])
        self.slope = jax.jit(jax.grad(lambda w: task.validation(unflatten(w))))

    def forward(self, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray, Store]:
        w, v, store = to_grid(self.start), np.zeros(self.size, np.int64), Store(self.size)
        for t, a in enumerate(rates):
            g = self.gradient(from_grid(w), np.int32(t))
            v = multiply(v, store, MOMENTUM, DENOMINATOR) - to_grid(_share(g))
            w = w + to_grid(a * from_grid(v))
        return w, v, store

    def backward(self, w: np.ndarray, v: np.ndarray, store: Store, rates: np.ndarray) -> np.ndarray:
        """Thesis, Algorithm 6, corrected: the derivative in every learning rate."""
        dw, dv = np.asarray(self.slope(from_grid(w))), np.zeros(self.size, np.float32)
        drates = np.zeros(len(rates), np.float32)
        for t in reversed(range(len(rates))):
            a = rates[t]
            drates[t] = dw @ from_grid(v)
            w = w - to_grid(a * from_grid(v))
            g = self.gradient(from_grid(w), np.int32(t))
            v = multiply(v + to_grid(_share(g)), store, DENOMINATOR, MOMENTUM)
            dv = dv + a * dw
            dw = dw - _share(self.product(from_grid(w), np.int32(t), dv))
            dv = np.float32(MOMENTUM / DENOMINATOR) * dv
        if not (np.array_equal(w, to_grid(self.start)) and not v.any() and not store.digits.any()):
            raise AssertionError("the reversed run missed the initial bits")
        return drates


def _share(g: Array) -> np.ndarray:
    return np.float32(1 - MOMENTUM / DENOMINATOR) * np.asarray(g)


def measure(task: Task, steps: int, rounds: int = 3) -> dict[str, Any]:
    """Seconds per step, medians; plain training beside it is the jitted scan of as many steps."""
    task = task._replace(steps=min(steps, task.steps))
    rates, scheme = np.asarray(task.rates), Pass(task)
    plain = jax.jit(functools.partial(opponents.plain, task))
    unrolled = np.asarray(jax.jit(functools.partial(opponents.unrolled, task))(rates))
    error = float(np.linalg.norm(scheme.backward(*scheme.forward(rates), rates) - unrolled) / np.linalg.norm(unrolled))
    if not error < 1e-3:
        raise AssertionError(f"Python integers disagree with the unrolled run: relative error {error:.1e}")
    jax.block_until_ready(plain(rates))
    seconds: dict[str, list[float]] = {"plain": [], "forward": [], "backward": []}
    for _ in range(rounds):
        _time(seconds["plain"], lambda: jax.block_until_ready(plain(rates)))
        end = _time(seconds["forward"], lambda: scheme.forward(rates))
        _time(seconds["backward"], lambda end=end: scheme.backward(*end, rates))
    per_step = {name: statistics.median(times) / task.steps for name, times in seconds.items()}
    exact = {k: 1e9 * (per_step[k] - per_step["plain"]) / task.parameters for k in ("forward", "backward")}
    return {
        "steps": task.steps,
        "parameters": task.parameters,
        "seconds_per_step": per_step,
        "ratio": (per_step["forward"] + per_step["backward"]) / per_step["plain"],
        "nanoseconds": exact,  # per parameter and step, beyond plain training
        "error": error,
    }


def _time(seconds: list[float], run: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = run()
    seconds.append(time.perf_counter() - begin)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32)
    found = measure(WORKLOADS["mlp"].task(), parser.parse_args().steps)
    print(f"{found['steps']} steps: {found['ratio']:.1f} times plain training, relative error {found['error']:.1e}")
    for name, nanoseconds in found["nanoseconds"].items():
        print(f"{name:10s} {nanoseconds:8.1f} ns per parameter and step beyond plain training")


if __name__ == "__main__":
    main()
