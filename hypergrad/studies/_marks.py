"""What the library writes into a trial: its link in a chain, its gradient, its tree; as system attributes.

Invariant: `unpacked(packed(x), x.dtype)` is x. A mark of another format is as good as absent.
"""

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import optuna


FORMAT = 1
LINK, GRADIENT, TREE, SEED = (f"hypergrad:{name}" for name in ("link", "gradient", "tree", "seed"))


class Link(NamedTuple):
    """Where a trial stands: `chain` is the number of the trial that begins it, `parent` that of the step before."""

    chain: int
    step: int
    parent: int | None


class Gradient(NamedTuple):
    """Derivatives of a trial's value: float64 [names] of suggested numbers, and [elements] of its tree, unconstrained."""

    names: tuple[str, ...]
    numbers: np.ndarray
    tree: np.ndarray


class Tree(NamedTuple):
    """A suggested pytree: {path: shape, type and domain} of its leaves, their unconstrained elements one after the other."""

    leaves: dict[str, str]
    elements: np.ndarray


def write_link(storage: Any, trial: Any, link: Link) -> None:
    _write(storage, trial._trial_id, LINK, {**link._asdict(), "trial": trial.number})


def read_link(trial: Any, attributes: Mapping[str, Any] | None = None) -> Link | None:
    """None too for a link copied along from another trial: it names the one that it was written for."""
    mark = _read(trial.system_attrs if attributes is None else attributes, LINK)
    return Link(mark["chain"], mark["step"], mark["parent"]) if mark and mark["trial"] == trial.number else None


def chain_number(trial: Any) -> int | None:
    """Of the link, without reading the rest of it."""
    mark = _read(trial.system_attrs, LINK)
    return None if mark is None else mark["chain"]


def copied_link(trial: Any) -> Link | None:
    """The link that a retried trial has taken over from the one that it repeats."""
    mark = _read(trial.system_attrs, LINK)
    return Link(mark["chain"], mark["step"], mark["parent"]) if mark and mark["trial"] != trial.number else None


def write_gradient(storage: Any, trial_id: int, gradient: Gradient) -> None:
    """As float32: a direction needs no more."""
    values = np.concatenate([gradient.numbers, gradient.tree])
    _write(storage, trial_id, GRADIENT, {"names": list(gradient.names), "values": packed(values.astype("<f4"))})


def read_gradient(trial: Any) -> Gradient | None:
    mark = _read(trial.system_attrs, GRADIENT)
    if mark is None:
        return None
    values, names = unpacked(mark["values"], "<f4"), tuple(mark["names"])
    return Gradient(names, *np.split(values.astype(np.float64), [len(names)]))


def gradient_names(trial: Any) -> list[str] | None:
    """The suggested numbers that have a derivative, undecoded; None without a gradient."""
    mark = _read(trial.system_attrs, GRADIENT)
    return None if mark is None else mark["names"]


def gradient_text(trial: Any) -> str:
    """The gradient as it is stored: equal texts are equal gradients."""
    return trial.system_attrs[GRADIENT]["values"]


def write_tree(storage: Any, trial_id: int, tree: Tree) -> None:
    kind = "<f8" if tree.elements.dtype == np.float64 else "<f4"
    content = {"leaves": tree.leaves, "dtype": kind, "values": packed(tree.elements.astype(kind))}
    _write(storage, trial_id, TREE, content)


def read_tree(attributes: Mapping[str, Any]) -> Tree | None:
    mark = _read(attributes, TREE)
    return None if mark is None else Tree(mark["leaves"], unpacked(mark["values"], mark["dtype"]))


def study_seed(study: optuna.Study, seed: int | None = None) -> int:
    """The seed of a study: that of the first sampler that came, kept in its storage; drawn if that had none."""
    known = study._storage.get_study_system_attrs(study._study_id)
    if SEED not in known:
        drawn = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        study._storage.set_study_system_attr(study._study_id, SEED, drawn)
        return drawn
    return known[SEED]


def draw(seed: int, chain: int, step: int, name: str = "") -> int:
    """32 bits for one place in one chain, of one parameter."""
    words = (seed, chain, step, zlib.crc32(name.encode()))
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def packed(values: np.ndarray) -> str:
    return base64.b85encode(zlib.compress(values.tobytes())).decode()


def unpacked(text: str, dtype: Any) -> np.ndarray:
    try:
        return np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype)
    except (ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"a trial's attribute is damaged: {error}. Remove the study, or its last trials.") from error


def foreign_formats(trials: list[Any]) -> set[Any]:
    """The formats of marks that this version does not read."""
    marks = (trial.system_attrs.get(key) for trial in trials for key in (LINK, GRADIENT, TREE))
    return {_format(mark) for mark in marks if mark is not None} - {FORMAT}


def _write(storage: Any, trial_id: int, key: str, content: dict[str, Any]) -> None:
    storage.set_trial_system_attr(trial_id, key, {"format": FORMAT, **content})


def _read(attributes: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    mark = attributes.get(key)
    return mark if mark is not None and _format(mark) == FORMAT else None


def _format(mark: Any) -> Any:
    return mark.get("format") if isinstance(mark, dict) else repr(mark)[:20]
