"""Reverse 20,000 steps of a 55,000-parameter network bit for bit, the momentum drawn anew for each step.

python -m experiments.benchmarks.long_reversal [--steps 20000]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import hypergrad as hg
from experiments.benchmarks.workloads import mlp_task


def certify(steps: int, low: float = 0.5, high: float = 0.995) -> hg.Certificate:
    """The certificate of a 784-64-64-10 network with momenta uniform in [low, high] and learning rate 0.1."""
    task = mlp_task(steps)
    momenta = jnp.asarray(np.random.default_rng(0).uniform(low, high, steps), jnp.float32)
    loss = lambda w, _, batch: task.loss(w, batch)  # noqa: E731
    return hg.check_reversal(loss, task.params, hg.SGD(0.1, hg.PerStep(momenta)), task.batch, steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    begin = time.perf_counter()
    proof = certify(steps)
    bits, ideal = proof.bits_per_parameter_step, proof.ideal_bits_per_parameter_step
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}: {steps} steps in {time.perf_counter() - begin:.1f} s")
    print(f"exact: {proof.exact}   first mismatch: {proof.first_mismatch}   largest magnitude: {proof.max_abs:.3g}")
    print(f"bits per parameter and step: {bits:.5f}   log2(1/gamma): {ideal:.5f}   ratio {bits / ideal:.5f}")
    print(f"words per parameter: {proof.buffer_words} (32 bits each)")


if __name__ == "__main__":
    main()
