"""`suggest_tree`: a whole pytree of hyperparameters as one compact attribute of a trial."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optuna

from hypergrad.hypers import check_hypers, describe_hypers, scatter, split_fixed
from hypergrad.studies import _marks


_SCATTER = 0.3  # standard deviation of another start, in unconstrained coordinates


def suggest_tree(trial: Any, hypers: Any) -> Any:
    """`hypers` as this trial is to try them: same tree, same domains, other values. As many as you like, one row stored.

    The first trial tries the values of `hypers` themselves. Along a chain of `HypergradientSampler` the gradient that
    `report_gradient(trial, grads)` was given moves them. A trial that begins another chain tries them scattered: plus
    0.3 N(0, 1) in unconstrained coordinates, drawn from (seed of the study, number of the trial). So does every trial of
    another sampler. `hg.fixed` leaves stay. One tree a trial; asked again, also of a finished trial, it is the same.
    """
    hypers = check_hypers(hypers)
    learned, fixed = split_fixed(hypers)
    leaves = describe_hypers(learned)
    attributes = _attributes(trial)
    tree = _marks.read_tree(attributes)
    if tree is not None and tree.leaves == leaves:
        return eqx.combine(_shaped(tree.elements, learned), fixed)
    if not isinstance(trial, optuna.trial.Trial):
        if tree is None and attributes.get(_marks.TREE) is not None:
            found = _marks.unusable([trial])
            problem = found.get("tree") or found["format"]
            warnings.warn(f"`hypers` are given back as they are: {problem}.", stacklevel=2)
        return hypers
    if _asked_before(trial, leaves):
        seed = _marks.draw(_marks.study_seed(trial.study), trial.number, 0)
        hypers = scatter(hypers, jax.random.key(seed), _SCATTER)
        learned, _ = split_fixed(hypers)
    elements = np.concatenate([np.ravel(_as_float(x)) for x in jax.tree.leaves(learned)])
    _marks.write_tree(trial.storage, trial._trial_id, _marks.Tree(leaves, elements))
    return hypers


def _attributes(trial: Any) -> dict[str, Any]:
    """Those of a running trial are in the storage, those of a finished one with it, `FixedTrial` has its own."""
    if isinstance(trial, optuna.trial.Trial):
        return trial.storage.get_trial_system_attrs(trial._trial_id)
    return trial.system_attrs if isinstance(trial, optuna.trial.FrozenTrial) else {}


def _asked_before(trial: optuna.trial.Trial, leaves: dict[str, str]) -> bool:
    others = trial.study.get_trials(deepcopy=False)
    return any(_marks.tree_leaves(t) == leaves for t in others if t.number < trial.number)


def _shaped(elements: np.ndarray, like: Any) -> Any:
    """The leaves of `like` with other elements."""
    flat, structure = jax.tree.flatten(like)
    parts = np.split(elements, np.cumsum([x.size for x in flat])[:-1])
    shaped = [jnp.asarray(part.reshape(x.shape), x.dtype) for part, x in zip(parts, flat, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _as_float(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array if array.dtype == np.float64 else array.astype(np.float32)
