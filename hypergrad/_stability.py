"""Whether training amplifies small changes at the points that a meta-loop comes to, and a line for the user where it does.

Invariant: what is judged is the reverse pass of the very hypergradient that is descended, and it is the same without.
"""

import math
import statistics
import warnings
from typing import Any

import numpy as np

from hypergrad._diagnose import GROWTH, Diagnosis, growth, judge
from hypergrad._report import Ledger, Norms, Trace
from hypergrad.optimizers.chain import PARAMS


JUMP = 10.0  # times the median so far
# Growth that is no alarm yet tells of one where the hypergradients of seeds have nothing in common: noise alone has a signal
# to noise of 1. A language model (experiments.language_model) has 51 and 0.9 at a constant rate of 3e-3, where its single
# runs grow 40 to 250 times and descending leads nowhere; at 1.2e-3, where it leads down, 6 to 59 and 2.9.
DOUBTFUL, NOISE = 20.0, 1.5


class Stability:
    """What a meta-loop has said of it: at most two lines, one of its first meta-step and one of the first jump."""

    def __init__(self) -> None:
        self.told: set[bool] = set()

    def tell(self, done: Any, ledger: Ledger, history: list[Any]) -> None:
        """A warning, if training explodes at the first meta-step, or at one where the hypergradient jumps, or a seed's."""
        first = not history
        if len(history) == 1 and math.isnan(history[0].value) and math.isnan(done.value):
            why = "" if done.status is None else done.status.sentence()
            warnings.warn(
                "hg.optimize: no seed of the first two meta-steps gave a finite value and gradient, so nothing is learned"
                f"{f': {why}' if why else '.'}",
                stacklevel=5,
            )
            return
        what = "training is unstable" if first else _jump(done, history, bool(self.told))
        if first in self.told or not _unstable(done) or not what:
            return
        self.told.add(first)
        found = diagnosed(ledger, done)
        worst = f" in the worst of {found.runs} runs" if found.runs > 1 else ""
        noise = f", and seeds disagree (signal to noise {done.signal_to_noise:.1f}; noise alone has 1)"
        cure = "" if first else ", go on from the best step with a lower meta-learning rate"
        warnings.warn(
            f"hg.optimize, meta-step {done.step}: {what}. Going back over the {len(found.losses)} steps, the derivative "
            f"grows {found.growth:.2g} times{worst}{noise if _noisy(done) else ''}; from {GROWTH:.0f} times on, following "
            f"it makes no sense. Lower the learning rate{_since(found)}, clip the gradient (hg.clip_by_global_norm), or "
            f"take fewer steps{cure}. hg.diagnose says more; diagnose=False does without this.",
            stacklevel=5,
        )


def _jump(done: Any, history: list[Any], told: bool) -> str:
    """What has jumped, "" if nothing has. told: whether instability is known, so that one seed's is no news."""
    if not done.gradient_norm <= JUMP * statistics.median([before.gradient_norm for before in history]):
        return f"the hypergradient has jumped, to a norm of {done.gradient_norm:.3g}"
    if not done.clipped_seeds or told:
        return ""
    return (
        "the hypergradient of one seed has jumped"
        if done.clipped_seeds == 1
        else (f"the hypergradients of {done.clipped_seeds} seeds have jumped")
    )


def _unstable(done: Any) -> bool:
    return done.growth >= GROWTH or (done.growth >= DOUBTFUL and _noisy(done))


def _noisy(done: Any) -> bool:
    return done.signal_to_noise < NOISE


def _since(found: Diagnosis) -> str:
    return "" if found.onset is None else f" from step {found.onset} on"


def growths(ledger: Ledger) -> list[float]:
    """Of each run that was reversed, how much its derivative grows."""
    return [growth(_norms(logs)) for logs in ledger.norms]


def worst_growth(ledger: Ledger) -> float:
    """NaN where no run was seen."""
    return max((x for x in growths(ledger) if not math.isnan(x)), default=math.nan)


def diagnosed(ledger: Ledger, done: Any) -> Diagnosis:
    """Of the run whose derivative grows most, as `hg.diagnose` would."""
    norms = _norms(max(ledger.norms, key=lambda logs: np.nan_to_num(growth(_norms(logs)))))
    losses = np.full(len(norms[PARAMS]) - 1, np.nan)
    return judge(Trace(done.status, losses, norms), done.value, done.gradient_norm, len(ledger.norms))


def _norms(logs: Norms) -> dict[str, np.ndarray]:
    return {name: np.exp(np.asarray(x, np.float64)) for name, x in logs.items()}
