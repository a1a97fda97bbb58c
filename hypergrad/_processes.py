"""Several processes of `jax.distributed` at work on one run: the first writes, and all hear of it.

Invariant: all processes come to the same calls in the same order, and to the same end.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils


T = TypeVar("T")
_MOST = 4096  # bytes of a message
_FAILED = "failed: "


def several() -> bool:
    return jax.process_count() > 1


def is_first() -> bool:
    return jax.process_index() == 0


def reject_python(driver: str | None, store: Any, source: Any) -> None:
    """An error for what runs in Python between steps: a process has but a part of the arrays. source: of `host_batches`."""
    here = f"{jax.process_count()} processes"
    if driver in ("host", "host_eager"):
        raise ValueError(
            f"steps that Python runs one by one (driver='host', buffer='gmpy2') need all arrays in one process; there are "
            f"{here}. Take driver='scan', the default."
        )
    if store is not None:
        raise ValueError(
            f"lost digits on the host or on disk (buffer='host', hg.Disk, hg.record) are kept by one process; there are "
            f"{here}. Take buffer='device', the default, with memory_budget=... for long runs."
        )
    if source is not None:
        raise ValueError(
            f"hg.host_batches loads in one process, and there are {here}. Make batches of arrays that all have a part of "
            "(jax.make_array_from_process_local_data) with hg.stacked, or a function of t."
        )


def whole(x: Any) -> np.ndarray:
    """The values of an array, those of other processes too. Where it is divided among them all must ask, and wait."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True) if divided(x) else x)


def gathered(tree: Any) -> Any:
    """The tree, with what is divided among processes as one array in each."""
    return jax.tree.map(lambda x: whole(x) if divided(x) else x, tree)


def divided(x: Any) -> bool:
    """Whether an array has parts that only other processes hold."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return False
    return not (x.is_fully_addressable or x.is_fully_replicated)


def in_first(function: Callable[[], Any]) -> None:
    """function(), in the first process alone; the others wait. What it raises there is raised in all."""
    if not several():
        function()
        return
    failure: Exception | None = None
    if is_first():
        try:
            function()
        except Exception as error:  # noqa: BLE001  any at all: nobody may be left waiting
            failure = error
    told = _told("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if told:
        raise ValueError(f"in the first process: {told}")


def in_all(function: Callable[[], T], seen: Callable[[T], str] = lambda _: "", cure: str = "") -> T:
    """function(), in each process. What it raises in one is raised in all; ValueError, with the cure, where processes do not
    see the same of what it returns: each would go on with a history of its own."""
    if not several():
        return function()
    failure: Exception | None = None
    try:
        result = function()
        text = seen(result)
    except Exception as error:  # noqa: BLE001  any at all: nobody may be left waiting
        failure, text = error, f"{_FAILED}{type(error).__name__}: {error}"
    said = [_read(x) for x in np.asarray(multihost_utils.process_allgather(_message(text)))]
    if failure is not None:
        raise failure
    for i, one in enumerate(said):
        if one.startswith(_FAILED):
            raise ValueError(f"in process {i}: {one.removeprefix(_FAILED)}")
    for i, one in enumerate(said):
        if one != said[0]:
            raise ValueError(f"process {i} has come to {one}, and process 0 to {said[0]}. {cure}")
    return result


def _told(text: str) -> str:
    """What the first process says, in all of them."""
    return _read(np.asarray(multihost_utils.broadcast_one_to_all(_message(text))))


def _message(text: str) -> np.ndarray:
    message = np.zeros(_MOST, np.uint8)
    content = text.encode()[:_MOST]
    message[: len(content)] = np.frombuffer(content, np.uint8)
    return message


def _read(message: np.ndarray) -> str:
    """The inverse of `_message`."""
    return message.tobytes().rstrip(b"\0").decode(errors="replace")
