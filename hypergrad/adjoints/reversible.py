"""`Reversible`: the derivative of training from its reversal. The only custom VJP of the library."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from hypergrad._integers import as_int
from hypergrad._report import logarithms, mask, probing, surface, trace, watched
from hypergrad._settings import own_settings
from hypergrad.adjoints.backward import Pushed
from hypergrad.adjoints.base import Adjoint, Cost
from hypergrad.adjoints.budget import bytes_of, cut
from hypergrad.adjoints.capacity import Given, capacities, given, in_full_words
from hypergrad.adjoints.passes import Back, Ends, Wanted, run_backward, run_forward, settled_driver
from hypergrad.errors import BATCHES, LOSSES, OK, REVERSAL, Status
from hypergrad.optimizers.chain import PARAMS
from hypergrad.optimizers.expand import concrete, first_true
from hypergrad.run.disk import Disk
from hypergrad.run.forward import Seen
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Capacity, Outcome, places_of
from hypergrad.run.stores import Host, Store


@dataclasses.dataclass(frozen=True)
class Reversible(Adjoint):
    """Reverse the run bit for bit and recompute what the derivative needs (thesis, Algorithms 6 and 7).

    Memory: 8 bytes per link and parameter (16 for a mean of squares), log2(1/decay) bits per step (and 6 bytes where each
    weight has its own decay), and one step's activations. First derivatives only: for second ones take `Unrolled`.

    capacity: 32-bit words per parameter for the lost digits of each link, or of links by name, {"mean": 4}; None: as many as
    decays need that are known when the program is built, or as the lower end of `hg.bounded` would need, else one bit a
    step, a quarter for means of squares; `hg.optimize` asks first where that is much. fraction_bits: of the parameters'
    grid; None: 52 for float64 (range +-1024), 48 for float32 (range +-16384). driver: "scan" (compiled whole) or "host"
    (a Python loop over one jitted step; not under jit or vmap); None: the host for `hg.host_batches`, and outside of jit
    and vmap for losses with convolutions on a CPU of several cores, else the scan. buffer: "device"; "host", or
    `hg.Disk(folder)`: the digits of each 256 steps go to host memory, or to files (these not under jit or vmap), while
    the next are on, so that they take no memory of the device; "gmpy2": one arbitrary-precision integer per parameter,
    the slow reference, on the host (nor that). isolate: compute each gradient once more on the way back, compiled apart
    from its derivative, so that its bits are the same in both passes; None: where needed, which is for rules that are
    not linear in the gradient, under `jax.vmap`, and on a GPU. progress: with driver="host", called now and then with
    ("forward" or "reverse", steps done, steps), as `hg.callbacks.Steps()` is. memory_budget: for lost digits, and for
    states where it does not hold them all: bytes of one device (under jit, where nobody knows how arrays are divided, of
    all), or a string such as "512MiB". The run is then cut into segments, the state before each kept, 8 bytes a link and
    parameter; on the way back each is trained once more with its digits, compared with where the next one began, and
    reversed. None: digits of all steps are kept.
    """

    capacity: int | Mapping[str, int] | Given = None
    fraction_bits: int | None = None
    driver: str | None = None
    buffer: str | Disk = "device"
    isolate: bool | None = None
    progress: Callable[[str, int, int], Any] | None = None
    memory_budget: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.buffer, Disk) and self.buffer not in ("device", "host", "gmpy2"):
            raise ValueError(f'`buffer` must be "device", "host", hg.Disk(folder) or "gmpy2"; got {self.buffer!r}.')
        if self.driver not in (None, "scan", "host"):
            raise ValueError(f'`driver` must be "scan", "host" or None; got {self.driver!r}.')
        if self.buffer == "gmpy2" and self.driver == "scan":
            raise ValueError('buffer="gmpy2" needs Python between the steps, driver="host" (or None); got "scan".')
        if self.buffer not in ("device", "host") and self.capacity is not None:
            buffer = f'"{self.buffer}"' if isinstance(self.buffer, str) else repr(self.buffer)
            raise ValueError(f'buffer={buffer} grows as it must; `capacity` is for "device" and "host".')
        if self.memory_budget is not None:
            bytes_of(self.memory_budget)
            if self.buffer != "device" or self.driver == "host":
                raise ValueError("`memory_budget` is for digits on the device: leave out `buffer` and `driver`.")
        if self.progress is not None and (self.driver != "host" or not callable(self.progress)):
            raise ValueError('`progress` is a function of (direction, steps done, steps), and needs driver="host".')
        object.__setattr__(self, "capacity", given(self.capacity))  # a value that can be hashed
        if self.fraction_bits is not None:
            bits = as_int(self.fraction_bits)
            if bits is None or not 8 <= bits <= 60:
                raise ValueError(f"`fraction_bits` must be an integer from 8 to 60; got {self.fraction_bits!r}.")
            object.__setattr__(self, "fraction_bits", bits)

    @property
    def driver_name(self) -> str | None:  # type: ignore[override]
        if self.buffer == "gmpy2":
            return "host_eager"
        return self.driver if self.memory_budget is None else "scan"

    @property
    def guesses(self) -> bool:  # type: ignore[override]
        return not isinstance(self.capacity, int) and self.buffer in ("device", "host")

    @property
    def cuts(self) -> bool:  # type: ignore[override]
        return self.memory_budget is not None or self.store is not None

    @property
    def store(self) -> Store | None:  # type: ignore[override]
        if isinstance(self.buffer, Disk):
            return self.buffer
        return Host() if self.buffer == "host" else None

    def run(self, run: Run, inputs: Inputs) -> Outcome:
        budget = None if self.memory_budget is None else bytes_of(self.memory_budget)
        return reversed_run(run, Room(given(self.capacity), budget), inputs)

    def cost(self, steps: int) -> Cost:
        return Cost(time=4, states=6 + 0.005 * steps, activations=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """What a run came to that was trained before."""

    outcome: Outcome
    ends: Ends
    batches: Array | None  # prints


class Room(NamedTuple):
    """What lost digits may take, as users give it; None: what they need."""

    capacity: Given  # 32-bit words per parameter
    budget: int | None = None  # bytes, of states as well
    kept: Kept | None = None  # they are there already


def reversed_run(run: Run, room: Room, inputs: Inputs) -> Outcome:
    """The run, with the derivative of the steps from `Run.first` on by reversal."""
    if probing():
        run = dataclasses.replace(run, watch="norms", throw=False)
    elif watched():
        run = dataclasses.replace(run, watch="growth")
    return _run(run, room, *inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(run: Run, room: Room, values: Any, h: Any, theta: Any, frozen: Any) -> Outcome:
    return run_forward(run, None, Inputs(values, h, theta, frozen))[0]


class Residuals(NamedTuple):
    inputs: Inputs
    ends: Ends
    seen: Seen
    status: Status
    known: "_Known"


class _Known(eqx.Module):
    """What is known when the forward pass is built."""

    theta: tuple[bool, ...] = eqx.field(static=True)  # which leaves somebody differentiates
    h: tuple[frozenset[str], ...] = eqx.field(static=True)  # of each block, the hyperparameters
    again: Capacity | None = eqx.field(static=True)  # of the buffers, where Python trains
    first: int = eqx.field(static=True)  # how the run was cut
    segments: tuple[int, ...] = eqx.field(static=True)
    every: int | None = eqx.field(static=True)


def _run_fwd(run: Run, room: Room, *inputs: Any) -> tuple[Outcome, Residuals]:
    perturbed = Inputs(*jax.tree.map(lambda x: x.perturbed, inputs))
    arrays = Inputs(*jax.tree.map(lambda x: _array(x.value), inputs))
    for differentiated, path in zip(jax.tree.leaves(perturbed.frozen), run.labels.frozen, strict=True):
        if differentiated:
            raise ValueError(
                f"`batches` is differentiated, in {path}; that derivative would be lost. Pass learned data through `theta`."
            )
    with own_settings():
        run = run if room.budget is None else cut(run, arrays, room.budget, room.capacity)
        from_python = settled_driver(run, arrays).from_python
        if run.store is not None and not from_python:
            run = in_full_words(run, arrays)
        words = capacities(run, arrays.h, room.capacity)
    if room.kept is None:
        outcome, ends, batches = run_forward(run, words, arrays)
    else:
        outcome, ends, batches = room.kept.outcome, room.kept.ends, room.kept.batches
    if run.throw and concrete(outcome.status) and not outcome.status.ok:
        raise outcome.status.error()  # here it is known; outside, an eager jax.grad makes a tracer of it
    again = words if from_python else None
    of_h = tuple(frozenset(name for name, asked in own.items() if asked) for own in perturbed.h)
    known = _Known(tuple(map(bool, perturbed.theta)), of_h, again, run.first, run.segments, run.every)
    return outcome, Residuals(arrays, ends, Seen(outcome.losses, batches), outcome.status, known)


def _run_bwd(run: Run, room: Room, residuals: Residuals, ct: Outcome) -> tuple[Any, ...]:
    inputs = residuals.inputs
    dvalues = jax.tree.map(_dense, ct.values, is_leaf=_is_zero)
    dmetrics = () if all(map(_is_zero, ct.metrics)) else list(map(_dense, ct.metrics))
    pushed = Pushed(None if _is_zero(ct.losses) else _at_least_16_bits(ct.losses), dmetrics)
    followed = not all(_is_zero(x) for j in run.statistics for x in ct.values[j].values())
    known, wanted = residuals.known, Wanted(residuals.known.theta, followed)
    run = dataclasses.replace(run, first=known.first, segments=known.segments, every=known.every, asked=known.h)
    with _told_of_axes():
        back = run_backward(run, wanted, inputs, residuals.ends, residuals.seen, dvalues, pushed, again=known.again)
    status = _certificate(run, residuals.status, back, _faint([dvalues[j][PARAMS] for j in run.parameters]))
    if run.watch == "norms":
        trace(status, residuals.seen.losses, **back.watched)
    ok = surface(status, run.throw, logarithms(back.watched["norms"]) if run.watch == "growth" else None)
    dvalues, dh, dtheta = mask(ok, back.gradients)
    dh = [{key: own.get(key) for key in h} for own, h in zip(dh, inputs.h, strict=True)]  # None: it is in another block's
    return dvalues, dh, dtheta, None


@contextlib.contextmanager
def _told_of_axes() -> Iterator[None]:
    """JAX calls this pass without the axes that a `jax.vmap` outside of the training names."""
    try:
        yield
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        name = str(error).partition("axis name: ")[2].partition(".")[0]
        raise TypeError(
            f"this differentiates a jax.vmap whose axis {name!r} is read inside of hg.train (a mean over it, say), and JAX "
            "does not hand the axis to the reverse pass of a reversal. Differentiate inside, jax.vmap(jax.grad(f), "
            "axis_name=...), or pass adjoint=hg.Checkpointed() to hg.train."
        ) from error


_run.defvjp(_run_fwd, _run_bwd, symbolic_zeros=True)


def _certificate(run: Run, forward: Status, back: Back, faint: Array) -> Status:
    """The forward pass's status, or else whether the way back was exact: what failed on the way out cannot return."""
    places = np.asarray([place for row in places_of(run) for place in row], np.int32)
    code, place, small = _judged(places, back.found, forward.code, forward.place)
    return dataclasses.replace(forward, code=code, place=place, isolated=back.doubted, small=small, faint=faint)


