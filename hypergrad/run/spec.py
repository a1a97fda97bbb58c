"""A training run as data: what is fixed (`Run`, hashable) and what flows (`Inputs`, a pytree of arrays).

Invariant: `Run.batch` is one function of t, and `Run.gradient` one of (parameters, theta, batch), in every pass.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad import _programs as programs
from hypergrad._isolation import barrier, isolated, wanting
from hypergrad._mended import mending
from hypergrad.batches import HostBatches
from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import GRADIENT, STATISTICS, early
from hypergrad.optimizers.expand import Hypers
from hypergrad.optimizers.transform import Transform, read_of
from hypergrad.run import drivers
from hypergrad.run.cuts import InSegments
from hypergrad.run.functions import Frozen, Functions
from hypergrad.run.means import InOrder, OnGrid, Scaled
from hypergrad.run.microbatches import Microbatches
from hypergrad.run.pieces import alone
from hypergrad.run.stores import Store


class Inputs(NamedTuple):
    """Everything a run computes with."""

    values: list[Floats]  # of each block: link -> initial floats
    h: list[Hypers]  # of each block: {name: [steps | 1, ...]}
    theta: list[Array]  # float leaves, some [steps, ...], and what the loss reads from outside, if it may be differentiated
    frozen: Frozen  # all other arrays: never differentiated


class Labels(NamedTuple):
    """Names for errors, and for what the status says."""

    places: tuple[str, ...]  # of every block, link and leaf; then the decay of every block and link
    limits: tuple[float, ...]  # of each place: the range of the value, the largest that the decay can be
    frozen: tuple[str, ...]  # of the leaves of `Inputs.frozen`
    approximate: tuple[str, ...]  # what the derivative leaves out by choice


def key_of_steps() -> Array:
    """From which each step folds its own: of JAX's first generator, whichever is the default."""
    return jax.random.key(0, impl="threefry2x32")


