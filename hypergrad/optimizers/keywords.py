"""What a rule is not called with: keywords of other libraries, and what stands for them here.

Invariant: what a rule's own `__init__` takes is never refused.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable


_CALLED = {
    "lr": "learning_rate",
    "rate": "learning_rate",
    "step_size": "learning_rate",
    "beta1": "b1",
    "beta2": "b2",
    "beta": "momentum",
    "epsilon": "eps",
    "wd": "weight_decay",
}
_MADE_BY = {
    "betas": "`b1` and `b2` are two values.",
    "mask": "Which leaves decay is a tree of rates: weight_decay=jax.tree.map(lambda m: 1e-2 if m else 0.0, mask).",
    "weight_decay": "hg.add_decayed_weights(rule, weight_decay) adds it to any rule.",
    "nesterov": "hg.Nesterov, hg.NAdamW and hg.Muon have it.",
    "eps_root": "There is `eps` alone.",
    "mu_dtype": "Accumulators are integers on a grid: leave it out.",
    "accumulator_dtype": "Accumulators are integers on a grid: leave it out.",
    "max_norm": "hg.clip_by_global_norm(rule, max_norm) goes around any rule.",
}


def check_keywords(rule: type, given: Iterable[str]) -> None:
    """TypeError, with what was meant, for those that neither a field nor the rule's own `__init__` takes."""
    unknown = [name for name in given if name not in {field.name for field in dataclasses.fields(rule)}]
    if not unknown:
        return
    parameters = inspect.signature(rule).parameters
    taken = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or all(name in taken for name in unknown):
        return
    name = next(name for name in unknown if name not in taken)
    meant = _CALLED.get(name) or next(iter(difflib.get_close_matches(name, taken, 1)), None)
    cure = f"Did you mean `{meant}`?" if meant in taken else _MADE_BY.get(name, "")
    raise TypeError(f"{rule.__name__} has no {name!r}; it takes {', '.join(taken)}. {cure}".rstrip())
