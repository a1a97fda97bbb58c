"""Files in a folder that others can write to as well: read without trust, written without harm.

Invariant: no symbolic link is followed, no file that exists is written to, nothing is read that is longer than it may be.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import stat
from typing import Any


# Without O_NONBLOCK to open a named pipe would wait for its other end. Windows knows neither.
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class Damaged(Exception):
    """Why a file cannot be used: a phrase that goes behind its name."""


class Missing(Damaged):
    """There is no such file."""


def read(path: pathlib.Path, limit: int) -> bytes:
    """All of a regular file of at most `limit` bytes."""
    try:
        with os.fdopen(os.open(path, _READ), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise Damaged("is not a regular file")
            if found.st_size > limit:
                raise Damaged(f"has {found.st_size} bytes, where at most {limit} are expected")
            return file.read(found.st_size)  # not `limit`: so much memory would be taken
    except FileNotFoundError as error:
        raise Missing("is missing") from error
    except OSError as error:
        link = error.errno in (errno.ELOOP, errno.EMLINK)
        raise Damaged("is a symbolic link, and is not followed" if link else f"cannot be read ({error.strerror})") from error


def write_new(path: pathlib.Path, content: bytes) -> None:
    """A file that was not there before, on disk when this returns, and not there when it does not. FileExistsError if
    anything has its name."""
    with os.fdopen(os.open(path, _CREATE, 0o666), "wb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def settle(folder: pathlib.Path) -> None:
    """The names in the folder too survive a power cut."""
    with contextlib.suppress(OSError):  # a folder cannot be opened everywhere
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sealed(content: dict[str, Any]) -> bytes:
    """JSON whose first entry is a checksum of all that follows it, byte by byte."""
    rest = json.dumps(content, indent=1).encode()[1:]
    return b'{\n "sha256": "' + digest(rest).encode() + b'",' + rest


_SEAL = re.compile(rb'\{\n "sha256": "([0-9a-f]{64})",')


def unsealed(content: bytes) -> dict[str, Any]:
    """The inverse of `sealed`: its entries, the checksum left out."""
    seal = _SEAL.match(content)
    if seal is None or seal[1].decode() != digest(content[seal.end() :]):
        raise Damaged("is damaged or was edited: it does not match its own checksum")
    entries = parsed(content)
    del entries["sha256"]
    return entries


def parsed(content: bytes) -> dict[str, Any]:
    """The mapping that JSON text stands for."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # wrong text, wrong UTF-8, numbers of 4,301 digits; nested without end
        raise Damaged(f"is not JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise Damaged("holds no mapping")
    return value


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
