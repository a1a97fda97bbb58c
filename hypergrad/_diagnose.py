"""`diagnose`: how the derivative of training grows on its way back, and what to make of it.

Invariant: what is diagnosed is the hypergradient that `hg.hypergradient` takes; the probe only reads norms.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array

from hypergrad._average import norm
from hypergrad._evaluate import default_key, objective
from hypergrad._report import ENTERED, Norms, Trace, probe
from hypergrad.adjoints.second_order import check_symmetric
from hypergrad.callbacks import EXPLODING
from hypergrad.errors import Status
from hypergrad.hypers import check_hypers, split_fixed
from hypergrad.optimizers.chain import PARAMS


Verdict = Literal["healthy", "exploding", "vanishing", "not finite"]

# Measured on three-layer networks (digits, and the thesis's Figure 6.10): 2 to 10 times while the learning rate is sound, 14
# where the hypergradient first changes sign. At 45 a hypergradient still predicts changes of 0.1 to 0.5 % of the learning
# rates; from 130 on it predicted none, down to 0.1 %. So 100 is where following it stops to make sense.
GROWTH = EXPLODING
# What is smaller than that beside the rest is lost in the rounding of float32 when meta-optimizers sum over steps.
SHRINKAGE = 1e-6


class Diagnosis(NamedTuple):
    """How the cotangents of one training run grow going backwards; `print` it for the sentences."""

    verdict: Verdict
    onset: int | None  # exploding: the step from which on training amplifies; vanishing: before it nothing matters
    until: int | None  # exploding: the step up to which it does
    growth: float  # the largest factor by which |cotangent of the parameters| grows backwards over any stretch of steps
    growth_per_step: float  # its geometric mean over [onset, until), else over the run: log of it is a Lyapunov exponent
    value: float  # of `val_fn`
    gradient_norm: float  # of the hypergradient
    norms: dict[str, np.ndarray]  # link -> |cotangent| before each step and at the end: float64 [steps + 1]
    losses: np.ndarray  # [steps]
    status: Status  # of the run
    runs: int  # how many `hg.train` there were; this is the worst of them
    excess: np.ndarray | None = (
        None  # with `curvature`: the learning rate over 2 (1 + m) / lambda, [steps]; of the run where it is largest
    )

    def explain(self) -> str:
        """The verdict in sentences: what, since which step, by what factor, what to do."""
        of = "" if self.runs == 1 else f" (the worst of {self.runs} training runs)"
        curvature = "" if self.excess is None else f" {_of_rates(self.excess)}"
        return f"{self.verdict}{of}: {_SENTENCES[self.verdict](self)}{curvature}"

    def __str__(self) -> str:
        return self.explain()


def diagnose(
    train_fn: Callable[[Any, Array], Any],
    val_fn: Callable[[Any], Array],
    hypers: Any,
    key: Array | None = None,
    *,
    curvature: bool = False,
) -> Diagnosis:
    """|d val_fn / d (state before step t)|, t = 0..steps, along one reverse pass, and a verdict.

    The arguments of `hg.hypergradient`. A run that fails or a derivative that overflows is a result, not an error.
    "exploding": the norm for the parameters grows at least 100 times going backwards, the mark of training at the edge of
    chaos (thesis, section 6.4). "vanishing": before some step it is below a millionth of its maximum. Of several runs
    inside `train_fn`, or under its vmap, the worst is returned. Only runs with `hg.Reversible` can be looked into;
    ValueError if there is none.

    curvature: also the largest eigenvalue lambda of the loss's Hessian at each step, and where learning rates exceed
    2 (1 + m) / lambda, beyond which momentum m diverges along its direction; for `hg.SGD` and `hg.HeavyBall`, in runs
    without a metric of their own, at some ninety gradients a step.
    """
    learned, fixed = split_fixed(check_hypers(hypers))
    with probe(curvature) as (traces, excesses):
        evaluate = jax.value_and_grad(objective(train_fn, val_fn), has_aux=True)
        (value, _), grads = evaluate(learned, fixed, default_key(key))
    if not traces:
        raise ValueError(
            "hg.diagnose saw no reverse pass: `train_fn` differentiates no hg.train with adjoint=hg.Reversible(), or "
            "`val_fn` does not use what it trained. Pass the default adjoint."
        )
    for trace in traces:
        if (seen := len(trace.norms[PARAMS]) - 1) < len(trace.losses):
            raise ValueError(
                f"hg.diagnose sees the last {seen} of {len(trace.losses)} steps of a run alone by hg.Truncated, and judges "
                "whole ones: pass the default adjoint to look into it."
            )
        check_symmetric(trace.asymmetry, [np.float32])
    length = float(norm(grads))
    worst = max((judge(t, float(value), length, len(traces)) for t in traces), key=_badness)
    known = [x for x in excesses if np.isfinite(x).any()]
    return worst._replace(excess=max(known, key=np.nanmax) if known else None)


def growth(norms: Norms) -> float:
    """The largest factor by which the cotangent of the parameters grows backwards over any stretch, beside what has come in
    by then; NaN if it is nowhere finite."""
    seen = _of_what_entered(norms)[PARAMS]
    first = _first_finite(seen)
    logs = _logs(seen[first:])
    if not len(logs):
        return 1.0 if first < len(norms[PARAMS]) else math.nan
    return float(np.exp(np.max(logs - np.minimum.accumulate(logs[::-1])[::-1])))


def _of_what_entered(norms: Norms) -> dict[str, np.ndarray]:
    """Norms of links as shares of what has entered, up to where the first of it reaches the parameters: what enters on the
    way is not grown."""
    entered = norms.get(ENTERED, np.ones_like(norms[PARAMS]))
    there = np.flatnonzero((norms[PARAMS] != 0) & (entered != 0))
    end = there[-1] + 1 if there.size else 0
    return {name: x[:end] / entered[:end] for name, x in norms.items() if name != ENTERED}


def judge(trace: Trace, value: float, gradient_norm: float, runs: int) -> Diagnosis:
    norms, seen = trace.norms[PARAMS], _of_what_entered(trace.norms)
    steps = len(norms) - 1
    first = _first_finite(norms)
    logs, grown = _logs(seen[PARAMS][first:]), growth(trace.norms)
    exploding = grown >= GROWTH and bool(trace.status.ok)
    onset = until = None
    verdict: Verdict = "healthy"
    if exploding:
        verdict, (onset, until) = "exploding", _unstable(seen, first)
    elif first > 0 or not math.isfinite(value) or not math.isfinite(gradient_norm):
        verdict, onset = "not finite", first - 1 if 0 < first <= steps else None
    elif norms[0] <= SHRINKAGE * norms.max():
        verdict, onset = "vanishing", int(np.argmax(norms > SHRINKAGE * norms.max()))
    a, b = (onset - first, until - first) if exploding and onset is not None and until is not None else (0, len(logs) - 1)
    per_step = math.exp((logs[a] - logs[b]) / (b - a)) if b > a else math.nan
    of_links = {name: x for name, x in trace.norms.items() if name != ENTERED}
    return Diagnosis(
        verdict, onset, until, grown, per_step, value, gradient_norm, of_links, trace.losses, trace.status, runs
    )


def _unstable(norms: dict[str, np.ndarray], first: int) -> tuple[int, int]:
    """The stretch [onset, until) of steps over which training amplifies.

    It is the stretch that grows most beyond a rate which, kept up for the whole run, would give the square root of the
    growth that alarms: flat parts, in which healthy training drifts by some factors, do not count. Where it ends is read
    off the parameters. Where it begins, off the mean of all links: with the step that no longer amplifies, the cotangent
    of the parameters goes on growing from what the velocity remembers, for 1/(1 - momentum) steps, while the velocity's
    falls. The mean found jumps of the learning rate to within 4 steps, the parameters to within 15 (momentum 0.9).
    """
    rate = math.log(GROWTH) / 2 / (len(norms[PARAMS]) - 1)
    logs = {name: _logs(n[first:]) for name, n in norms.items()}
    _, until = _steepest(logs[PARAMS], rate)
    mean = np.mean([x[:until] for x in logs.values()], axis=0)  # without the end, where the other links start from zero
    onset, _ = _steepest(np.append(mean, mean[-1]), rate)
    return first + onset, first + until


def _steepest(logs: np.ndarray, rate: float) -> tuple[int, int]:
    """(a, b) that maximizes logs[a] - logs[b] - rate (b - a), by Kadane's scan."""
    best, sum_, a, begin, end = -math.inf, 0.0, 0, 0, 0
    for t, gain in enumerate(logs[:-1] - logs[1:] - rate):
        if sum_ <= 0:
            sum_, a = 0.0, t
        sum_ += gain
        if sum_ > best:
            best, begin, end = sum_, a, t + 1
    return begin, end


