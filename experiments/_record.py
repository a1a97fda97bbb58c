"""One small JSON record per experiment: configuration, versions, numbers."""

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
from typing import Any

import jax


_PACKAGES = ("hypergrad-jax", "jax", "jaxlib", "numpy", "optax", "gmpy2")


def write(folder: pathlib.Path, name: str, config: Any, numbers: dict[str, Any]) -> pathlib.Path:
    """Write folder/name.json and return its path."""
    record = {
        "experiment": name,
        "config": dataclasses.asdict(config),
        "versions": {p: importlib.metadata.version(p) for p in _PACKAGES} | {"python": platform.python_version()},
        "device": jax.devices()[0].device_kind,
        "numbers": numbers,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")
    return path
