"""Trees of arrays as npz, and back out of bytes that nobody vouches for.

Invariant: `unpacked(packed(trees), trees)` is `trees`, to the last bit, on the devices of `trees`. No pickle is read and
nothing inflated: what is read takes no more memory than it has bytes.
"""

import io
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hypergrad._processes import whole
from hypergrad._safe_files import Damaged


_HEADERS = 1024  # bytes: more than npz adds to an array, and to the whole


def packed(trees: dict[str, Any]) -> bytes:
    """{name: tree} as an npz of name_0, name_1, ...: the leaves in order, not compressed. What is divided among processes
    is gathered: all of them call this."""
    file = io.BytesIO()
    np.savez(file, **dict(_named(trees, _packed)))  # type: ignore[arg-type]
    return file.getvalue()


def unpacked(content: bytes, like: dict[str, Any]) -> dict[str, Any]:
    """The inverse, for trees such as `like`."""
    expected = _named(like, _form)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if archive.namelist() != [f"{name}.npy" for name, _ in expected]:
                raise Damaged("holds other arrays")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise Damaged("is compressed, which hypergrad does not do")
            loaded = iter([_read(archive.read(f"{name}.npy"), name, array) for name, array in expected])
    except Damaged:
        raise
    except Exception as error:  # whatever the parsers of zip and npy make of bytes that are neither
        raise Damaged(f"is no npz of these arrays ({type(error).__name__}: {error})") from error
    return {name: jax.tree.map(lambda leaf: _unpacked(next(loaded), leaf), tree) for name, tree in like.items()}


def largest(like: dict[str, Any]) -> int:
    """Bytes that `packed` of trees such as `like` cannot exceed."""
    return _HEADERS + sum(_HEADERS + 8 * array.ndim + array.nbytes for _, array in _named(like, _form))


def _named(trees: dict[str, Any], form: Callable[[Any], np.ndarray]) -> list[tuple[str, np.ndarray]]:
    return [(f"{name}_{i}", form(x)) for name, tree in trees.items() for i, x in enumerate(jax.tree.leaves(tree))]


def _read(content: bytes, name: str, like: np.ndarray) -> np.ndarray:
    """An npy file of the shape and type of `like`."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(file)
    if (shape, dtype) != (like.shape, like.dtype):
        raise Damaged(f"holds {dtype}{list(shape)} in place of {like.dtype}{list(like.shape)} as {name}")
    order: Any = "F" if fortran else "C"
    return np.frombuffer(content[file.tell() :], dtype).reshape(shape, order=order).copy()


def _packed(leaf: Any) -> np.ndarray:
    """As bytes that npz knows: keys as their data, bfloat16 and its kin as integers of their size."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return _known(whole(leaf))


def _form(leaf: Any) -> np.ndarray:
    """An array of the shape and type of `_packed(leaf)`, which takes no memory."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    elif not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
    return np.broadcast_to(_known(np.zeros((), leaf.dtype)), leaf.shape)


def _known(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _unpacked(array: np.ndarray, like: Any) -> Any:
    """The inverse of `_packed`, for a leaf such as `like`."""
    if _is_key(like):
        return jax.random.wrap_key_data(jax.device_put(array), impl=jax.random.key_impl(like))
    dtype = jnp.asarray(like).dtype
    array = array.view(dtype) if dtype.kind == "V" else array
    if isinstance(like, jax.Array) and len(like.sharding.device_set) > 1:
        return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
    return jax.device_put(array)  # `jnp.asarray` compiles something for it


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