def _logs(norms: np.ndarray) -> np.ndarray:
    """Logarithms, each the median of five: while parameters and velocity swing, a norm dips for a step or two."""
    logs = np.log(np.maximum(norms, np.finfo(norms.dtype).tiny))
    return np.median(np.lib.stride_tricks.sliding_window_view(np.pad(logs, 2, "edge"), 5), axis=1) if len(logs) else logs


def _first_finite(norms: np.ndarray) -> int:
    """The first index from which on all are finite: going backwards, what overflowed stays so. len(norms) if none is."""
    bad = np.flatnonzero(~np.isfinite(norms))
    return int(bad[-1]) + 1 if bad.size else 0


def _badness(d: Diagnosis) -> tuple[int, float]:
    order: tuple[Verdict, ...] = ("healthy", "vanishing", "exploding", "not finite")
    return order.index(d.verdict), d.growth if d.verdict == "exploding" else 0.0


def _healthy(d: Diagnosis) -> str:
    return (
        f"going back over {len(d.losses)} steps, the derivative with respect to the parameters grows by no more than a "
        f"factor {d.growth:.2g} (from {GROWTH:.0f} on it would be a warning). Nothing to do."
    )


def _exploding(d: Diagnosis) -> str:
    overflow = _first_finite(d.norms[PARAMS])
    assert d.onset is not None and d.until is not None, "of what explodes"
    lost = f" Before step {overflow} it is beyond the range of its dtype, and the hypergradient is lost." if overflow else ""
    return (
        f"from step {d.onset} on, up to step {d.until}, training amplifies what it is given: going back over these steps, "
        f"the derivative with respect to the parameters grows by a factor {d.growth_per_step ** (d.until - d.onset):.2g}, "
        f"{d.growth_per_step:.3g} a step.{lost} The hypergradient is exact, but it holds only for tiny changes. Lower the "
        f"learning rate from step {d.onset} on, clip the gradient (hg.clip_by_global_norm), or take fewer steps; in "
        "hg.optimize, average over seeds, clip with optax.clip_by_global_norm, or stop with hg.callbacks.StopOnGrowth. "
        "hg.check_smoothness says how far the hypergradient can be trusted. If the initial weights are tiny, this may be "
        "the way out of a plateau, which a larger initial scale shortens."
    )


