"""What hyperparameters are, in texts that folders and studies keep.

Invariant: the texts of two trees are the same if their leaves are alike, and what is fixed is the same.
"""

import hashlib
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from hypergrad._hyper_names import hyper_path
from hypergrad._processes import whole
from hypergrad.hypers import describe, is_domain
from hypergrad.schedules import is_knots, leaves_with_knots


def describe_hypers(hypers: Any) -> dict[str, str]:
    """What each leaf is, by path: "float32[100] in positive", and for what is fixed its value or a digest of it."""
    found = {}
    for path, domain in jax.tree_util.tree_leaves_with_path(hypers, is_leaf=lambda x: is_domain(x) or is_knots(x)):
        for inner, x, made in leaves_with_knots(domain):
            kind = f"{domain.kind} {domain.low:.6g}..{domain.high:.6g}" if is_domain(domain) else "the real line"
            fixed_ = is_domain(domain) and domain.kind == "fixed"
            of = f"fixed at {_digest(x)}" if fixed_ else kind.removesuffix(" -inf..inf")
            found[hyper_path((*path, *inner))] = f"{describe(x)} in {of}{made}"
    return found


def _digest(x: Any) -> str:
    if not eqx.is_array_like(x):  # a function by its name: another process knows nothing else of it
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(x))
        return getattr(x, "__qualname__", None) or f"{type(x).__name__} {_sha(text.encode())}"
    numbers = jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x
    return _sha(whole(numbers).tobytes()) if jnp.ndim(x) else str(x)


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def describe_arrays(tree: Any) -> dict[str, str]:
    """`{path: "float32[3]"}` of every leaf."""
    return {jax.tree_util.keystr(path): describe(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
