"""What links see beside the gradient, at the door: of the tree of the parameters, in the shapes that the links hold."""

from typing import Any

import jax
from jax import Array

from hypergrad._door import outlined, shaped
from hypergrad.optimizers.block import Block
from hypergrad.optimizers.chain import Link, check_real


def check_signal(name: str, given: Any, tree: Any) -> list[Array]:
    """What a function of an optimizer's signals gave, leaf by leaf."""
    if jax.tree.structure(given) != tree:
        raise ValueError(f"the signal {name!r} of the optimizer must be a pytree like `params`; got {outlined(given)}.")
    leaves = jax.tree.leaves(given)
    for x in leaves:
        check_real(f"the signal {name!r} of the optimizer", x)
    return leaves


def check_shapes_of_signals(
    signals: dict[str, list[Any]], blocks: tuple[Block, ...], values: list[Any], params: Any
) -> None:
    """signals: {name: [of each leaf]}; values: of the links of each block."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for block, own in zip(blocks, values, strict=True):
        for link in block.chain:
            for i, shape in zip(block.leaves, block.shapes, strict=True) if block.of_parameters else ():
                expected = shape if own[link.name].shape == block.shape else own[link.name].shape
                found = signals[link.signal][i] if link.signal in signals else None
                if found is not None and found.shape != expected:
                    _reject_signal(link, f"params{jax.tree_util.keystr(leaves[i][0])}", expected, found)


def _reject_signal(link: Link, where: str, expected: tuple[int, ...], found: Any) -> None:
    if not found.size:
        raise ValueError(
            f"the signal {link.signal!r} of the optimizer has nothing for {where}. Give that leaf another rule by "
            "hg.partition; for curvature, hg.curvature.layers(loss, params, theta, batch) lists what was found."
        )
    raise ValueError(
        f"the signal {link.signal!r} of the optimizer must have, for each leaf of `params`, the shape of what link "
        f"`{link.name}` holds: for {where} that is {list(expected)}; got {shaped(found)}."
    )
