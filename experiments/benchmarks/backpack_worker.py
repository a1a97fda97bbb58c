"""Run by a Python that has torch and BackPACK: what each of its quantities costs beside its gradient.

    python backpack_worker.py dense|convolutions ROUNDS

The networks of `experiments.benchmarks.curvature` on random inputs, all quantities by turns; prints {quantity: median of the
time over the gradient's of the same round} as JSON, under our names, and the gradient's own in milliseconds.
"""

import json
import statistics
import sys
import time

import torch
from backpack import backpack, extend, extensions


QUANTITIES = {
    "individual_gradients": extensions.BatchGrad, "squared_norms": extensions.BatchL2Grad,
    "second_moment": extensions.SumGradSquared, "variance": extensions.Variance, "ggn_diagonal_mc": extensions.DiagGGNMC,
    "kfac": extensions.KFAC, "ggn_diagonal": extensions.DiagGGNExact, "kflr": extensions.KFLR,
}  # fmt: skip
REPEATS = 5


def dense():
    layers = [torch.nn.Linear(784, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)]
    return torch.nn.Sequential(*layers), torch.randn(100, 784)


def convolutions():
    block = lambda i, o: [torch.nn.Conv2d(i, o, 3, padding=1), torch.nn.Tanh(), torch.nn.AvgPool2d(2)]  # noqa: E731
    layers = [*block(1, 8), *block(8, 16), torch.nn.Flatten(), torch.nn.Linear(49 * 16, 10)]
    return torch.nn.Sequential(*layers), torch.randn(128, 1, 28, 28)


def main(network, rounds):
    torch.manual_seed(0)
    model, x = {"dense": dense, "convolutions": convolutions}[network]()
    y = torch.randint(0, 10, (len(x),))
    model, function = extend(model), extend(torch.nn.CrossEntropyLoss())

    def compute(*wanted):
        model.zero_grad()
        with backpack(*(extension() for extension in wanted)):
            function(model(x), y).backward()

    roads = {"gradient": (), **{name: (extension,) for name, extension in QUANTITIES.items()}}
    seconds = {name: [] for name in roads}
    for i in range(rounds + 1):
        for name, wanted in roads.items():
            begin = time.perf_counter()
            for _ in range(REPEATS):
                compute(*wanted)
            if i:  # the first is to warm up
                seconds[name].append((time.perf_counter() - begin) / REPEATS)
    base = seconds.pop("gradient")
    ratios = {name: statistics.median(a / b for a, b in zip(s, base, strict=True)) for name, s in seconds.items()}
    print(json.dumps({"gradient (ms)": 1e3 * statistics.median(base), **ratios}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
