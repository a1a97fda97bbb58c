"""What the library writes into a trial: its link in a chain, its gradient, its tree; as system attributes.

Invariant: `unpacked(packed(x), x.dtype, [x.size])` is x. The storage is shared and not trusted: a mark of another format or
form is as good as absent, and nothing inflates beyond what is known to be needed.
"""

import base64
import binascii
import itertools
import math
import re
import threading
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import optuna

from hypergrad._forms import misfit, natural, shown, text


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


def _is_leaves(x: Any) -> bool:
    return isinstance(x, dict) and all(map(text, (*x, *x.values()))) and _size(x) <= _MOST


_MOST = 2**24  # numbers of one tree
_FORMS: dict[str, dict[str, Any]] = {
    LINK: {"chain": natural, "step": natural, "parent": lambda x: x is None or natural(x), "trial": natural},
    GRADIENT: {"names": lambda x: isinstance(x, list) and all(map(text, x)) and len({*x}) == len(x), "values": text},
    TREE: {"leaves": _is_leaves, "dtype": lambda x: text(x) and x in ("<f4", "<f8"), "values": text},
}
# Short numbers and few of them, so that their product is no work either.
_SHAPE = re.compile(r"\w+\[((?:\d{1,8}(?:, \d{1,8}){0,63})?)\] in ")


def _size(leaves: dict[str, str]) -> int:
    """How many elements leaves have that are described like this; more than anybody can have where they are not."""
    shapes = [_SHAPE.match(x) for x in leaves.values()]
    return sum(math.prod(map(int, filter(None, s[1].split(", ")))) if s else _MOST + 1 for s in shapes)


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
    names = tuple(mark["names"])
    values = unpacked(mark["values"], "<f4", _lengths(trial.system_attrs, mark))
    return Gradient(names, *np.split(values.astype(np.float64), [len(names)]))


def remove_gradient(storage: Any, trial_id: int) -> None:
    """Of a trial that has taken over another's attributes: what it comes to is its own."""
    storage.set_trial_system_attr(trial_id, GRADIENT, None)


def gradient_names(trial: Any) -> list[str] | None:
    """The suggested numbers that have a derivative, undecoded; None without a gradient."""
    mark = _read(trial.system_attrs, GRADIENT)
    return None if mark is None else mark["names"]


def texts(trial: Any) -> tuple[str, ...]:
    """Its gradient and its tree as they are stored: equal texts are equal numbers."""
    gradient, tree = trial.system_attrs[GRADIENT], _read(trial.system_attrs, TREE)
    of_tree = () if tree is None else (*map(str, tree["leaves"].items()), tree["dtype"], tree["values"])
    return (*gradient["names"], gradient["values"], *of_tree)


def write_tree(storage: Any, trial_id: int, tree: Tree) -> None:
    if tree.elements.size > _MOST:
        raise ValueError(f"a tree of {tree.elements.size:,} numbers is too large for a study, which takes {_MOST:,}.")
    kind = "<f8" if tree.elements.dtype == np.float64 else "<f4"
    content = {"leaves": tree.leaves, "dtype": kind, "values": packed(tree.elements.astype(kind))}
    _write(storage, trial_id, TREE, content)


def read_tree(attributes: Mapping[str, Any]) -> Tree | None:
    mark = _read(attributes, TREE)
    if mark is None:
        return None
    return Tree(mark["leaves"], unpacked(mark["values"], mark["dtype"], (_size(mark["leaves"]),)))


def tree_leaves(trial: Any) -> dict[str, str] | None:
    """Of the tree, undecoded; None without one."""
    mark = _read(trial.system_attrs, TREE)
    return None if mark is None else mark["leaves"]


def untyped(leaves: dict[str, str]) -> dict[str, str]:
    """Without the types: two processes may have other settings of x64 and the same tree."""
    return {path: x.partition("[")[2] for path, x in leaves.items()}


def first_difference(there: dict[str, str], here: dict[str, str]) -> str:
    """Between two trees, in words."""
    a, b = untyped(there), untyped(here)
    path = next(path for path in sorted({*a, *b}) if a.get(path) != b.get(path))
    return f"{there.get(path, 'nothing')} at {path} there, {here.get(path, 'nothing')} here"


def study_seed(study: optuna.Study, seed: int | None = None) -> int:
    """The seed of a study: that of the first sampler that came, kept in its storage; drawn if that had none."""
    known = study._storage.get_study_system_attrs(study._study_id).get(SEED)
    if is_seed(known):
        return known
    drawn = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    study._storage.set_study_system_attr(study._study_id, SEED, drawn)
    if known is not None:  # once: the next one finds what was written here
        warnings.warn(f"the seed of the study cannot be used: it is {shown(known)}. Another is taken.", stacklevel=2)
    return drawn


