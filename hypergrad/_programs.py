"""Programs: functions as JAX traces them, and what is compiled of them, found again by what they compute.

Invariant: two calls share a program only if their keys are equal (hypergrad/_program_keys.py). Arrays that a function closes
over are no part of a program: they are its arguments, and nothing here keeps them; where some must be part of it, their
values are in its key.
"""

import collections
import contextvars
import functools
import hashlib
import pathlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from hypergrad._lifted import Tell, interpreted, lifted
from hypergrad._meshes import explicit_mesh
from hypergrad._program_keys import Key, key_of


KEPT = 128  # programs; the least recently used goes first
FEW = 16  # what a loop uses by turns: kept where the process has many maps of others, which we cannot give back


class Program:
    """What a function computes of arrays like those that it was traced with; equal to another that computes the same.

    jaxpr: what it computes; of a program that only serves as a key, there is none. out: `ShapeDtypeStruct`s of what the
    function returns.
    """

    __slots__ = ("_jaxpr", "key", "out")

    def __init__(self, jaxpr: Jaxpr | None, key: Key, out: Any) -> None:
        self._jaxpr, self.key, self.out = jaxpr, key, out

    @property
    def jaxpr(self) -> Jaxpr:
        assert self._jaxpr is not None, "a bare program is a key"
        return self._jaxpr

    def __call__(self, constants: list[Any], *args: Any) -> Any:
        """What it returns, of its own constants or of those of an equal program."""
        return jax.tree.unflatten(jax.tree.structure(self.out), self.flat(constants, jax.tree.leaves(args)))

    def flat(self, constants: list[Any], leaves: list[Any]) -> list[Any]:
        """The same of leaves and as leaves."""
        return jax.core.eval_jaxpr(self.jaxpr, constants, *leaves)

    def bare(self) -> "Program":
        """The key alone: what a program is found by must not keep what it was traced from."""
        return Program(None, self.key, self.out)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        trees: Any = jax.tree.structure(self.out), jax.tree.structure(other.out)
        return self.key == other.key and trees[0] == trees[1]


def trace(function: Callable[..., Any], *args: Any) -> tuple[Program, list[Any]]:
    """A function as a program, and the constants that it closes over: arrays of JAX or NumPy, some perhaps traced."""
    fresh = lambda *a: function(*a)  # noqa: E731  JAX would find the trace of an old one again
    closed, out = jax.make_jaxpr(fresh, return_shape=True)(*args)
    if _holds_constants(closed.jaxpr):
        leaves = jax.tree.leaves(args)
        closed = jax.make_jaxpr(lambda *leaves: _without_calls(closed.jaxpr, closed.consts, leaves))(*leaves)
    jaxpr = closing_over(closed.jaxpr, closed.jaxpr.constvars, closed.jaxpr.invars)
    return Program(jaxpr, key_of(jaxpr), out), closed.consts


def closing_over(jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Any]) -> Jaxpr:
    """The same program of these variables, without the values of what it closes over: from JAX 0.12 on it would hold them,
    and tells constants from inputs by how many values there are."""
    values: dict[str, Any] = {"consts": [None] * len(constants)} if hasattr(jaxpr, "consts") else {}
    return jaxpr.replace(constvars=list(constants), invars=list(inputs), **values)


def _holds_constants(jaxpr: Jaxpr) -> bool:
    """Whether a `jax.jit` in the program closes over arrays, which would be part of it."""
    calls = (e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "jit")
    return any(called.consts or _holds_constants(called.jaxpr) for called in calls)


def _without_calls(jaxpr: Jaxpr, constants: list[Any], leaves: Any) -> list[Any]:
    """The program's results, computed without such calls: their constants become those of whoever traces this."""

    def inlined(e: Any, arrays: list[Any]) -> list[Any] | None:
        inner: Any = e.params.get("jaxpr")
        if e.primitive.name == "jit" and (inner.consts or _holds_constants(inner.jaxpr)):
            return _without_calls(inner.jaxpr, inner.consts, arrays)
        return None

    return interpreted(jaxpr, constants, leaves, inlined)


def owned(x: Any) -> Any:
    """An array of JAX's: a copy of what somebody may yet change."""
    return x if isinstance(x, (jax.Array, jax.core.Tracer)) else jnp.array(x, copy=True)


