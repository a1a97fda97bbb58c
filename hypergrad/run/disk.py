"""Words in files: one for each buffer, appended to while training runs and read from its end on the way back.

Invariant: what is read has the checksum of what was written, or an error says which file has not.

    words-<token>/             one run
        <block>-<link>.words   a line of JSON, then chunks: first step, steps, words, capacity (4 x uint64, little endian),
                               SHA-256 of all else of the chunk, words (uint16, little endian)
        lock                   held by the process whose run it is; where nobody holds it, it is left over
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import secrets
import shutil
import stat
import struct
import urllib.parse
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from hypergrad.errors import StorageError
from hypergrad.run.stores import Store, Words


try:
    import fcntl
except ImportError:  # Windows: nobody can tell what is left over
    fcntl = None  # type: ignore[assignment]

_NUMBERS = struct.Struct("<4Q")
_OURS, _FILES = re.compile("words-[0-9a-f]{16}"), re.compile(r"lock|lock\.part|[^/]+\.words")
_LINE = 4096  # bytes
_DIGEST = hashlib.sha256().digest_size
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_CURE = "Make room or name another folder. Momenta nearer to 1 and fewer steps lose fewer digits."
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


@dataclasses.dataclass(frozen=True)
class Disk(Store):
    """Lost digits in files: hg.Reversible(buffer=hg.Disk(folder)).

    Each run has a folder of its own in `folder`, called words-..., with one file for each buffer: log2(1/decay) bits a
    parameter and step. Every chunk has a checksum. It is removed when nobody needs it any more, and what a process that was
    killed has left is removed by the next run. keep: leave it there. Raises `hg.StorageError` where the disk is full, or a
    file is missing, shorter or another than it was written.
    """

    folder: str
    keep: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, os.PathLike)):
            raise TypeError(f"`folder` of hg.Disk must be a path; got {self.folder!r}.")
        object.__setattr__(self, "folder", os.path.abspath(os.fspath(self.folder)))  # wherever the process goes

    def words(self, shapes: dict[str, tuple[int, ...]], size: int) -> "DiskWords":
        folder = pathlib.Path(self.folder)
        with writing_to(f"hg.Disk({self.folder!r})"):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_left_over(folder)
            free = shutil.disk_usage(folder).free
            if size > free:
                raise StorageError(
                    f"the digits of this run take {size} bytes, and hg.Disk({self.folder!r}) has {free} left. {_CURE}"
                )
            return DiskWords(folder / f"words-{secrets.token_hex(8)}", shapes, self.keep)


@contextlib.contextmanager
def writing_to(place: Any) -> Iterator[None]:
    """What the system says against it is a `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{place} cannot be written to: {error.strerror or error}.") from error


class Place(NamedTuple):
    """Of one chunk of a file."""

    offset: int
    size: int


@jax.tree_util.register_static
class DiskWords(Words):
    def __init__(self, folder: pathlib.Path, shapes: dict[str, tuple[int, ...]], keep: bool) -> None:
        super().__init__()
        self.folder, self.token, self.shapes = folder, folder.name.removeprefix("words-"), list(shapes.values())
        self.paths = _paths(folder, shapes)
        self.places: dict[int, list[Place]] = {}
        folder.mkdir()
        opened: list[int] = []
        self.close = weakref.finalize(self, _close, opened, None if keep else folder, os.getpid())
        try:
            opened += [] if keep else [_locked(folder)]
            self.files = []
            for path in self.paths:
                self.files.append(os.open(path, _CREATE, 0o666))
                opened.append(self.files[-1])
                line = json.dumps({"format": 1, "run": self.token, "buffer": path.stem})
                self._write(path, self.files[-1], line.encode() + b"\n")
        except BaseException:
            self.drop()
            raise

    def keep(self, first: int, steps: int, words: list[tuple[np.ndarray, int]]) -> None:
        places = []
        for path, file, (x, capacity) in zip(self.paths, self.files, words, strict=True):
            chunk = sealed(first, steps, x, capacity)
            places.append(Place(os.lseek(file, 0, os.SEEK_END), len(chunk)))
            self._write(path, file, chunk)
        self.places[first] = places

    def kept(self, first: int) -> list[tuple[np.ndarray, int]]:
        found = []
        if len(self.places.get(first, ())) != len(self.paths):
            raise StorageError(f"{self.folder} was changed or cut off: it lacks digits of the steps from {first}.")
        for path, place, shape in zip(self.paths, self.places.get(first, []), self.shapes, strict=True):
            with _opened(path) as file:
                file.seek(place.offset)
                found.append(unsealed(path, _read(file, place.size), first, shape))
                if hasattr(os, "posix_fadvise"):  # the chunk before is next
                    before = max(place.offset - place.size, 0)
                    os.posix_fadvise(file.fileno(), before, place.size, os.POSIX_FADV_WILLNEED)
        return found

    def drop(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def of_before(folder: pathlib.Path, shapes: dict[str, tuple[int, ...]]) -> "DiskWords":
        """Those that a run has left in its folder."""
        words = object.__new__(DiskWords)
        Words.__init__(words)
        words.folder, words.token, words.shapes = folder, folder.name.removeprefix("words-"), list(shapes.values())
        words.paths = _paths(folder, shapes)
        words.places = {}
        for path, shape in zip(words.paths, words.shapes, strict=True):
            for first, place in _places(path, words.token, shape):
                words.places.setdefault(first, []).append(place)
        return words

    def _write(self, path: pathlib.Path, file: int, content: bytes) -> None:
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(file, left) :]
        except OSError as error:
            self.close()
            raise StorageError(f"{path} cannot be written: {error.strerror or error}. {_CURE}") from error


def _paths(folder: pathlib.Path, names: Iterable[str]) -> list[pathlib.Path]:
    """Links may have any name; that of a file has no slash in it."""
    return [folder / f"{urllib.parse.quote(name, safe=' ')}.words" for name in names]


def sealed(first: int, steps: int, words: np.ndarray, capacity: int) -> bytes:
    content = words.astype("<u2").tobytes()
    numbers = _NUMBERS.pack(first, steps, len(words), capacity)
    return numbers + hashlib.sha256(numbers + content).digest() + content


def unsealed(path: pathlib.Path, chunk: bytes | bytearray, first: int, shape: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """The inverse of `sealed`: (words, capacity)."""
    numbers, seal, content = np.split(np.frombuffer(chunk, np.uint8), [_NUMBERS.size, _NUMBERS.size + _DIGEST])
    whole = len(chunk) >= _NUMBERS.size + _DIGEST
    if not whole or hashlib.sha256(numbers.tobytes() + content.tobytes()).digest() != seal.tobytes():
        raise StorageError(
            f"{path} was changed or cut off: its digits of the steps from {first} do not match their checksum. Train again: "
            "nothing can be made of them."
        )
    begin, _, count, capacity = _NUMBERS.unpack(numbers.tobytes())
    if begin != first:
        raise StorageError(f"{path} has the digits of other steps: from {begin}, not from {first}. It is of another run.")
    return content.view("<u2").astype(np.uint16).reshape(count, *shape), capacity


def _places(path: pathlib.Path, token: str, shape: tuple[int, ...]) -> Iterator[tuple[int, Place]]:
    """(first step, place) of each chunk: by their numbers, which `unsealed` compares with their checksums."""
    with _opened(path) as file:
        end, line = file.seek(0, os.SEEK_END), b""
        file.seek(0)
        while not line.endswith(b"\n") and len(line) < _LINE and (byte := file.read(1)):
            line += byte
        try:
            of = json.loads(line)["run"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StorageError(f"{path} is no file of words: its first line is not the JSON of one.") from error
        if of != token:
            raise StorageError(f"{path} is of another run: {of}, not {token}.")
        offset = len(line)
        while offset < end:
            file.seek(offset)
            numbers = file.read(_NUMBERS.size)
            first, _, count, _ = _NUMBERS.unpack(numbers) if len(numbers) == _NUMBERS.size else (0, 0, end, 0)
            size = _NUMBERS.size + _DIGEST + 2 * count * math.prod(shape)
            if offset + size > end:
                raise StorageError(f"{path} was changed or cut off: it ends within the digits of the steps from {first}.")
            yield first, Place(offset, size)
            offset += size


_AT_ONCE = 2**30  # bytes; Linux reads less than 2 GiB at a call


def _read(file: BinaryIO, size: int) -> bytearray:
    """So many bytes, or what there is."""
    content, done = bytearray(size), 0
    with memoryview(content) as whole:
        while done < size and (count := file.readinto(whole[done : done + _AT_ONCE])):  # type: ignore[attr-defined]
            done += count
    del content[done:]
    return content


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[BinaryIO]:
    try:
        descriptor = os.open(path, _READ)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError("it is no file")
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}. The run must be trained again.") from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        yield file


def _locked(folder: pathlib.Path) -> int:
    part = folder / "lock.part"  # so that nobody sees a lock which nobody holds yet
    descriptor = os.open(part, _CREATE, 0o666)
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    part.rename(folder / "lock")
    return descriptor


def _remove_left_over(folder: pathlib.Path) -> None:
    """What processes have left that were killed: their locks went with them. Nothing that is not ours is touched."""
    for lock in folder.glob("words-*/lock") if fcntl is not None else ():
        with contextlib.suppress(OSError):
            if not _OURS.fullmatch(lock.parent.name) or not all(map(_FILES.fullmatch, os.listdir(lock.parent))):
                continue
            descriptor = os.open(lock, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _close(descriptors: list[int], folder: Any, process: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    if folder is not None and os.getpid() == process:  # a fork has the descriptors too, and the files are not its own
        shutil.rmtree(folder, ignore_errors=True)
