"""`HypergradientSampler`: continuous parameters follow their gradient, all others come from another sampler."""

import datetime
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hypergrad.hypers import describe
from hypergrad.studies import _chains, _marks
from hypergrad.studies._descent import Descent, check_rule


UNREPORTED = 10  # trials after which a study without a gradient is no accident


class HypergradientSampler(BaseSampler):
    """u <- u + meta_optimizer(du), from a trial whose objective called `report_gradient`, for each float without `step`.

    u is log x for `log=True`, else the logit of where x stands in its interval. A chain of such trials goes on until it
    stalls or falls behind others; then inner_sampler (TPE by default) suggests another start. Categorical, integer and
    stepped parameters, and those without a gradient, are always its choice, and stay as they are along a chain.
    meta_optimizer: of optax; it sees the coordinates as one vector, and the value and gradient of each trial. One that
    searches along a line (`optax.lbfgs()`) would need values within a step: TypeError. seed: of the study, kept in its
    storage; every trial draws from (seed, chain, step). An inner_sampler of your own draws as you seeded it. One objective
    only: ValueError.
    """

    def __init__(
        self,
        *,
        meta_optimizer: optax.GradientTransformation = optax.adam(0.1),  # noqa: B008 (immutable)
        inner_sampler: BaseSampler | None = None,
        seed: int | None = None,
    ) -> None:
        if not (hasattr(meta_optimizer, "init") and hasattr(meta_optimizer, "update")):
            kind = type(meta_optimizer).__name__
            raise TypeError(f"`meta_optimizer` must be an optax transformation like optax.adam(0.1); got {kind}.")
        if inner_sampler is not None and not isinstance(inner_sampler, BaseSampler):
            raise TypeError(
                "`inner_sampler` must be a sampler of Optuna, called, like optuna.samplers.RandomSampler(), or None for "
                f"TPE; got {describe(inner_sampler)}."
            )
        seed = int(seed) if isinstance(seed, np.integer) else seed
        if seed is not None and not _marks.is_seed(seed):
            raise ValueError(f"`seed` must be an integer from 0 to 2**128 - 1, or None; got {seed!r}.")
        self._inner_sampler, self._seed = inner_sampler, seed
        check_rule(meta_optimizer)
        self._descent, self._warned = Descent(meta_optimizer), set[tuple[str, str]]()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Decide where the trial stands, and write it down."""
        _refuse_several_objectives(study)
        storage, link = study._storage, self._link(study, trial)
        if link is not None:
            return  # decided when the trial was asked for
        trials = storage.get_all_trials(study._study_id, deepcopy=False)
        self._warn_of_unusable(study, trials)
        self._warn_of_no_gradient(study, trials)
        _marks.study_seed(study, self._seed)
        link = _marks.Link(trial.number, 0, None)
        again = _marks.copied_link(trial)
        if again is not None:  # another attempt at the place of a trial that died, with its parameters and its tree
            link = again if again.step > 0 else link
            _marks.remove_gradient(storage, trial._trial_id)
        elif not trial.params and "fixed_params" not in trial.system_attrs:
            others = [t for t in trials if t.number != trial.number]
            chain = _chains.chosen(others, _sign(study), datetime.datetime.now())
            if chain is not None:
                link = _marks.Link(chain.number, len(chain.trials), chain.head.number)
                self._hand_over_tree(study, trial, chain)
        _marks.write_link(storage, trial, link)
        if link.step == 0:
            self._inner(study, trial).before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        _refuse_several_objectives(study)
        chain = self._chain(study, trial)
        if chain is None:
            return self._inner(study, trial).infer_relative_search_space(study, trial)
        return {name: d for name, d in chain.head.distributions.items() if not d.single()}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        _refuse_several_objectives(study)
        chain = self._chain(study, trial)
        if chain is None:
            return self._inner(study, trial).sample_relative(study, trial, search_space)
        params = self._descent.next(study.study_name, chain, _sign(study)).params
        return {name: params[name] for name, d in search_space.items() if name in params and _is_value(params[name], d)}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        _refuse_several_objectives(study)
        inner = self._inner(study, trial, param_name)
        return inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        try:
            self._inner(study, trial).after_trial(study, trial, state, values)
        except KeyError as error:  # GridSampler asks for the cell of each trial, and one along a chain was given none
            if error.args != ("grid_id",) or "grid_id" in study._storage.get_trial_system_attrs(trial._trial_id):
                raise

    def reseed_rng(self) -> None:
        if self._inner_sampler is not None:
            self._inner_sampler.reseed_rng()

    def _inner(self, study: Study, trial: FrozenTrial, name: str = "") -> BaseSampler:
        """TPE afresh each time: it has no memory but the study, and its draws depend on nothing but the place."""
        if self._inner_sampler is not None:
            return self._inner_sampler
        return TPESampler(seed=_marks.draw(_marks.study_seed(study, self._seed), trial.number, 0, name))

    def _link(self, study: Study, trial: FrozenTrial) -> _marks.Link | None:
        return _marks.read_link(trial, study._storage.get_trial_system_attrs(trial._trial_id))

    def _chain(self, study: Study, trial: FrozenTrial) -> _chains.Chain | None:
        """The chain up to the trial's parent, and the attempts at its step before it; None where a chain begins."""
        link = self._link(study, trial)
        if link is None or link.step == 0:
            return None
        chain = _chains.before(study._storage.get_all_trials(study._study_id, deepcopy=False), trial.number, link)
        return chain if chain.trials else None

    def _hand_over_tree(self, study: Study, trial: FrozenTrial, chain: _chains.Chain) -> None:
        tree = _marks.read_tree(chain.head.system_attrs)
        if tree is not None:
            elements = self._descent.next(study.study_name, chain, _sign(study)).elements
            moved = tree.elements if elements is None else elements.astype(tree.elements.dtype)
            _marks.write_tree(study._storage, trial._trial_id, _marks.Tree(tree.leaves, moved))

    def _warn_of_unusable(self, study: Study, trials: list[FrozenTrial]) -> None:
        """Once for each study and kind."""
        found = _marks.unusable(trials)
        for kind in sorted(kind for kind in found if (study.study_name, kind) not in self._warned):
            self._warned.add((study.study_name, kind))
            warnings.warn(
                f"the study holds gradients or chains that cannot be used: {found[kind]}. Their trials count as plain ones.",
                stacklevel=4,
            )

    def _warn_of_no_gradient(self, study: Study, trials: list[FrozenTrial]) -> None:
        own = [t for t in trials if t.state == TrialState.COMPLETE and _marks.LINK in t.system_attrs]
        reported = any(_marks.GRADIENT in t.system_attrs for t in trials)
        if len(own) < UNREPORTED or reported or (study.study_name, "") in self._warned:
            return
        self._warned.add((study.study_name, ""))
        warnings.warn(
            f"none of the study's {len(own)} trials by HypergradientSampler has reported a gradient, so that all were the "
            "inner sampler's: call hg.studies.report_gradient(trial, {name: derivative}) in the objective.",
            stacklevel=4,
        )


def _sign(study: Study) -> float:
    return -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0


def _is_value(x: Any, distribution: BaseDistribution) -> bool:
    """Whether Optuna takes it. What it does not take is suggested anew."""
    try:
        distribution.to_internal_repr(x)
    except (TypeError, ValueError):
        return False
    return True


def _refuse_several_objectives(study: Study) -> None:
    if len(study.directions) > 1:
        raise ValueError(
            f"HypergradientSampler follows the gradient of one objective; the study has {len(study.directions)}. Take "
            "another sampler, or a weighted sum of the objectives."
        )
