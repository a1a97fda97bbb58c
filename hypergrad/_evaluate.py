"""The objective of the meta-loop and its hypergradient at one point, over one seed or many.

Invariant: an evaluation that is compiled compiles once for all points, and again only where runs must be compiled otherwise.
"""

import functools
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _programs as programs
from hypergrad._average import Evaluated, averaged, mean, wide
from hypergrad._door import check_signature
from hypergrad._hyper_names import hyper_path
from hypergrad._meshes import divided_by
from hypergrad._needs import MUCH, Ask, Guessed, Need, fitted
from hypergrad._placement import mesh_in_force, sharding_of
from hypergrad._processes import several
from hypergrad._report import Ledger, listen
from hypergrad._scalar import real_scalar
from hypergrad.batches import check_key
from hypergrad.errors import ISOLATED, OK, HypergradError, NonFiniteError
from hypergrad.hypers import natural


class _OnSeveral(Exception):
    """What is trained lies on several devices already."""


class Evaluation:
    """f(h) = mean over seeds of val_fn(train_fn(natural(h), key)): compiled once, and again when a buffer must grow.

    Another evaluation that traces to the same program finds it compiled.

    Seeds are vmapped in equal groups, which run side by side: two for each core of a CPU, since XLA keeps but part of a
    batched program on more than one core; one for each of several devices, unless what is trained lies on several already.
    robust: as `averaged` has it. watch: whether the ledger gets the norms of cotangents.
    """

    def __init__(
        self,
        train_fn: Any,
        val_fn: Any,
        monitor_fn: Any = None,
        *,
        seeds: int = 1,
        jit: bool = True,
        robust: bool = False,
        watch: bool = False,
    ) -> None:
        self.objective = objective(train_fn, val_fn, monitor_fn)
        self.seeds, self.jit, self.robust, self.ledger = seeds, jit, robust, Ledger(watch)
        self.programs: dict[Any, Any] = {}
        self.asks: dict[Any, Ask] = {}
        self.noted: set[Any] = set()  # what has been warned of: once in a meta-loop
        self.apart = True  # whether groups may run on a device each

    def __call__(self, learned: Any, fixed: Any, key: Array) -> tuple[Evaluated, HypergradError | None]:
        """The means, and what a seed failed of, if one did."""
        isolated = self.ledger.isolate
        result, failure = self._evaluated(learned, fixed, key)
        if self.ledger.isolate and not isolated and failure is None:
            warnings.warn(ISOLATED, stacklevel=4)
        for status in self.ledger.statuses:
            about = int(status.small), bool(status.faint > 0), bool(status.isolated)
            if status.ok and about not in self.noted:
                self.noted.add(about)
                for note in status.notes():
                    warnings.warn(note, stacklevel=4)
        if failure is None and np.isposinf(float(result.monitor)) and "monitor" not in self.noted:
            self.noted.add("monitor")
            warnings.warn(
                "`monitor_fn` gives NaN or infinity: a meta-step with such a number is never the best.", stacklevel=4
            )
        return result, failure

    def _evaluated(self, learned: Any, fixed: Any, key: Array) -> tuple[Evaluated, HypergradError | None]:
        self.ledger.clear()
        keys = key[None] if self.seeds == 1 else jax.random.split(key, self.seeds)
        if self.ledger.guessed is None:
            self._fit(self._ask(learned, fixed, keys[0]))
        try:
            with listen(self.ledger):
                results = self._side_by_side(learned, fixed, keys) if self.jit else self._one_by_one(learned, fixed, keys)
        except Guessed:
            self.ledger.guessed = None
            return self._evaluated(learned, fixed, key)
        except _OnSeveral:
            self.apart = False
            return self._evaluated(learned, fixed, key)
        result = jax.block_until_ready(averaged(results, self.seeds, self.robust, self.ledger.failure is not None))
        return self._evaluated(learned, fixed, key) if self.grown() else (result, self._failure(result))

    def value(self, learned: Any, fixed: Any, key: Array, ok: Array) -> Array:
        """The mean value alone, of the seeds that are ok where the line search that calls it starts, or NaN: as it compares
        the two, they are of the same seeds. Inside of its compiled code."""
        one = lambda k: self.objective(learned, fixed, k)[0]  # noqa: E731
        if self.seeds == 1:
            return self._searched(lambda: one(key))
        values = self._searched(lambda: jax.vmap(one)(jax.random.split(key, self.seeds)))
        return mean(values, ok.astype(wide(values)))

    def _searched(self, evaluate: Callable[[], Array]) -> Array:
        """evaluate(), which JAX traces; where all else ran from Python, that may be what fails."""
        try:
            return evaluate()
        except Exception as error:
            if not self.jit:
                error.add_note(
                    "(in a line search of hg.optimize, which evaluates in compiled code, with jit=False too: take a "
                    "meta_optimizer that does not search, such as optax.adam(0.04), or functions that JAX can trace)"
                )
            raise

    def _side_by_side(self, learned: Any, fixed: Any, keys: Array) -> list[Any]:
        workers = self._workers(learned, fixed)
        cores = len(workers) > 1 and workers[0] is None
        size = -(-self.seeds // (len(workers) * (2 if cores else 1)))
        padded = keys if self.seeds % size == 0 else keys[np.arange(-(-self.seeds // size) * size) % self.seeds]
        groups = [padded[i : i + size] for i in range(0, len(padded), size)]
        places = [workers[i % len(workers)] for i in range(len(groups))]
        point, look = (learned, fixed, groups[0]), functools.partial(self._look, several=len(workers) > 1 and not cores)
        # Compiled here, since settings of JAX are the thread's own.
        runs = {place: self.compiled(self._group, *point, traced=look, device=place) for place in dict.fromkeys(places)}
        one = lambda place, group: jax.block_until_ready(runs[place](learned, fixed, group))  # noqa: E731
        with ThreadPoolExecutor(len(workers) if len(groups) > 1 else 1) as pool:
            done = list(pool.map(one, places, groups))
        if len(runs) > 1:  # from their devices to where the hyperparameters are
            done = [(jax.device_get(result), [(tell, jax.device_get(x)) for tell, x in told]) for result, told in done]
        for _, reports in done:
            programs.told(reports)
        return [result for result, _ in done]

    def _workers(self, *point: Any) -> list[Any]:
        """Where groups run side by side: devices, or None for each core of the only one."""
        # Threads would come to what several processes do together in another order in each.
        if (
            self.seeds == 1
            or several()
            or not self.apart
            or mesh_in_force()
            or any(map(sharding_of, jax.tree.leaves(point)))
        ):
            return [None]
        devices = jax.local_devices()
        cores = (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
        return devices[: self.seeds] if len(devices) > 1 else [None] * cores

    def compiled(self, function: Callable[..., Any], *arguments: Any, device: Any = None, **options: Any) -> Any:
        """The program of a function of this evaluation, for arguments like these, on a device: it returns (its result,
        reports)."""
        like = function.__name__, device, *_alike(arguments)
        if like not in self.programs:
            arrays, static = eqx.partition(arguments, eqx.is_array)
            of_arrays = lambda arrays: function(*eqx.combine(arrays, static))  # noqa: E731
            run = programs.reporting(of_arrays, lambda code: code == OK, arrays, device=device, **options)
            self.programs[like] = lambda *arguments: run(eqx.filter(arguments, eqx.is_array))
        return self.programs[like]

    def _group(self, learned: Any, fixed: Any, keys: Array) -> Any:
        """((values, monitors), grads), each with a leading axis of seeds."""
        one = jax.value_and_grad(self.objective, has_aux=True)
        if len(keys) == 1:
            return jax.tree.map(lambda x: x[None], one(learned, fixed, keys[0]))
        return jax.vmap(lambda k: one(learned, fixed, k))(keys)

    def _one_by_one(self, learned: Any, fixed: Any, keys: Array) -> list[Any]:
        """The same from Python, for what cannot be traced: a run that fails raises, and is NaN here."""
        results = []
        for i in range(self.seeds):
            try:
                results.append(self._group(learned, fixed, keys[i : i + 1]))
            except HypergradError as error:
                if error.status is None:  # a bad argument
                    raise
                self.ledger.failure = self.ledger.failure or error.status
                nan = jnp.full(1, jnp.nan)
                results.append(((nan, nan), jax.tree.map(lambda x: jnp.full((1, *x.shape), jnp.nan, x.dtype), learned)))
        return results

    def _look(self, program: programs.Program, constants: list[Any], several: bool) -> None:
        """At what was traced, before it is compiled. several: whether groups are to run on a device each."""
        if several and (any(map(sharding_of, constants)) or divided_by(program.jaxpr)):
            raise _OnSeveral
        if self.ledger.guessed is not None:
            guessed, self.ledger.guessed = self.ledger.guessed, 0
            if guessed * self.seeds >= MUCH or self.ledger.room:
                raise Guessed

    def _ask(self, *point: Any) -> list[Need]:
        like = _alike(point)
        if like not in self.asks:
            self.asks[like] = Ask(lambda *point: self.objective(*point)[0], *point)
        return self.asks[like](*point)

    def _fit(self, needs: list[Need]) -> None:
        """Room for digits as it is needed; if it is another than before, what was compiled is forgotten."""
        room = fitted(self.ledger.room, needs)
        if room != self.ledger.room:
            self.ledger.room = room
            self.programs.clear()

    def grown(self) -> bool:
        """Whether runs must be compiled otherwise, with larger buffers or with gradients apart from their derivatives; if
        so, they will be, and what was compiled is forgotten."""
        ledger = self.ledger
        if ledger.lost and not ledger.isolate:
            ledger.isolate = True
        elif ledger.words > ledger.capacity:
            ledger.capacity = -(-5 * ledger.words // 4)  # a quarter more: learned decays drift
        else:
            return False
        self.programs.clear()
        return True

    def _failure(self, result: Evaluated) -> HypergradError | None:
        bad = np.flatnonzero(~np.asarray(result.ok))
        failure = self.ledger.failure.error() if self.ledger.failure is not None else None
        if failure is None and bad.size:
            failure = NonFiniteError(_not_finite(float(result.values[bad[0]]), result.grads if self.seeds == 1 else ()))
        if failure is not None and self.seeds > 1 and bad.size:
            seen = f"seed {bad[0]}, the first of {bad.size} that failed of {self.seeds}"
            hidden = f"which of the {self.seeds} seeds is not known, as `val_fn` is finite for all of them"
            failure.add_note(f"({hidden if bad.size == self.seeds and np.isfinite(result.values).all() else seen})")
        return failure


def _alike(arguments: Any) -> tuple[Any, ...]:
    """Equal where a program of the one is one of the other."""
    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple(jax.typeof(x) if eqx.is_array(x) else x for x in leaves)


def objective(train_fn: Any, val_fn: Any, monitor_fn: Any = None) -> Callable[[Any, Any, Array], tuple[Array, Array]]:
    """(learned hypers, fixed hypers, key) -> (value, monitor), checked."""
    outside = "What else it reads, such as data, it takes from outside."
    for name, function, example, otherwise in (
        ("train_fn", train_fn, "train_fn(hypers, key)", "Without randomness write train_fn(hypers, _)."),
        ("val_fn", val_fn, "val_fn(trained)", outside),
        ("monitor_fn", monitor_fn, "monitor_fn(trained)", outside),
    ):
        if function is None and name == "monitor_fn":
            continue
        if not callable(function):
            raise TypeError(f"`{name}` must be a function {example}; got {type(function).__name__}.")
        check_signature(example, function, otherwise)

    def evaluate(learned: Any, fixed: Any, key: Array) -> tuple[Array, Array]:
        trained = train_fn(natural(eqx.combine(learned, fixed)), key)
        monitor = jnp.asarray(jnp.nan if monitor_fn is None else real_scalar("monitor_fn", monitor_fn, trained))
        if monitor_fn is not None:  # NaN says that there is none
            monitor = jnp.where(jnp.isnan(monitor), jnp.inf, monitor)
        return real_scalar("val_fn", val_fn, trained), monitor

    return evaluate


def _not_finite(value: float, grads: Any) -> str:
    if not np.isfinite(value):
        return f"the validation value is {value}, though all training inside was fine: look at `train_fn` and `val_fn`."
    bad = [path for path, g in jax.tree_util.tree_leaves_with_path(grads) if not jnp.all(jnp.isfinite(g))]
    of = f" of hypers{hyper_path(bad[0])}" if bad else ""
    return (
        f"the hypergradient{of} is not finite. Long or unstable training makes derivatives explode: lower the learning "
        "rates or the steps, clip with optax.clip_by_global_norm, or pass skip_nonfinite=True to hg.optimize."
    )


def reject_traced(what: str, given: Any) -> None:
    """given: hyperparameters, or a key."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)):
        raise ValueError(
            f"{what} runs from Python and needs numbers; hyperparameters or `key` are traced, as under jax.jit, jax.vmap or "
            "jax.grad. Call it outside of them, or differentiate there by jax.value_and_grad of "
            "val_fn(train_fn(hg.natural(hypers), key))."
        )


def default_key(key: Array | None) -> Array:
    return jax.random.key(0) if key is None else check_key(key)