@dataclasses.dataclass(frozen=True)
class Run(InSegments):
    """Everything a run is compiled for."""

    functions: Functions
    blocks: tuple[Block, ...]  # of the parameters, then of the running statistics
    transforms: tuple[Transform, ...]  # what the gradient passes before the chains see it
    steps: int
    driver: str  # "scan", "host", "host_eager", or "either": the host where values are known, else the scan
    x64: bool  # the caller's setting: the user's functions run under it
    labels: Labels
    throw: bool
    linear: bool  # whether the gradient enters all chains linearly: its cotangent is then known before it is
    isolate: bool  # whether the gradient is compiled apart from its derivative on the way back, too
    shared: tuple[tuple[int | None, ...], ...]  # of each block and link, which schedule its buffer has; None: no decay
    common: tuple[tuple[tuple[str, int], ...], ...]  # of each block, which hyperparameters it has in common with others
    foreign: Hashable = None  # what the functions of rules that are not the library's compute today
    collective: bool = False  # whether these speak of an axis that a `jax.vmap` around the run has named
    microbatches: Microbatches | None = None  # what the gradient of a batch is the mean over; None: it is computed at once
    statistics_tree: Any = None  # of the statistics, as a rule reads them
    watch: str = ""  # what else the reverse pass gives of each step: "norms" of its cotangents, "growth", "states"
    source: HostBatches | None = None  # of batches that Python loads, for host drivers
    progress: drivers.Progress | None = None  # told by host drivers how far they are
    store: Store | None = None  # where the words of a segment go while others are on; None: nowhere
    traced: bool = False  # whether somebody builds a program of it, which then goes from segment to segment by itself
    asked: tuple[frozenset[str], ...] | None = None  # of each block, the hyperparameters that are differentiated; None: all
    retries: bool = False  # whether a reverse pass that fails is tried again with gradients apart
    first: int = 0  # the step that the last segment begins with: that whose words are kept
    segments: tuple[int, ...] = ()  # how what comes before is cut: so many, of so many each, ...; (): it is not undone
    every: int | None = None  # steps of a segment whose words go elsewhere; None: at most `cuts.STORED`, all of one length

    @property
    def from_python(self) -> bool:
        """Whether Python runs something between the steps, or between segments of them."""
        return self.driver != "scan" or (self.store is not None and not self.traced)

    @functools.cached_property
    def parameters(self) -> range:
        """The blocks that the optimizer moves."""
        return range(sum(block.of_parameters for block in self.blocks))

    @functools.cached_property
    def statistics(self) -> range:
        """The others."""
        return range(len(self.parameters), len(self.blocks))

    @functools.cached_property
    def of_parameters(self) -> tuple[Block, ...]:
        return self.blocks[: len(self.parameters)]

    @functools.cached_property
    def early(self) -> tuple[int, ...]:
        """Of each block, how many links move before the gradient is transformed: up to the last that a transformation
        reads."""
        read = [read_of(self.transforms, j) for j in range(len(self.blocks))]
        return tuple(early(block.chain, names) for block, names in zip(self.blocks, read, strict=True))

    def isolated(self) -> "Run":
        """The same run, its gradients compiled apart from their derivatives on the way back too."""
        return dataclasses.replace(self, isolate=True)

    def bare(self) -> "Run":
        """An equal one that keeps nothing of the user's, to be found by."""
        return dataclasses.replace(self, functions=programs.bare(self.functions), source=None, progress=None)

    def split(self, arrays: list[Array]) -> list[Array]:
        """One array per block of the parameters -> leaf by leaf. The inverse of `joined`."""
        parts = {
            i: x
            for block, a in zip(self.of_parameters, arrays, strict=True)
            for i, x in zip(block.leaves, block.split(a), strict=True)
        }
        return [parts[i] for i in range(len(parts))]

    def split_apart(self, t: Array, arrays: list[Array]) -> list[Array]:
        """`split`, isolated where that saves compiling (`Block.split_apart`)."""
        return isolated(t, self.split, arrays) if self.splits_apart else self.split(arrays)

    @functools.cached_property
    def splits_apart(self) -> bool:
        return any(block.split_apart for block in self.of_parameters)

    def joined(self, t: Array, leaves: list[Array]) -> list[Array]:
        """The inverse of `split`, in the accumulators' dtypes. What lies side by side is isolated: XLA would fuse the copy
        with what makes a gradient, and not alike in all passes."""
        result = []
        for block in self.of_parameters:
            own = [leaves[i] for i in block.leaves]
            x = isolated(t, block.joined, own) if len(own) > 1 else block.joined(own)
            result.append(x.astype(block.dtype))
        return result

    def statistics_tree_of(self, leaves: list[Array]) -> Any:
        """As the user has them."""
        return jax.tree.unflatten(self.statistics_tree, leaves)

    def transformed(self, h: list[Hypers], w: list[Array], g: list[Array], z: list[Floats]) -> list[Array]:
        """The gradient as the chains see it: a pure function of floats over all blocks of the parameters, differentiated by
        every adjoint. z: of each, the new values of the links that are `early`."""
        g = [x.astype(block.dtype) for x, block in zip(g, self.of_parameters, strict=True)]
        for transform in self.transforms:
            g = mending(transform.__call__)(h, w, g, z)
        return g

    def indices(self, t: Array, theta: list[Array], frozen: Frozen, batch: list[Any]) -> list[list[Array]]:
        """Of what the step reads of theta by index, bit for bit the same in every pass."""
        if not self.functions.theta.reads:
            return []

        def compute(captured: list[Array], frozen: Frozen, batch: list[Any]) -> list[list[Array]]:
            with jax.enable_x64(self.x64):
                return self.functions.indices_at(captured, frozen, batch)

        return isolated(t, compute, theta[len(theta) - sum(self.functions.traced) :], frozen, batch)

    def batch(self, frozen: Frozen, t: Array, apart: bool = True) -> list[Any]:
        """The arrays of step t's batch, bit for bit the same in every pass."""

        def arrays(frozen: Frozen, t: Array) -> list[Any]:
            with jax.enable_x64(self.x64):
                return self.functions.batch_at(frozen, t)

        return isolated(t, arrays, frozen, t) if apart else arrays(frozen, t)

    def value(self, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any]) -> tuple[Array, list[Array]]:
        """(loss, batch statistics)."""
        with jax.enable_x64(self.x64):
            value, *seen = self.functions.loss_at(w, theta, frozen, batch)
            dtypes = [self.blocks[j].dtype for j in self.statistics]
            return value, [jnp.asarray(x).astype(dtype) for x, dtype in zip(seen, dtypes, strict=True)]

    def gradient(
        self, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any], smooth: bool = False
    ) -> tuple[Array, list[Array], list[Array]]:
        """(loss, gradient in w, batch statistics), the last two bit for bit the same in every pass: if all are used.
        smooth: in floats all along, to be differentiated."""

        def at_once(shared: Any, batch: list[Any]) -> tuple[Array, list[Array], list[Array]]:
            with jax.enable_x64(self.x64):
                (value, seen), g = jax.value_and_grad(self.value, has_aux=True)(*shared, batch)
            return value, *barrier((g, seen))

        shared = w, theta, frozen
        if smooth and self.microbatches is not None:
            return self.microbatches.mean_of_floats(at_once, shared, batch)
        return self.over_parts(at_once, (InOrder(), OnGrid(), OnGrid()), shared, batch)

    def over_parts(
        self, function: Callable[..., Any], kinds: Any, shared: Any, batch: list[Any], of: Sequence[Array] = ()
    ) -> Any:
        """function(shared, batch), or its mean over microbatches (`Microbatches.mean`). of: what it is linear in."""
        if self.microbatches is None:
            return function(shared, batch)
        unit = jnp.stack([jnp.max(jnp.abs(x), initial=0).astype(jnp.float64) for x in of]).max() if of else 1.0
        return self.microbatches.mean(function, kinds, shared, batch, unit)

    def isolated_gradient(
        self, gradient: Callable[..., Any], t: Array, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any]
    ) -> tuple[Array, list[Array], list[Array]]:
        """(loss, `joined` gradient, batch statistics) as training computes them: compiled apart from what surrounds them."""
        apart = alone(gradient) if self.driver == "host" else functools.partial(isolated, t, gradient)
        value, g, seen = apart(w, theta, frozen, batch)
        return wanting(t, value, [*g, *seen]), self.joined(t, g), seen

    def more_signals(
        self, t: Array, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any], smooth: bool = False
    ) -> dict[str, list[Array]]:
        """{name: [array of each block of the parameters]}: what links ask for beside the gradient. smooth: as of
        `gradient`."""
        if self.functions.signals is None:
            return {}

        def compute(
            t: Array, w: list[Array], theta: list[Array], frozen: Frozen, batch: list[Any]
        ) -> dict[str, list[Array]]:
            at_once, shared, drawn = self.signals_at_once, (w, theta, frozen), self.drawn(t, batch)
            if smooth and self.microbatches is not None:
                return self.microbatches.mean_of_floats(at_once, shared, drawn)
            return self.over_parts(at_once, Scaled(), shared, drawn)

        found = isolated(t, compute, t, w, theta, frozen, batch)
        return {name: self.joined(t, leaves) for name, leaves in found.items()}

    def drawn(self, t: Array, batch: list[Any]) -> list[Any]:
        """The batch, and the key of the step, which each part of it makes its own."""
        with jax.enable_x64(self.x64):
            return [*batch, jax.random.fold_in(key_of_steps(), t)]

    def signals_at_once(self, shared: Any, drawn: list[Any]) -> dict[str, list[Array]]:
        """{name: [leaf]} of (w, theta, frozen) and of all that is `drawn`, or a part of it."""
        (w, theta, frozen), (*batch, key) = shared, drawn
        with jax.enable_x64(self.x64):
            return self.functions.signals_at(w, theta, frozen, batch, key)

    def metrics(
        self, t: Array, values: list[Floats], theta: list[Array], frozen: Frozen, batch: list[Any], apart: bool = True
    ) -> list[Array]:
        """What is measured of a step, at the values of the blocks of the parameters before it."""
        if self.functions.metrics is None:
            return []

        def compute(values: list[Floats], theta: list[Array], frozen: Frozen, batch: list[Any]) -> list[Array]:
            with jax.enable_x64(self.x64):
                return self.functions.metrics_at(values, theta, frozen, batch)

        return isolated(t, compute, values, theta, frozen, batch) if apart else compute(values, theta, frozen, batch)

    def signals(self, g: list[Array], seen: list[Array], more: dict[str, list[Array]]) -> list[dict[str, Array]]:
        """Of each block, what its links see: {signal: array}."""
        of_parameters = [{GRADIENT: x, **{name: arrays[j] for name, arrays in more.items()}} for j, x in enumerate(g)]
        return of_parameters + [{STATISTICS: x} for x in seen]

    def loop(
        self,
        body: drivers.Body,
        consts: Any,
        carry: Any,
        xs: Any,
        reverse: bool = False,
        fixed: Hashable = None,
    ) -> tuple[Any, Any]:
        """The body over all steps of xs = (t, ...): a function of (consts, carry, x) that closes over nothing but what the
        run fixes, and what is `fixed` beside it."""
        if self.driver == "scan":
            return drivers.scan(body, consts, carry, xs, reverse)
        feed, fed = None, 0
        if self.source is not None:
            feed, fed = functools.partial(self.source.leaves, steps=self.steps), len(self.source.like)
        between = drivers.Between(feed, fed, self.progress, int(xs[0][0]), self.steps)
        if self.driver == "host":
            return drivers.host(body, (body.__code__, self.bare(), fixed), consts, carry, xs, reverse, between)
        return drivers.host_eager(body, consts, carry, xs, reverse, between)

    def outside_loop(self, function: Callable[..., Any], *args: Any, static: tuple[Any, ...] = ()) -> Any:
        """function(run, *static, *args), which calls no function of the user: one program where Python runs the loop."""
        if not self.from_python or self.driver == "host_eager":
            return function(self, *static, *args)
        shell = dataclasses.replace(self, functions=None, source=None, progress=None)  # type: ignore[arg-type]
        return programs.call(function, (shell, *static), *args)

    def segment(self, function: Callable[..., Any], *args: Any, static: tuple[Any, ...] = ()) -> Any:
        """function(run, *static, *args), some steps in a row: one program, unless Python runs the steps themselves."""
        if self.driver != "scan":
            return function(self, *static, *args)
        return programs.call(function, (dataclasses.replace(self, store=None), *static), *args)

    def maybe_jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Jit what the driver leaves in Python, so that both directions run the same programs."""
        return eqx.filter_jit(function) if self.driver == "host_eager" else function
