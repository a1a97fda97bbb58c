"""Prints of a training run by which a record knows its own: of its arrays, of what it computes, and of the machine.

Invariant: a run that computes something else, or of other numbers, has another print.
"""

import dataclasses
import hashlib
import os
import pathlib
import platform
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal
from jax.sharding import AbstractMesh

from hypergrad._program_keys import closed_in, equations
from hypergrad._settings import own_settings
from hypergrad.run.forward import steps_of, train_step
from hypergrad.run.per_step import split
from hypergrad.run.plan import schedules
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import nothing_kept
from hypergrad.run.step import initial_state


_MACHINE = ("jax", "processor", "flags")
PRINTED = {
    "steps": "the numbers of `steps`",
    "params": "`params`, `state` or `statistics`, or which small leaves are divided over devices,",
    "optimizer": "the hyperparameters of `optimizer`",
    "theta": "the values of `theta`",
    "data": "the arrays of `batches` or of `loss`",
    "program": "what `loss`, `batches` or `optimizer` compute",
}
_ALONE = {"batches": "what `batches` compute, or their arrays,"}


def compare(folder: pathlib.Path, there: dict[str, str], here: dict[str, str]) -> None:
    """Raise where the record in the folder is of another run; warn where it was made elsewhere."""
    elsewhere = [name for name in _MACHINE if there[name] != here[name]]
    kind = lambda prints: (prints["jax"], prints["processor"].partition(",")[0])  # noqa: E731
    traced_alike = kind(there) == kind(here)
    if elsewhere:
        said = ", ".join(f"{name} {there[name]!r}, now {here[name]!r}" for name in elsewhere)
        unknown = (
            " Whether `loss`, `batches` and `optimizer` compute the same cannot be told: what was trained is given as it "
            "was recorded."
        )
        warnings.warn(
            f"the record in {folder} was made elsewhere: {said}. Sums may be rounded otherwise here. Each segment that is "
            "gone back over is checked; one that differs is an error."
            + unknown
            * (there["program"] != here["program"] and not traced_alike),
            stacklevel=4,
        )
    for name, what in PRINTED.items():
        if there[name] != here[name] and (name != "program" or traced_alike):
            raise ValueError(
                f"the record in {folder} is of another run: {what} differ. Open it with the arguments that it was made "
                "with, under the same jax_enable_x64, or record in another folder."
            )


def reject_changes(folder: pathlib.Path, there: dict[str, str], here: dict[str, str], same_floats: bool) -> None:
    """Raise where what an open record is of computes something else than when it was opened."""
    changed = [what for name, what in (PRINTED | _ALONE).items() if name in here and here[name] != there[name]]
    if changed:
        other = "a global, an attribute or an array that they read" if same_floats else "jax_enable_x64"
        raise ValueError(
            f"{', '.join(changed)} of the record in {folder} have changed since it was opened: {other}. Set it back, or "
            "record the new run in another folder."
        )


def prints_of(run: Run, inputs: Inputs) -> dict[str, str]:
    """What makes a run what it is: {name: text}."""
    arrays = {"params": inputs.values, "optimizer": inputs.h, "theta": inputs.theta, "data": inputs.frozen}
    return {
        "steps": str(run.steps),
        **{name: _digest(tree) for name, tree in arrays.items()},
        "program": _program(run, inputs),
        "jax": jax.__version__,
        "processor": f"{jax.devices()[0].device_kind}, {platform.machine()}, {_processor()}",
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def print_of_batches(batches: Any) -> dict[str, str]:
    """What makes them what they are, without the loss that sees them."""
    program = jax.make_jaxpr(lambda t: batches(t))(jax.ShapeDtypeStruct((), np.int32))  # JAX knows `batches` as it was
    return {"batches": print_of_program(program.jaxpr, program.consts)}


def _digest(tree: Any) -> str:
    found = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        array = np.asarray(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def _program(run: Run, inputs: Inputs) -> str:
    """A print of one step of training: the same for any number of devices that microbatches are on."""
    inner = dataclasses.replace(run, store=None, microbatches=run.microbatches and run.microbatches.alone())

    def one(inputs: Inputs) -> Any:
        plan = schedules(inner, inputs.h)
        state = initial_state(inner, inputs.values, nothing_kept(inner))
        xs = steps_of(inner, inputs, [s.entries for s in plan])
        constant, _ = split(inner, inputs.h)
        theta, _ = inner.functions.theta.parted(inputs.theta)
        consts = constant, theta, inputs.frozen
        return train_step(inner, inner.gradient, consts, state, jax.tree.map(lambda x: x[0], xs))[0]

    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))  # noqa: E731
    with own_settings(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # whatever mesh is in force
        program = jax.make_jaxpr(one)(jax.tree.map(like, inputs))
        _reject_python(program.jaxpr)
        return print_of_program(program.jaxpr, program.consts)


def print_of_program(program: Jaxpr, constants: Any) -> str:
    """Of all that it computes, with the arrays that it and the programs inside of it close over: the same in any process.

    Of Python that it calls it has the name alone.
    """
    lines = [_digest(constants), *_lines(program)]
    draws = any(e.primitive.name == "random_bits" for e in equations(program))
    partitionable: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if draws and not partitionable:  # other draws by the same program
        lines.append("jax_threefry_partitionable=False")
    text = "\n".join(lines)
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()  # without addresses of functions


_PYTHON = {"pure_callback": "jax.pure_callback", "io_callback": "jax.experimental.io_callback"}


def _reject_python(program: Jaxpr) -> None:
    """Python that a program calls may compute something else when the record is opened, and the program does not show it.
    Prints of `jax.debug` compute nothing, `equinox.error_if` raises or leaves its argument as it is, and how a training
    inside of a loss went is a primitive of the library."""
    for e in equations(program):
        called = getattr(e.params.get("callback"), "callback_func", None)
        if e.primitive.name in _PYTHON and getattr(called, "__module__", None) != "equinox._errors":
            name = getattr(called, "__qualname__", "a function")
            raise ValueError(
                "hg.record needs `loss`, `batches` and `optimizer` that JAX computes by itself; got a call of "
                f"{name} by {_PYTHON[e.primitive.name]}. A record cannot tell whether that is the same when it is "
                "opened: write it in JAX, or have what it computes as data."
            )


def _lines(program: Jaxpr) -> Iterator[str]:
    """A program, those inside of it where they are used. JAX writes one that several places share once; which these are
    depends on what the process has traced before."""
    number: dict[Any, int] = {}
    placed: dict[Any, Any] = {}  # what a mesh in force has put elsewhere: the same numbers

    def one(x: Any) -> str:
        x = x if isinstance(x, Literal) else placed.get(x, x)
        return repr(x) if isinstance(x, Literal) else f"{number.setdefault(x, len(number))}:{x.aval}"

    def named(xs: Any) -> str:
        return " ".join(map(one, xs))

    yield f"({named((*program.constvars, *program.invars))})"
    for e in program.eqns:
        if e.primitive.name == "reshard":
            placed[e.outvars[0]] = e.invars[0] if isinstance(e.invars[0], Literal) else placed.get(e.invars[0], e.invars[0])
            continue
        yield f"{e.primitive} {named(e.invars)} -> {named(e.outvars)}"
        for name, value in sorted(e.params.items()):
            if name.endswith("sharding") or name == "ctx_mesh":
                continue  # where arrays lie, and the mesh in force
            inner = list(closed_in(value))
            yield f"{name} {'' if inner else value}"
            for called, consts in inner:
                yield _digest(consts)
                yield from _lines(called)
    yield f"({named(program.outvars)})"


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
