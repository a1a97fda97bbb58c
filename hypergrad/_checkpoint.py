"""A meta-loop on disk: killed at any moment, it goes on from its last complete meta-step.

Invariant: `run.json` is only ever replaced whole, and after every file that it speaks of is on disk. A folder without it
holds nothing yet.

    run.json           what run this is, where it was made, one record per meta-step, and how many there are (n)
    hypers-<i>.npz     the learned hypers of meta-step i < n, unconstrained
    point-<n>.npz      hypers and meta-optimizer state that meta-step n starts from
"""

import contextlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hypergrad._descent import Point


RUN = "run.json"


class Folder:
    """What a run of `hg.optimize` keeps in a folder."""

    def __init__(self, path: str | os.PathLike[str], identity: dict[str, Any], update: str) -> None:
        # `update`, the digest of the meta-optimizer's program, is comparable between the same versions only.
        self.path, self.identity, self.update = pathlib.Path(path), identity, update
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"`checkpoint` must be a folder; {self.path} is a file.")
        self.path.mkdir(parents=True, exist_ok=True)
        self.run = self._read_run()

    @property
    def done(self) -> int:
        """Complete meta-steps."""
        return len(self.run["steps"])

    @property
    def elsewhere(self) -> str:
        """How the place that wrote this differs from here; "" if it does not."""
        there, here = self.run["environment"], environment()
        return ", ".join(f"{k} {there.get(k)} there and {v} here" for k, v in here.items() if there.get(k) != v)

    def save(self, hypers: Any, point: Point, records: dict[str, Any]) -> None:
        """Commit one more meta-step: its hypers, the point after it, and the records of all "steps" so far."""
        n = len(records["steps"])
        self._write(f"hypers-{n - 1:06d}.npz", _npz(hypers))
        self._write(f"point-{n:06d}.npz", _npz(point))
        here = {"identity": self.identity, "update": self.update, "environment": environment()}
        self.run = here | records
        self._write(RUN, json.dumps(self.run, indent=1).encode())  # the commit: all or nothing
        for old in self.path.glob("point-*.npz"):
            if old.name != f"point-{n:06d}.npz":
                old.unlink()

    def point(self, like: Point) -> Point:
        return self._load(f"point-{self.done:06d}.npz", like)

    def hypers(self, like: Any) -> list[Any]:
        return [self._load(f"hypers-{i:06d}.npz", like) for i in range(self.done)]

    def _read_run(self) -> dict[str, Any]:
        file = self.path / RUN
        if not file.exists():
            return {"steps": []}
        try:
            run = json.loads(file.read_text())
            theirs, versions = run["identity"], run["environment"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is not a record of hg.optimize. Pass another `checkpoint` folder, or remove this one."
            ) from error
        different = [_difference(k, theirs.get(k), v) for k, v in self.identity.items() if theirs.get(k) != v]
        comparable = all(versions.get(k) == environment()[k] for k in ("jax", "optax"))
        if comparable and run.get("update") != self.update:
            different.append("meta_optimizer updates differently (another rate, schedule or rule)")
        if different:
            raise ValueError(
                f"`checkpoint` {self.path} holds another run: {different[0]}. Pass another folder, or remove this one to "
                "start anew."
            )
        return run

    def _load(self, name: str, like: Any) -> Any:
        leaves, tree = jax.tree.flatten(like)
        try:
            with np.load(self.path / name, allow_pickle=False) as arrays:
                loaded = [arrays[f"arr_{i}"] for i in range(len(leaves))]
            return jax.tree.unflatten(tree, [_unpacked(x, leaf) for x, leaf in zip(loaded, leaves, strict=True)])
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise ValueError(
                f"{self.path / name} is missing or damaged ({error}). Restore it, or remove the folder to start anew."
            ) from error

    def _write(self, name: str, content: bytes) -> None:
        """The file appears whole or not at all, and survives a power cut."""
        temporary = self.path / f".{name}.part"
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)
        with contextlib.suppress(OSError):  # a folder cannot be opened everywhere
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def environment() -> dict[str, Any]:
    """What may change the bits of an evaluation, and need not."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")}
    device = jax.devices()[0]
    return {
        **versions,
        "python": platform.python_version(),
        "machine": platform.node(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": f"{device.platform} {device.device_kind}",
    }


def library_version() -> str:
    return importlib.metadata.version("hypergrad-jax")


def _npz(tree: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, *(_packed(x) for x in jax.tree.leaves(tree)))
    return file.getvalue()


def _packed(leaf: Any) -> np.ndarray:
    """As bytes that npz knows: keys as their data, bfloat16 and its kin as integers of their size."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _unpacked(array: np.ndarray, like: Any) -> Any:
    """The inverse of `_packed`, for a leaf such as `like`."""
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    dtype = jnp.asarray(like).dtype
    array = array.view(dtype) if dtype.kind == "V" else array
    if array.shape != jnp.shape(like) or array.dtype != dtype:
        raise ValueError(f"it holds {array.dtype}{list(array.shape)} in place of {dtype}{list(jnp.shape(like))}")
    return jnp.asarray(array)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


_PARTS = {"hypers": "hypers", "meta_optimizer": "another meta_optimizer: of its state, "}


def _difference(name: str, there: Any, here: Any) -> str:
    """Two entries of an identity that are not equal, in words."""
    if isinstance(here, dict) and isinstance(there, dict):
        key = next(k for k in sorted({*there, *here}) if there.get(k) != here.get(k))
        name, there, here = f"{_PARTS[name]}{key}", there.get(key), here.get(key)
    there, here = ("absent" if x is None else x for x in (there, here))
    return f"{name} is {there} there and {here} here"
