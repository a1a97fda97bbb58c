"""Checkpoint folders to be damaged, of a small run that is fast because what is compiled is shared; and their damages."""

import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import hypergrad as hg
from experiments.benchmarks import damage
from hypergrad import _folder_owner
from hypergrad._meta_loop import MetaLoop
from hypergrad._safe_files import sealed


DONE, WANTED = damage.DONE, damage.WANTED
HYPERS = {"a": hg.positive(jnp.array([0.5, 2.0])), "b": jnp.zeros((), jnp.bfloat16)}


def train_fn(hypers: Any, key: Any) -> Any:
    return (hypers["a"] - 1 + 0.1 * jax.random.normal(key, 2)) ** 2 + (hypers["b"].astype(jnp.float32) - 1) ** 2


OPTIONS: dict[str, Any] = {"val_fn": jnp.sum, "monitor_fn": jnp.max, "meta_optimizer": optax.adam(0.1)}


@functools.cache
def loop(meta_steps: int) -> MetaLoop:
    """Compiled once for all folders."""
    return MetaLoop(train_fn, meta_steps=meta_steps, **OPTIONS)


def learn(folder: Any, meta_steps: int = WANTED, **options: Any) -> hg.Result:
    if options:
        return hg.optimize(
            hypers=HYPERS, meta_steps=meta_steps, checkpoint=folder, **{"train_fn": train_fn, **OPTIONS, **options}
        )
    return loop(meta_steps).run(HYPERS, folder)


def begun(folder: pathlib.Path) -> pathlib.Path:
    """A run that ended."""
    learn(folder, DONE)
    return folder


def killed(folder: pathlib.Path) -> pathlib.Path:
    """One that did not: with its claim, a part, and the hypers of a meta-step on its way."""
    begun(folder)
    claim = {"token": "0" * 16, **_folder_owner._this_process(), "started": "1"}
    (folder / f"owner-{'0' * 16}.json").write_bytes(sealed(claim))
    (folder / f".run.json.{'0' * 16}.part").write_bytes(b"{")
    shutil.copy(folder / f"hypers-{DONE - 1:06d}.npz", folder / f"hypers-{DONE:06d}.npz")
    return folder


def named(folder: pathlib.Path, pattern: str) -> pathlib.Path:
    return sorted(folder.glob(pattern))[-1]


def flip(path: pathlib.Path, place: int = 150) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)


def link(path: pathlib.Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to("elsewhere")


def pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def edit(folder: pathlib.Path, change: Callable[[Any], Any], seal: bool = True) -> None:
    record = json.loads((folder / "run.json").read_text())
    del record["sha256"]
    record = change(record) or record
    (folder / "run.json").write_bytes(sealed(record) if seal else json.dumps(record).encode())