def is_seed(x: Any) -> TypeGuard[int]:
    return type(x) is int and 0 <= x < 2**128


def draw(seed: int, chain: int, step: int, name: str = "") -> int:
    """32 bits for one place in one chain, of one parameter."""
    words = (seed, chain, step, zlib.crc32(name.encode()))
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def packed(values: np.ndarray) -> str:
    return base64.b85encode(zlib.compress(values.tobytes())).decode()


def unpacked(packed: str, dtype: Any, lengths: Sequence[int]) -> np.ndarray:
    """Of so many numbers, of one of these lengths; ValueError if it is not, or if they are not finite."""
    sizes = [np.dtype(dtype).itemsize * length for length in lengths]
    wrong = f"its values are not {' or '.join(map(str, lengths))} numbers"
    if len(packed) > 3 * max(sizes) + 100:  # what does not compress becomes little longer, and 5/4 of that in base85
        raise ValueError(wrong)
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(base64.b85decode(packed), max(sizes) + 1)  # 0 would be no limit
    except (ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"its values cannot be read ({error})") from error
    if len(content) not in sizes or not inflate.eof or inflate.unused_data:
        raise ValueError(wrong)
    values = np.frombuffer(content, dtype)
    if not np.isfinite(values).all():
        raise ValueError("its values are not finite")
    return values


def unusable(trials: list[Any]) -> dict[str, str]:
    """{kind of mark, or "format": what is wrong with one of that kind} for those that this version does not read."""
    found: dict[str, str] = {}
    for trial, key in itertools.product(trials, (LINK, GRADIENT, TREE)):
        mark, kind = trial.system_attrs.get(key), key.partition(":")[2]
        if mark is None or kind in found:
            continue
        if not _is_of_this_format(mark):
            other = mark.get("format") if isinstance(mark, dict) else mark
            found.setdefault("format", f"another version of hypergrad wrote them (format {shown(other)}, here {FORMAT})")
        elif problem := _problem(trial.system_attrs, key):
            found[kind] = f"of the {kind} of trial {trial.number}, {problem}"
    return found


def _write(storage: Any, trial_id: int, key: str, content: dict[str, Any]) -> None:
    storage.set_trial_system_attr(trial_id, key, {"format": FORMAT, **content})


def _read(attributes: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    mark = attributes.get(key)
    return mark if _is_of_this_format(mark) and not _problem(attributes, key) else None


def _problem(attributes: Mapping[str, Any], key: str) -> str:
    """What is wrong with a mark of this format; "" if nothing is."""
    mark = attributes[key]
    if problem := misfit(mark, {"format": lambda x: True, **_FORMS[key]}, "it"):
        return problem
    if key == GRADIENT:
        return _values_problem(mark["values"], "<f4", _lengths(attributes, mark))
    if key == TREE:
        return _values_problem(mark["values"], mark["dtype"], (_size(mark["leaves"]),))
    return ""


def _lengths(attributes: Mapping[str, Any], gradient: dict[str, Any]) -> tuple[int, ...]:
    """Of a gradient: derivatives of the named numbers, and of the tree if there is one, or of these alone."""
    names, tree = len(gradient["names"]), _read(attributes, TREE)
    return (names,) if tree is None else (names, names + _size(tree["leaves"]))


def _values_problem(packed: str, dtype: str, lengths: tuple[int, ...]) -> str:
    """Looked at once: every mark of a study is asked for whenever a trial begins."""
    place = (hash(packed), len(packed), dtype, lengths)
    problem = _verdicts.get(place)
    if problem is None:
        problem = _unpacking_problem(packed, dtype, lengths)
        with _lock:
            _verdicts[place] = problem
            while len(_verdicts) > _REMEMBERED:
                del _verdicts[next(iter(_verdicts))]
    return problem


_REMEMBERED = 2**16  # verdicts, of some 200 bytes: more than a study has marks, or else each would be looked at each time
_verdicts: dict[tuple[Any, ...], str] = {}  # by hashes: the texts themselves may be large, and are the storage's to keep
_lock = threading.Lock()


def _unpacking_problem(packed: str, dtype: str, lengths: tuple[int, ...]) -> str:
    try:
        unpacked(packed, dtype, lengths)
    except ValueError as error:
        return str(error)
    return ""


def _is_of_this_format(mark: Any) -> bool:
    found = mark.get("format") if isinstance(mark, dict) else None
    return type(found) is int and found == FORMAT
