"""Where the words of a segment wait until the way back, off the device.

Invariant: `take(first)` gives what `put(first, ...)` was given, bit for bit, or raises; as often as it is asked.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Words(abc.ABC):
    """The words of one run, by the first steps of its segments.

    Not among JAX's arrays: subclasses are registered as pytrees without leaves, and travel beside them.
    """

    def __init__(self) -> None:
        self.coming: list[tuple[int, int, list[Array], list[int]]] = []

    def put(self, first: int, steps: int, stacks: list[Array], used: list[int]) -> None:
        """uint16 [capacity, ...] of each buffer, and how many of its words there are. They may not be computed yet."""
        for stack in stacks:
            stack.copy_to_host_async()
        self.settle()  # those of the segment before, while this one is on
        self.coming.append((first, steps, stacks, used))

    def settle(self) -> None:
        """All segments that were put are where they stay."""
        while self.coming:
            first, steps, stacks, used = self.coming.pop()
            self.keep(first, steps, [(trimmed(x, n), x.shape[0]) for x, n in zip(stacks, used, strict=True)])

    @abc.abstractmethod
    def keep(self, first: int, steps: int, words: list[tuple[np.ndarray, int]]) -> None:
        """(uint16 [words, ...], capacity) of each buffer."""

    @abc.abstractmethod
    def kept(self, first: int) -> list[tuple[np.ndarray, int]]:
        """What `keep` was given."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Nobody will take them."""

    def take(self, first: int) -> list[np.ndarray]:
        return [padded(words, capacity) for words, capacity in self.kept(first)]


@dataclasses.dataclass(frozen=True)
class Store(abc.ABC):
    """A place for words; hashable."""

    in_program: ClassVar[bool] = False  # whether a compiled program reaches it by itself

    @abc.abstractmethod
    def words(self, shapes: dict[str, tuple[int, ...]], size: int) -> Words:
        """Of a run that begins: of each of its buffers, the shape of a word; and how many bytes there will be."""


@dataclasses.dataclass(frozen=True)
class Host(Store):
    """Host memory."""

    in_program: ClassVar[bool] = True

    def words(self, shapes: dict[str, tuple[int, ...]], size: int) -> Words:
        return HostWords()


@jax.tree_util.register_static
class HostWords(Words):
    def __init__(self) -> None:
        super().__init__()
        self.segments: dict[int, list[tuple[np.ndarray, int]]] = {}

    def keep(self, first: int, steps: int, words: list[tuple[np.ndarray, int]]) -> None:
        self.segments[first] = words

    def kept(self, first: int) -> list[tuple[np.ndarray, int]]:
        return self.segments[first]

    def drop(self) -> None:
        self.segments.clear()


def trimmed(stack: Array, used: int) -> np.ndarray:
    """A copy of the words alone: a view would keep the whole stack."""
    return np.array(np.asarray(stack)[:used])


def padded(words: np.ndarray, capacity: int) -> np.ndarray:
    """The inverse of `trimmed`, but for what no step reads."""
    stack = np.zeros((capacity, *words.shape[1:]), words.dtype)
    stack[: len(words)] = words
    return stack


class Pieces:
    """What segments come to, with an axis of steps: in host memory until it is `joined`, so that the device has it once.

    What is on several devices stays there.
    """

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.coming: list[Any] = []

    def append(self, tree: Any) -> None:
        """Of the segment that comes next. It may not be computed yet."""
        for x in filter(_on_one_device, jax.tree.leaves(tree)):
            x.copy_to_host_async()
        self._settle()  # that of the segment before, while this one is on
        self.coming.append(tree)

    def joined(self, reverse: bool = False) -> Any:
        """In the order of the steps, which segments may have come in `reverse`."""
        shardings = jax.tree.map(lambda x: x.sharding, self.coming[-1])
        self._settle()
        pieces = self.pieces[::-1] if reverse else self.pieces
        return jax.tree.map(_together, shardings, *pieces)

    def _settle(self) -> None:
        while self.coming:
            copied = lambda x: np.array(x) if _on_one_device(x) else x  # noqa: E731
            self.pieces.append(jax.tree.map(copied, self.coming.pop()))


def _on_one_device(x: Array) -> bool:
    return len(x.sharding.device_set) == 1


def _together(sharding: Any, *pieces: Any) -> Array:
    if isinstance(pieces[0], np.ndarray):
        return jax.device_put(np.concatenate(pieces), sharding)
    return jnp.concatenate(pieces)
