"""Where the entries of a parameter stand in its layer, and whether its uses are one weight at several positions.

Invariant: only what is `factored` has Kronecker factors; all else has a diagonal, in the order of its own entries.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hypergrad.curvature._uses import Found, Use


_DIGIT = 128  # below that, integers are exact in what a layer of one's own may make of them


def factored(found: Found, leaf: int) -> bool:
    """Whether all uses are by one kind of layer, each of the whole leaf and laid out alike: further positions of a weight. A
    slice of it is none, as a scan over stacked layers has them, nor is its transpose, nor what repeats its entries."""
    uses = found.of(leaf)
    if leaf in found.general or leaf in found.shifts or not uses:
        return False
    if any(use.layer is None or use.layer.adds or use.layer is not uses[0].layer for use in uses):
        return False
    if any(use.sums for use in uses):
        return False
    first = order_of(found, uses[0])
    if first.size != found.flat.weights[leaf].aval.size:
        return False
    return all(np.array_equal(first, order_of(found, use)) for use in uses[1:])


def order_of(found: Found, use: Use) -> np.ndarray:
    """Which entry of the leaf stands where its layer has [groups, in, out]."""
    assert use.layer is not None
    e, like = found.flat.equations[use.index], found.flat.weights[use.leaf].aval
    order, digit = np.zeros((1, 1, 1), np.int64), 1
    while digit < like.size or digit == 1:
        entries = (np.arange(like.size) // digit % _DIGIT).reshape(like.shape)
        with jax.ensure_compile_time_eval():
            arranged = use.layer.arrange(e, use.place, use.view.places(jnp.asarray(entries, jnp.float32)))
        order, digit = order + digit * np.asarray(arranged).astype(np.int64), digit * _DIGIT
    return order