@jax.jit
def _judged(places: Array, found: Array, code: Array, place: Array) -> tuple[Array, Array, Array]:
    """(code, place, small) of a `Status`. places: of each block and link; found: as `Back` has it."""
    states, (_, batches) = found[:-2], found[-2:]
    reversal = jnp.where(found.all(), OK, REVERSAL).astype(jnp.int32)
    lost = jnp.where(states.all(), LOSSES, places[first_true(~states)])
    lost = jnp.where(batches, lost, BATCHES)  # of which all else follows
    well = code == OK
    # What else there is to know of the run has been said on the way out.
    return jnp.where(well, reversal, code), jnp.where(well, lost, place).astype(jnp.int32), jnp.int32(-1)


def _faint(cotangents: list[Array]) -> Array:
    """The largest entry, if it is of a type that has fewer exponents than float32, and below its normal numbers; else 0."""
    narrow = [x for x in cotangents if jnp.finfo(x.dtype).tiny > jnp.finfo(jnp.float32).tiny and x.size]
    if not narrow:
        return jnp.float32(0)
    largest = jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in narrow]).max()
    return jnp.where(largest < max(float(jnp.finfo(x.dtype).tiny) for x in narrow), largest, 0)


def _array(x: Any) -> Any:
    """Outside of jax.jit, JAX hands on a Python number as a float of its own, which has no shape."""
    return x if isinstance(x, (jax.Array, np.ndarray)) else jnp.asarray(x)


def _at_least_16_bits(x: Array) -> Array:
    """Floats of 8 bits do not multiply others."""
    return x if jnp.finfo(x.dtype).bits >= 16 else x.astype(jnp.float32)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _dense(x: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x
