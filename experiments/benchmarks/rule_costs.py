"""What training and a hypergradient cost by each rule, in units of plain training by SGD with momentum.

    python -m experiments.benchmarks.rule_costs [--data mnist] [--steps 300] [--hidden 128 128] [--only ...]

The network, the times and the units of `shampoo_choices`; rules as in `optimizer_family`, at their rates there.
"""

import argparse

import jax

from experiments import _data
from experiments.benchmarks.optimizer_family import FAMILY
from experiments.benchmarks.shampoo_choices import Network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("digits", "mnist", "fashion_mnist"), default="digits")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, nargs="*", default=[128, 128])
    parser.add_argument("--only", nargs="*", default=list(FAMILY), choices=list(FAMILY))
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; {arguments.steps} steps on {arguments.data}")
    network = Network(_data.load(arguments.data, 0), tuple(arguments.hidden), arguments.steps)
    print("| | plain, ms a step | training | hypergradient | s to compile | bits | exact |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for name in arguments.only:
        plain = network.plain_seconds()  # anew beside each, as the machine's speed drifts
        cost = network.cost(FAMILY[name].ours, plain)
        print(
            f"| {name} | {plain / arguments.steps * 1e3:.3f} | {cost.training:.1f} | {cost.hypergradient:.1f} "
            f"| {cost.compile_seconds:.1f} | {cost.bits:.2f} | {cost.exact} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
