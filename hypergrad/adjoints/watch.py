"""What is seen of the steps of a reverse pass by those who diagnose it: norms of cotangents, or prints of states.

Invariant: what is seen enters nothing that is computed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad._report import ENTERED
from hypergrad.optimizers.block import Floats
from hypergrad.optimizers.chain import PARAMS
from hypergrad.run.fingerprints import state_prints
from hypergrad.run.spec import Run
from hypergrad.run.step import State


def watch(run: Run, state: State, dz: list[Floats], entered: list[Array], asymmetry: Array | None) -> dict[str, Any]:
    """What `Run.watch` asks for of one step. state, dz: before it; entered: cotangents of the parameters that its own loss
    and metrics have brought; asymmetry: of the gradient's Jacobian."""
    if not run.watch:
        return {}
    if run.watch == "states":
        return {"states": state_prints(run, state), "asymmetry": asymmetry}
    return {"norms": _norms(run, dz), "entered": _norm(entered) if entered else None, "asymmetry": asymmetry}


def with_end(run: Run, watched: dict[str, Any], dz: list[Floats]) -> dict[str, Any]:
    """What was seen of all steps, with the cotangents dz after the last: norms are float64 [steps + 1]. What has entered is
    added up, from the end on."""
    if "norms" not in watched:
        return watched
    last, entered = _norms(run, dz), watched["entered"]
    norms = jax.tree.map(lambda before, last: jnp.append(before, last), watched["norms"], last)
    if entered is not None:
        norms[ENTERED] = jax.lax.cumsum(jnp.append(entered, last[PARAMS]), reverse=True)
    return {"norms": norms, "asymmetry": watched["asymmetry"]}


def _norms(run: Run, dz: list[Floats]) -> dict[str, Array]:
    """Of each link, over all blocks."""
    found: dict[str, list[Array]] = {}
    for j in run.parameters:
        for name, x in dz[j].items() if run.watch != "growth" else ((PARAMS, dz[j][PARAMS]),):
            found.setdefault(name, []).append(x)
    return {name: _norm(row) for name, row in found.items()}


def _norm(arrays: list[Array]) -> Array:
    """In float64: the square of an exploding float32 would overflow long before it does."""
    return jnp.sqrt(sum((jnp.sum(x.astype(jnp.float64) ** 2) for x in arrays), jnp.float64(0)))
