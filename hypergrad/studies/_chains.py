"""Chains of trials, each a step of descent from the one before: rebuilt from the trials, and which of them to go on with.

Invariant: of the trials of one (chain, step) at most one counts, the complete one of the lowest number; the others are kept.
"""

import datetime
import itertools
import math
import statistics
from typing import Any, NamedTuple

from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from hypergrad.studies import _marks


STARTS = 4  # points of the inner sampler before the first descent, unless the user gave a start
PATIENCE = 8  # a chain has stalled when so many steps gave less than TOLERANCE of all that it has gained
TOLERANCE = 0.002
ATTEMPTS = 3  # at one step, each a quarter of the one before, until the chain is given up
EXPLORATION = 4  # every so many trials the inner sampler has its turn, while there is something that only it can choose
GUESSED = 20  # or at most so many numbers: beyond that a guess is no match for a gradient
OVERDUE = 3.0  # a running trial that has taken so many median durations, and GRACE seconds, may be redone
GRACE = 1.0


class Chain(NamedTuple):
    """number: that of its first trial; trials: those that count, by step; attempts: others at the step after the last."""

    number: int
    trials: list[FrozenTrial]
    attempts: list[FrozenTrial]

    @property
    def head(self) -> FrozenTrial:
        return self.trials[-1]

    def values(self, sign: float) -> list[float]:
        return [sign * trial.value for trial in self.trials if trial.value is not None]

    @property
    def failures(self) -> int:
        """Attempts at the next step that ended without a value and a gradient."""
        return sum(trial.state.is_finished() and not counts(trial) for trial in self.attempts)


Places = dict[tuple[int, int], list[FrozenTrial]]  # (chain, step) -> trials


def rebuilt(trials: list[FrozenTrial]) -> list[Chain]:
    """By their numbers. A complete trial with a gradient begins a chain of its own, whoever sampled it."""
    places = _places(trials)
    chains = (_followed(places, chain) for chain, step in places if step == 0)
    return sorted((chain for chain in chains if chain.trials), key=lambda chain: chain.number)


def before(trials: list[FrozenTrial], number: int, link: _marks.Link) -> Chain:
    """The chain that trial `number` goes on with at `link`, and the attempts at its step before it."""
    own = [trial for trial in trials if trial.number == link.chain or _marks.chain_number(trial) == link.chain]
    chain = _followed(_places(own), link.chain, link.step)
    return chain._replace(attempts=[trial for trial in chain.attempts if trial.number < number])


def _places(trials: list[FrozenTrial]) -> Places:
    places: Places = {}
    for trial in trials:
        link = _marks.read_link(trial) or _marks.Link(trial.number, 0, None)
        places.setdefault((link.chain, link.step), []).append(trial)
    return places


def _followed(places: Places, number: int, end: int | None = None) -> Chain:
    """From its first trial as far as trials count, or to step `end`."""
    counted: list[FrozenTrial] = []
    while len(counted) != end:
        complete = [trial for trial in places.get((number, len(counted)), ()) if counts(trial)]
        if not complete:
            break
        counted.append(min(complete, key=lambda trial: trial.number))
    return Chain(number, counted, places.get((number, len(counted)), []))


def counts(trial: FrozenTrial) -> bool:
    """Whether a descent can go on from it: it is complete, with a finite value and a derivative to follow."""
    values = trial.values or []
    if trial.state != TrialState.COMPLETE or len(values) != 1 or not _is_finite(values[0]):
        return False
    names = _marks.gradient_names(trial)
    return names is not None and (_marks.tree_leaves(trial) is not None or any(is_free(trial, name) for name in names))


def is_free(trial: FrozenTrial, name: str) -> bool:
    """Whether a suggested value can follow its derivative: a float on an interval, without steps, and inside."""
    distribution, x = trial.distributions.get(name), trial.params.get(name, math.nan)
    if not isinstance(distribution, FloatDistribution) or distribution.step is not None or distribution.single():
        return False
    return _is_finite(x) and distribution.low <= x <= distribution.high


def _is_finite(x: Any) -> bool:
    try:
        return math.isfinite(x)
    except (TypeError, OverflowError):  # text, or an integer beyond float64
        return False


def chosen(trials: list[FrozenTrial], sign: float, now: datetime.datetime) -> Chain | None:
    """The chain to go on with; None: the inner sampler's turn. sign: +1 to minimize, -1 to maximize."""
    chains = rebuilt(trials)
    if not chains or _still_starting(trials, chains) or _time_to_explore(trials, chains):
        return None
    patience = max(GRACE, OVERDUE * _median_seconds(trials))
    descents = [list(itertools.accumulate(chain.values(sign), min)) for chain in chains]
    live = []
    for chain, lowest in zip(chains, descents, strict=True):
        rank = _rank(lowest, descents)
        free = chain.failures < ATTEMPTS and not _running(chain, now, patience)
        if free and rank <= 0.5 and not stalled(lowest):
            live.append((rank, -chain.number, chain))
    return min(live)[-1] if live else None  # of equals the youngest: it catches up with its elders, or falls behind


def stalled(lowest: list[float]) -> bool:
    """lowest: the smallest value up to each step. Whether the last steps gave next to nothing."""
    return len(lowest) > PATIENCE and lowest[-1 - PATIENCE] - lowest[-1] <= TOLERANCE * (lowest[0] - lowest[-1])


def _rank(lowest: list[float], descents: list[list[float]]) -> float:
    """Which part of the other chains was lower when they were of a chain's age: 0 to 1."""
    age = len(lowest) - 1
    others = [other[age] for other in descents if len(other) > age]
    return sum(other < lowest[-1] for other in others) / max(1, len(others) - 1)


def _still_starting(trials: list[FrozenTrial], chains: list[Chain]) -> bool:
    given = any("fixed_params" in c.trials[0].system_attrs or _marks.tree_leaves(c.trials[0]) for c in chains)
    return not given and len(trials) < STARTS


def _time_to_explore(trials: list[FrozenTrial], chains: list[Chain]) -> bool:
    last = chains[-1].head
    derived = set(_marks.gradient_names(last) or ())
    guessed = [name for name, distribution in last.distributions.items() if not distribution.single()]
    only_inner = any(name not in derived or not is_free(last, name) for name in guessed)
    if not guessed or (not only_inner and len(guessed) > GUESSED):
        return False
    links = [_marks.read_link(trial) for trial in trials[-EXPLORATION + 1 :]]
    return all(link is not None and link.step > 0 for link in links)


def _running(chain: Chain, now: datetime.datetime, patience: float) -> bool:
    """Whether somebody is at the next step, and not for too long. patience: in seconds."""
    begun = [trial.datetime_start for trial in chain.attempts if not trial.state.is_finished()]
    return any(start is None or _seconds(start, now) < patience for start in begun)


def _median_seconds(trials: list[FrozenTrial]) -> float:
    """Of the complete trials; 0 if none says when it began."""
    complete = ((t.datetime_start, t.datetime_complete) for t in trials if t.state == TrialState.COMPLETE)
    return statistics.median([_seconds(start, end) for start, end in complete if start and end] or [0.0])


def _seconds(start: datetime.datetime, end: datetime.datetime) -> float:
    """Between two times as Optuna writes them: local. What another program wrote may name its zone: it is left out."""
    return (end.replace(tzinfo=None) - start.replace(tzinfo=None)).total_seconds()
