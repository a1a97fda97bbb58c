"""What a batch knows besides its mean gradient: BackPACK's ten quantities, of any loss that is a mean over examples."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _programs as programs
from hypergrad.curvature import _batch, _kronecker
from hypergrad.curvature._batch import Batch
from hypergrad.curvature._flat import flatten
from hypergrad.curvature._likelihoods import LIKELIHOODS, End, find_end
from hypergrad.curvature._means import check_mean
from hypergrad.curvature._passes import Example, Inputs, Passes, example
from hypergrad.curvature._uses import Found, find


FIRST = ("individual_gradients", "squared_norms", "second_moment", "variance", "empirical_fisher_diagonal")
EXACT, SAMPLED = ("ggn_diagonal", "kflr"), ("ggn_diagonal_mc", "kfac")
DECLARE = f"hg.curvature.likelihood(name, outputs, targets), with name one of {', '.join(LIKELIHOODS)}"
NAMES = (*FIRST, *EXACT, *SAMPLED, "hessian_diagonal", "kfra")


def quantities(
    loss: Callable[..., Any],
    params: Any,
    theta: Any,
    batch: Any,
    which: str | Sequence[str],
    *,
    key: Array | None = None,
    samples: int = 1,
    sharing: str = "expand",
) -> dict[str, Any]:
    """Statistics and curvature of a batch, in one forward pass and as few backward passes as they need.

    With l_n the loss of example n alone, N examples, g = (1/N) sum_n grad l_n, J_n the Jacobian of the model's outputs and
    H_n the Hessian of l_n in them, each is a dict entry with a pytree like `params`:

    - `individual_gradients`: grad l_n / N, with a leading axis of examples; they sum to g.
    - `squared_norms`: |grad l_n / N|^2 of each parameter leaf, [N].
    - `second_moment`, `empirical_fisher_diagonal`: mean_n (grad l_n)^2; `variance`: that less g^2.
    - `ggn_diagonal`: the diagonal of mean_n J_n' H_n J_n; `ggn_diagonal_mc`: of the same with H_n from `samples` labels that
      the model draws by `key`.
    - `hessian_diagonal`: the diagonal of the Hessian of the whole loss.
    - `kfac`, `kflr`, `kfra`: leaves are `Kronecker(a, b)`: a the second moment of the layer's inputs; b of derivatives in
      its outputs by drawn labels, by the exact H_n, or by averages that are passed from layer to layer. A weight that is
      used once a position (a convolution, a dense layer over a sequence) has a = mean over examples and positions, b = mean
      over examples, sum over positions (`sharing="expand"`), or positions averaged in a and summed in b before they are
      squared (`"reduce"`). What has no factors (a scale) has its `Diagonal`.

    loss(params, theta, batch) -> scalar must be a mean over the examples, the leading axis of each leaf of `batch`; that is
    tested, by its values and its slopes in params and theta, where these are concrete. Layers, biases, scales and embeddings
    are found in it (`hg.curvature.layers` lists them); weights used otherwise are differentiated one example at a time.

    Source: Dangel, Kunstner, Hennig, "BackPACK: Packing more into backprop", Table 1, whose scales these are.
    """
    names = _named(which, key, samples, sharing)
    found, end, constants = analysed(loss, params, theta, batch)
    _possible(end, names)
    check_mean(loss, params, theta, batch, constants)
    leaves = Inputs(constants, *(jax.tree.leaves(x) for x in (params, theta, batch)))
    leaves = Inputs(*(list(map(programs.owned, x)) for x in leaves))
    options = names, samples, sharing
    mark = end and (end.kind and end.kind.name, end.outputs, end.values)
    by = "curvature", found.flat.program.bare(), found.key, mark, options
    compute = programs.kept(by, lambda: jax.jit(functools.partial(_quantities, found, end, *options)))
    results = compute(leaves, key)
    tree = jax.tree.structure(params)
    return {name: jax.tree.unflatten(tree, results[name]) for name in names}


def analysed(loss: Callable[..., Any], params: Any, theta: Any, batch: Any) -> tuple[Found, End | None, list[Any]]:
    """The layers of a loss, where its model ends, and the arrays that it closes over."""
    flat, constants = flatten(loss, params, theta, batch)
    found = find(flat)
    return found, find_end(found), constants


def _named(which: Any, key: Any, samples: int, sharing: str) -> tuple[str, ...]:
    names = (which,) if isinstance(which, str) else tuple(which)
    for name in names:
        if name not in NAMES:
            raise ValueError(f"`which` has {name!r}, which is none of the quantities: {', '.join(NAMES)}.")
    if key is None and (drawn := [name for name in names if name in SAMPLED]):
        raise ValueError(f"{drawn[0]!r} draws labels of the model: give it a `key`, as jax.random.key(0).")
    check_key(key)
    if sharing not in ("expand", "reduce"):
        raise ValueError(f"`sharing` must be 'expand' or 'reduce'; got {sharing!r}.")
    if samples < 1:
        raise ValueError(f"`samples` must be at least 1; got {samples}.")
    return names


def check_key(key: Any) -> None:
    """An error unless it is a key, of the new kind or of the old, or none."""
    if key is None:
        return
    array = isinstance(key, (jax.Array, np.ndarray))
    if array and ((_is_typed(key) and not key.ndim) or (key.dtype == jnp.uint32 and key.ndim == 1)):
        return
    given = f"{key.dtype} of shape {key.shape}" if array else repr(key)
    raise TypeError(f"`key` must be one key of JAX, as jax.random.key(0); got {given}.")


def _is_typed(key: Any) -> bool:
    return bool(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))


def needs_end(name: str, end: End | None) -> None:
    if end is None:
        raise ValueError(
            f"{name!r} needs to know where the model ends, and `loss` has no layer and no likelihood that are "
            "known, or adds losses of several outputs. Declare its outputs: "
            f"{DECLARE}; of a sum of losses, take the curvature of each apart and add."
        )


def _possible(end: End | None, names: tuple[str, ...]) -> None:
    for name in names:
        if name in (*EXACT, *SAMPLED, "kfra"):
            needs_end(name, end)
    drawn = [name for name in names if name in SAMPLED]
    if drawn and end is not None and end.kind is None:
        raise ValueError(
            f"{drawn[0]!r} draws labels of the model, and `loss` does not end in a likelihood that is known, once. Take "
            f"{DECLARE}, or an exact quantity: {', '.join(EXACT)}."
        )


def _quantities(found: Found, end: End | None, names: Any, samples: int, sharing: str, given: Inputs, key: Any) -> Any:
    batch = gathered(found, end, set(names), samples, sharing, given, key)
    return {name: COMPUTE[name](batch) for name in names}


def gathered(found: Found, end: End | None, asked: set[str], samples: int, sharing: str, given: Inputs, key: Any) -> Batch:
    """What stands at the layers of every example, as far as these quantities need it."""
    passes = Passes(found, end if asked & {*EXACT, *SAMPLED, "kfra"} else None, tuple(found.general))
    count = given.batch[0].shape[0]
    single = [x[:, None] for x in given.batch]
    keys = None if key is None else jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))
    first, exact = bool(asked & set(FIRST)), bool(asked & set(EXACT))
    draws = samples if asked & set(SAMPLED) else 0

    def one(batch: list[Array], key: Any) -> Example:
        return example(passes, given._replace(batch=batch), key, first=first, exact=exact, samples=draws)

    examples = jax.vmap(one)(single, keys)
    return Batch(passes, given._replace(batch=single), examples, count, sharing)


COMPUTE: dict[str, Callable[[Batch], Any]] = {
    "individual_gradients": _batch.individual_gradients,
    "squared_norms": _batch.squared_norms,
    "second_moment": _batch.second_moment,
    "empirical_fisher_diagonal": _batch.second_moment,
    "variance": _batch.variance,
    "ggn_diagonal": functools.partial(_batch.ggn_diagonal, sampled=False),
    "ggn_diagonal_mc": functools.partial(_batch.ggn_diagonal, sampled=True),
    "hessian_diagonal": _batch.hessian_diagonal,
    "kfac": functools.partial(_kronecker.factors, sampled=True),
    "kflr": functools.partial(_kronecker.factors, sampled=False),
    "kfra": _kronecker.kfra,
}
