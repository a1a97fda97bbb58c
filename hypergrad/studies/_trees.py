"""`suggest_tree`: a whole pytree of hyperparameters as one compact attribute of a trial."""

import warnings
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optuna

from hypergrad._described import describe_hypers
from hypergrad._safe_files import digest
from hypergrad.hypers import check_hypers, scatter, split_fixed
from hypergrad.studies import _marks


_SCATTER = 0.3  # standard deviation of another start, in unconstrained coordinates


def suggest_tree(trial: Any, hypers: Any) -> Any:
    """`hypers` as this trial is to try them: same tree, same domains, other values. As many as you like, one row stored.

    The first trial tries the values of `hypers` themselves. Along a chain of `HypergradientSampler` the gradient that
    `report_gradient(trial, grads)` was given moves them. A trial that begins another chain tries them scattered: plus
    0.3 N(0, 1) in unconstrained coordinates, drawn from (seed of the study, number of the trial). So does every trial of
    another sampler, and, with a warning, one whose chain has another tree. `hg.fixed` leaves stay.

    One tree a trial: ValueError for another. Asked again it is the same; also of a finished trial, whatever the values of
    `hypers` are then and under whichever setting of x64. ValueError if that trial tried another tree, or none.
    """
    hypers = check_hypers(hypers)
    learned, fixed = split_fixed(hypers)
    if isinstance(trial, optuna.trial.Trial):
        return eqx.combine(_suggested(trial, learned), fixed)
    if isinstance(trial, optuna.trial.FrozenTrial):
        return eqx.combine(_read_back(trial, learned), fixed)
    return hypers  # `FixedTrial` and the like have no study


def _suggested(trial: optuna.trial.Trial, learned: Any) -> Any:
    leaves = describe_hypers(learned)
    _refuse_another(trial, leaves, learned)
    attributes = trial.storage.get_trial_system_attrs(trial._trial_id)
    tree = _marks.read_tree(attributes)
    if tree is not None and _marks.untyped(tree.leaves) == _marks.untyped(leaves):
        learned = _shaped(tree, learned)
        if tree.leaves == leaves:
            return learned
        leaves = {path: leaves[path] for path in tree.leaves}  # in the order of the chain
    else:
        _leave_chain(trial, attributes, {} if tree is None else tree.leaves, leaves)
        if _asked_before(trial, leaves):
            seed = _marks.draw(_marks.study_seed(trial.study), trial.number, 0)
            learned = scatter(learned, jax.random.key(seed), _SCATTER)
    _marks.write_tree(trial.storage, trial._trial_id, _marks.Tree(leaves, elements_of(learned, leaves)))
    return learned


def _refuse_another(trial: optuna.trial.Trial, leaves: dict[str, str], learned: Any) -> None:
    """The first would answer for the second, or be overwritten by it. What was asked is known to the trial's object."""
    asked = leaves, digest(elements_of(learned, sorted(leaves)).tobytes())
    if vars(trial).setdefault("_hypergrad_tree", asked) != asked:
        raise ValueError(
            f"trial {trial.number} has suggested another tree, or the same with other values: one tree a trial. Ask for all "
            "at once: suggest_tree(trial, {'generator': ..., 'discriminator': ...})."
        )


def _leave_chain(trial: optuna.trial.Trial, attributes: Any, there: dict[str, str], here: dict[str, str]) -> None:
    """A trial cannot go on with a chain of other trees: it begins its own, and the meta-optimizer with it."""
    link = _marks.read_link(trial, attributes)
    if link is None or link.step == 0:
        return
    _marks.write_link(trial.storage, trial, _marks.Link(trial.number, 0, None))
    warnings.warn(
        f"trial {trial.number} does not go on with the chain of trial {link.chain}, whose tree is another than `hypers`: "
        f"{_marks.first_difference(there, here)}. It begins a chain of its own.",
        stacklevel=4,
    )


def _read_back(trial: optuna.trial.FrozenTrial, learned: Any) -> Any:
    """What a finished trial tried."""
    tree = _marks.read_tree(trial.system_attrs)
    if tree is None and trial.system_attrs.get(_marks.TREE) is not None:
        found = _marks.unusable([trial])
        warnings.warn(f"`hypers` are given back as they are: {found.get('tree') or found['format']}.", stacklevel=3)
        return learned
    if tree is None:
        raise ValueError(f"trial {trial.number} suggested no tree, so there is none to read back. Ask a trial that did.")
    leaves = describe_hypers(learned)
    if _marks.untyped(tree.leaves) != _marks.untyped(leaves):
        raise ValueError(
            f"trial {trial.number} tried another tree than `hypers`: {_marks.first_difference(tree.leaves, leaves)}. Pass "
            "hypers of the tree and domains that it was given."
        )
    return _shaped(tree, learned)


def _asked_before(trial: optuna.trial.Trial, leaves: dict[str, str]) -> bool:
    others = (_marks.tree_leaves(t) for t in trial.study.get_trials(deepcopy=False) if t.number < trial.number)
    return any(there is not None and _marks.untyped(there) == _marks.untyped(leaves) for there in others)


def _shaped(tree: _marks.Tree, like: Any) -> Any:
    """The leaves of `like` with the elements of the tree."""
    flat = _by_path(like)
    parts = np.split(tree.elements, np.cumsum([flat[path].size for path in tree.leaves])[:-1])
    own = dict(zip(tree.leaves, parts, strict=True))
    shaped = [jnp.asarray(own[path].reshape(x.shape), x.dtype) for path, x in flat.items()]
    return jax.tree.unflatten(jax.tree.structure(like), shaped)


def elements_of(learned: Any, paths: Iterable[str]) -> np.ndarray:
    """The inverse: the leaves at these paths, one after the other. A study has them in the order of `Tree.leaves`, which a
    mapping of another kind need not have."""
    flat = _by_path(learned)
    return np.concatenate([np.ravel(_as_float(flat[path])) for path in paths])


def _by_path(learned: Any) -> dict[str, Any]:
    paths, leaves = describe_hypers(learned), jax.tree.leaves(learned)
    if len(paths) != len(leaves):
        raise ValueError("two leaves of `hypers` have the same path: a study keeps them by their paths. Rename one of them.")
    return dict(zip(paths, leaves, strict=True))


def _as_float(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array if array.dtype == np.float64 else array.astype(np.float32)
