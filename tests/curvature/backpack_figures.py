"""BackPACK's own numbers for two small networks, as JSON: what tests/curvature/test_backpack.py compares with.

    PATH/python tests/curvature/backpack_figures.py > tests/curvature/backpack.json

PATH/python: one that has torch and BackPACK (`pip install torch backpack-for-pytorch` into an environment of its own); it
needs nothing of this project. A dense and a convolutional network in float32, softmax cross entropy of 6 examples. Of what
draws labels nothing is recorded: torch and JAX draw others.
"""

import importlib.metadata
import json
import sys
from typing import Any

import torch
from backpack import backpack, extend, extensions


QUANTITIES = {  # the attribute that BackPACK leaves at each parameter, and what leaves it there
    "grad_batch": extensions.BatchGrad, "batch_l2": extensions.BatchL2Grad, "sum_grad_squared": extensions.SumGradSquared,
    "variance": extensions.Variance, "diag_ggn_exact": extensions.DiagGGNExact, "diag_h": extensions.DiagHessian,
    "kflr": extensions.KFLR, "kfra": extensions.KFRA,
}  # fmt: skip
EXAMPLES, CLASSES = 6, 3


def dense() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, CLASSES))


def convolution() -> torch.nn.Sequential:
    kernel = torch.nn.Conv2d(2, 3, 3, stride=(1, 2), padding=1)
    return torch.nn.Sequential(kernel, torch.nn.Sigmoid(), torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 3, CLASSES))


def figures(model: torch.nn.Sequential, shape: tuple[int, ...]) -> dict[str, Any]:
    """Input, labels, parameters in order, and each quantity for each parameter."""
    x, y = torch.randn(EXAMPLES, *shape), torch.randint(0, CLASSES, (EXAMPLES,))
    extend(model)
    function = extend(torch.nn.CrossEntropyLoss())
    found: dict[str, Any] = {"x": numbers(x), "y": y.tolist(), "params": [numbers(p) for p in model.parameters()]}
    for name, extension in QUANTITIES.items():
        if name == "kfra" and len(shape) > 1:
            continue  # not for convolutions
        model.zero_grad()
        with backpack(extension()):
            function(model(x), y).backward()
        values = [getattr(p, name) for p in model.parameters()]
        found[name] = [[numbers(z) for z in v] if isinstance(v, list) else numbers(v) for v in values]
    return found


def numbers(x: Any) -> Any:
    """With the digits that float32 has."""
    return [numbers(row) for row in x] if x.ndim else float(f"{x.item():.9g}")


def main() -> None:
    torch.manual_seed(0)
    found = {"dense": figures(dense(), (4,)), "convolution": figures(convolution(), (2, 4, 6))}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "backpack-for-pytorch")}
    json.dump({"versions": versions, **found}, sys.stdout, indent=None)
    print()


if __name__ == "__main__":
    main()