def _vanishing(d: Diagnosis) -> str:
    if not d.norms[PARAMS].any():
        return (
            "the derivative with respect to the parameters is exactly zero: `val_fn` does not depend on them, or is at a "
            "minimum or on a plateau where training ends."
        )
    return (
        f"what happens before step {d.onset} of {len(d.losses)} no longer matters for the result: the derivative with "
        f"respect to the parameters is below {SHRINKAGE:.0e} of its largest value there. The hyperparameters of those "
        "steps, and the initial weights, have almost no hypergradient. Take fewer steps, a lower learning rate, or leave "
        "them out with hg.fixed."
    )


def _not_finite(d: Diagnosis) -> str:
    if not d.status.ok:
        return f"training itself failed, so there is no derivative to look at: {d.status.sentence()}"
    if d.onset is not None:
        return (
            f"the derivative becomes NaN or infinite at step {d.onset}, going backwards, without having grown before. Look "
            "for a derivative that does not exist there: sqrt(0), a norm of zero, 0/0 behind a jnp.where."
        )
    return (
        "the validation value or its derivative with respect to the trained parameters is NaN or infinite, though training "
        "itself was fine: look at `val_fn`, and at what `train_fn` does outside of hg.train."
    )


def _of_rates(excess: np.ndarray) -> str:
    above, highest = np.flatnonzero(excess > 1), int(np.nanargmax(excess))
    limit = "2 (1 + momentum) / lambda, lambda the largest eigenvalue of the Hessian"
    if not above.size:
        return f"Learning rates stay below {limit}: they come to {excess[highest]:.2g} of it, at step {highest}."
    return (
        f"Learning rates exceed {limit}, at {above.size} of {len(excess)} steps, from {above[0]} to {above[-1]}, by a "
        f"factor of up to {excess[highest]:.2g} (step {highest}): along its direction training diverges until lambda falls."
    )


_SENTENCES: dict[str, Callable[[Diagnosis], str]] = {
    "healthy": _healthy,
    "exploding": _exploding,
    "vanishing": _vanishing,
    "not finite": _not_finite,
}