_PROGRAMS: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
_LOCK = threading.RLock()  # a derivative rule, traced while its loss is compiled, may train


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` made at the first call with this key, and these settings of JAX, which enter what it compiles."""
    config: Any = jax.config
    tried = config.read("jax_disable_most_optimizations")
    key = key, (tried, config.jax_default_matmul_precision, config.jax_threefry_partitionable)
    if _USED.get() is not None:
        _USED.get().append(key)
    with _LOCK:
        if key not in _PROGRAMS:
            _PROGRAMS[key] = make()
            while len(_PROGRAMS) > _room():
                _PROGRAMS.popitem(last=False)
        _PROGRAMS.move_to_end(key)
        return _PROGRAMS[key]


_USED: contextvars.ContextVar[Any] = contextvars.ContextVar("used", default=None)


def forgettable(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """(function(), what lets go of all programs that it found)."""
    used: list[Hashable] = []
    token = _USED.set(used)
    try:
        result = function()
    finally:
        _USED.reset(token)

    def forget() -> None:
        with _LOCK:
            for key in used:
                _PROGRAMS.pop(key, None)

    return result, forget


# Of the memory maps that Linux allows a process. Every kernel takes three, and LLVM ends the process where there are no
# more.
MAPPED = 0.4
DANGER = 0.8


def _room() -> int:
    """How many programs may stay."""
    share = mapped()
    return KEPT if share <= MAPPED else FEW if share <= DANGER else 1


def mapped() -> float:
    """The share of its memory maps that this process has; 0 where that is not known."""
    try:
        limit = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
        return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n") / limit
    except (OSError, ValueError):
        return 0.0


def compiled(function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Any:
    """`jax.jit` of an outermost function."""
    return jax.jit(function, donate_argnums=donate, compiler_options=compiler_options())


def call(function: Callable[..., Any], statics: tuple[Any, ...], *args: Any) -> Any:
    """function(*statics, *args), compiled once for equal statics and for arrays alike."""
    make = lambda: compiled(functools.partial(function, *statics)).lower(*args).compile()  # noqa: E731
    return kept((function, *map(bare, statics), *alike(args)), make)(*args)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) as a program of its own, for arguments of which no array is traced."""
    arrays, rest = eqx.partition(args, eqx.is_array)
    return ahead(lambda *a: function(*eqx.combine(a, rest)), *arrays)(*arrays)


def ahead(
    function: Callable[..., Any],
    *args: Any,
    traced: Callable[[Program, list[Any]], Any] = lambda program, constants: None,
    device: Any = None,
) -> Callable[..., Any]:
    """function, compiled now for arguments like these: what it returns depends on no setting of the thread that calls it.

    traced: called between the trace and the compilation with the program and the arrays that it closes over; its error
    prevents the latter. device: where it runs, with copies of all that it is given; None: where its arguments lie.
    """
    program, constants = trace(function, *args)
    traced(program, constants)
    inside = _inside(constants)
    place = lambda leaves: leaves if device is None else jax.device_put(leaves, device)  # noqa: E731
    leaves = place(jax.tree.leaves(args))
    given = place([owned(x) for x, fixed in zip(constants, inside, strict=True) if fixed is None])

    def flat(given: list[Any], leaves: list[Any]) -> list[Any]:
        rest = iter(given)
        return program.flat([next(rest) if fixed is None else fixed for fixed in inside], leaves)

    make = lambda: compiled(flat).lower(given, leaves).compile()  # noqa: E731
    values = [None if fixed is None else _digest(fixed) for fixed in inside]
    run = kept((program.bare(), *values, *alike((given, leaves))), make)
    return lambda *args: jax.tree.unflatten(jax.tree.structure(program.out), run(given, place(jax.tree.leaves(args))))


def _inside(constants: list[Any]) -> list[Any]:
    """Those whose values must be part of the program, the others None.

    With a mesh of explicit axes in force an argument has these in its type; what a function closes over that is on no mesh
    has none, wherever it is read.
    """
    if explicit_mesh() is None:
        return [None] * len(constants)
    return [x if jax.typeof(x).sharding.mesh.empty else None for x in constants]


def _digest(x: Any) -> bytes:
    numbers = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return hashlib.sha256(np.asarray(numbers).tobytes()).digest()


def reporting(
    function: Callable[..., Any], well: Callable[[Any], Any], *args: Any, **options: Any
) -> Callable[..., tuple[Any, list[tuple[Tell, Any]]]]:
    """As `ahead`, of a function with reports: the program returns (its result, what `told` takes)."""
    tells: list[Tell] = []
    run = ahead(lifted(function, tells, well), *args, **options)

    def with_reports(*args: Any) -> tuple[Any, list[tuple[Tell, Any]]]:
        result, arrays = run(*args)
        return result, list(zip(tells, arrays, strict=True))

    return with_reports


def told(reports: list[tuple[Tell, Any]]) -> None:
    """Make the reports of a program that has run."""
    for tell, arrays in reports:
        tell(*arrays)


def bare(value: Any) -> Any:
    """Of a value with a method of this name what it gives: an equal one that keeps nothing that programs are traced from."""
    return value.bare() if hasattr(value, "bare") else value


def alike(args: Any) -> tuple[Any, ...]:
    """What a compiled program asks of its arguments: their tree, types and places."""
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((jax.typeof(x), x.sharding if getattr(x, "committed", False) else None) for x in leaves)


# CPU: all lanes of the processor, and no option that decides which copies are made. With
# `xla_cpu_copy_insertion_use_region_analysis` XLA overwrites what a scan still reads where a loss sets a row by index, and
# the plain gradient is wrong. GPU: what is scattered is added in one order, so that an embedding's gradient has its bits
# twice.
_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_prefer_vector_width": 512},
    "gpu": {"xla_gpu_exclude_nondeterministic_ops": True},
}


@functools.cache
def compiler_options() -> dict[str, Any] | None:
    """How `hg.optimize` has XLA compile, for an outermost `jax.jit` of your own: jax.jit(f, compiler_options=this).

    On CPUs: vectors are as wide as the processor's. On GPUs: no sum of which the order changes from run to run. None
    elsewhere, or where XLA does not know the option. JAX takes none for a jit inside of another.
    """
    if (options := _OPTIONS.get(jax.default_backend())) is None:
        return None
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:  # another version of XLA may not know them
        return None
    return dict(options)
