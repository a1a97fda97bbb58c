"""What training and a hypergradient cost by each rule, in units of plain training by SGD with momentum.

    python -m experiments.benchmarks.rule_costs [--data mnist] [--steps 300] [--hidden 128 128] [--only ...]

The network, the times and the units of `shampoo_choices`; rules as in `rules`, at their rates there.
"""

from experiments.benchmarks.rules import FAMILY
from experiments.benchmarks.shampoo_choices import chosen


def main() -> None:
    network, names = chosen(__doc__, FAMILY)
    print("| | plain, ms a step | training | hypergradient | s to compile | bits | exact |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for name in names:
        plain = network.plain_seconds()  # anew beside each, as the machine's speed drifts
        cost = network.cost(FAMILY[name].ours, plain)
        print(
            f"| {name} | {plain / network.steps * 1e3:.3f} | {cost.training:.1f} | {cost.hypergradient:.1f} "
            f"| {cost.compile_seconds:.1f} | {cost.bits:.2f} | {cost.exact} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
