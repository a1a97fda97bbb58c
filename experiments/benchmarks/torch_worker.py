"""Run by a Python that has torch, higher and torchopt: the same hypergradient, unrolled by them.

    python torch_worker.py plain|higher|torchopt task.npz

Reads learning rates from standard input, one JSON list a line, and answers each with {"result", "seconds", "bytes"}. SGD
here is v <- m v - (1 - m) g, w <- w + a v. torch's is v <- m v + g, w <- w - a v, and starts with v = g: with a
learning rate of a (1 - m) it is the same.
"""

import json
import sys
import time

import numpy as np
import torch


def main(method, file):
    with np.load(file) as arrays:
        task = {name: arrays[name] for name in arrays.files}
    depth = sum(name.startswith("w") for name in task)
    params = [torch.tensor(task[f"{kind}{i}"]) for i in range(depth) for kind in "wb"]
    x, y = torch.tensor(task["x"]), torch.tensor(task["y"]).long()
    size, steps, momentum = int(task["batch_size"]), int(task["steps"]), float(task["momentum"])
    held_out = int(task["held_out"])

    def loss(params, x, y):
        for i in range(depth):
            x = x @ params[2 * i] + params[2 * i + 1]
            x = torch.tanh(x) if i + 1 < depth else x
        return torch.nn.functional.cross_entropy(x, y)

    def batch(t):
        start = (t * size) % (len(x) - size + 1)
        return x[start : start + size], y[start : start + size]

    def validation(params):
        return loss(params, x[-held_out:], y[-held_out:])

    run = {"plain": plain, "higher": with_higher, "torchopt": with_torchopt}[method]
    run(params, loss, batch, validation, torch.full((1,), 0.1), momentum, 1)  # loads what torch loads late
    before = peak()
    for line in sys.stdin:
        rates = torch.tensor(json.loads(line))
        begin = time.perf_counter()
        result = run(params, loss, batch, validation, rates, momentum, steps)
        seconds = time.perf_counter() - begin
        answer = {"result": result.tolist(), "seconds": seconds, "bytes": max(0, peak() - before)}
        print(json.dumps(answer), flush=True)


def plain(params, loss, batch, validation, rates, momentum, steps):
    """Training alone, by torch's own SGD."""
    params = [p.clone().requires_grad_() for p in params]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=momentum)
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = float(rates[t]) * (1 - momentum)
        optimizer.zero_grad()
        loss(params, *batch(t)).backward()
        optimizer.step()
    with torch.no_grad():
        return validation(params)


def with_higher(params, loss, batch, validation, rates, momentum, steps):
    import higher

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.params = torch.nn.ParameterList([torch.nn.Parameter(p.clone()) for p in params])

        def forward(self, x, y):
            return loss(list(self.params), x, y)

    network, rates = Network(), rates.requires_grad_()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=momentum)
    with higher.innerloop_ctx(network, optimizer, copy_initial_weights=True) as (model, differentiable):
        for t in range(steps):
            differentiable.step(model(*batch(t)), override={"lr": [rates[t] * (1 - momentum)]})
        return torch.autograd.grad(validation(list(model.parameters())), rates)[0]


def with_torchopt(params, loss, batch, validation, rates, momentum, steps):
    import torchopt

    rates = rates.requires_grad_()
    params = tuple(p.clone().requires_grad_() for p in params)
    descent = torchopt.transform.trace(momentum)
    state = descent.init(params)
    for t in range(steps):
        gradient = torch.autograd.grad(loss(params, *batch(t)), params, create_graph=True)
        velocity, state = descent.update(gradient, state, inplace=False)
        updates = tuple(-rates[t] * (1 - momentum) * v for v in velocity)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return torch.autograd.grad(validation(params), rates)[0]


def peak():
    """Bytes that this process has had resident at most; `getrusage` would begin with those of its parent."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
