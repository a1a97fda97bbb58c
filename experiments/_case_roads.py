"""The roads back of random cases, each as an adjoint of `trained`."""

import functools
import tempfile
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import hypergrad as hg


RECORD, DISK = "record", "buffer=disk"
ROADS = {RECORD: 14, DISK: 5, "auto": 5, "truncated, to all steps": 5}  # how often, beside the modes of all cases
ADJOINTS: dict[str, Any] = {
    "driver=host": hg.Reversible(driver="host"), "buffer=host": hg.Reversible(buffer="host"),
    "buffer=gmpy2": hg.Reversible(buffer="gmpy2"), "host_batches": hg.Reversible(), "isolate": hg.Reversible(isolate=True),
    "auto": hg.Auto("1GiB"), "truncated, to all steps": hg.Truncated(1000), RECORD: RECORD, DISK: DISK,
}  # fmt: skip


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="hypergrad-fuzz-")


def _folder() -> str:
    return tempfile.mkdtemp(dir=_root().name)


class Trained(eqx.Module):
    """What of `hg.Trained` has derivatives."""

    params: Any
    losses: Any
    state: Any
    statistics: Any
    metrics: Any = None


def trained(adjoint: Any, loss: Any, params: Any, optimizer: Any, batches: Any, **options: Any) -> Any:
    """`hg.train` along an adjoint, or one of the roads that need a folder."""
    if adjoint == RECORD:
        return _recorded(loss, batches, {"params": params, "optimizer": optimizer, **options})
    if adjoint == DISK:
        adjoint = hg.Reversible(buffer=hg.Disk(_folder()))
    return hg.train(loss, params, optimizer, batches, adjoint=adjoint, **options)


def _recorded(loss: Any, batches: Any, given: dict[str, Any]) -> Trained:
    """By `hg.record`, and its derivative by `Record.hypergradient`; outside of `jax.jit`."""
    given.pop("metric")
    floats, others = eqx.partition(given, eqx.is_inexact_array)
    records: list[hg.Record] = []

    def forward(floats: Any) -> tuple[Trained, None]:
        records.append(hg.record(loss, batches=batches, folder=_folder(), **eqx.combine(floats, others)))
        return _ends(records[-1].trained), None

    def backward(_: None, cotangents: Trained) -> tuple[Any]:
        def along(end: Any) -> jax.Array:
            pairs = zip(jax.tree.leaves(_ends(end)), jax.tree.leaves(cotangents), strict=True)
            return sum((jnp.sum(x * y) for x, y in pairs), jnp.zeros(()))

        found = records[-1].hypergradient(along)
        return ({name: _where(tree, found.get(name)) for name, tree in floats.items()},)

    function = jax.custom_vjp(lambda floats: forward(floats)[0])
    function.defvjp(forward, backward)
    return function(floats)


def _where(floats: Any, found: Any) -> Any:
    """Of what is found, where `floats` has some: a record differentiates Python's floats, too."""
    none = lambda x: x is None  # noqa: E731
    pairs = zip(jax.tree.leaves(floats, is_leaf=none), jax.tree.leaves(found, is_leaf=none), strict=True)
    return jax.tree.unflatten(jax.tree.structure(floats), [y for x, y in pairs if x is not None])


def _ends(end: Any) -> Trained:
    return Trained(end.params, end.losses, end.state, end.statistics)
