"""What of a compiled program's arrays is in memory at once, by kinds of arrays: from what XLA writes of its buffers."""

import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Buffer(NamedTuple):
    shape: str  # as XLA writes it, with the dtype: "f32[10,3]"
    allocation: int
    begin: int  # bytes
    end: int


def live_at_most(lowered: Any, counted: Callable[[str], bool]) -> int:
    """Bytes of the arrays for which `counted(shape)`, at the time when they take the most; arguments and constants are not
    among them. Of XLA:CPU, which compiles what was lowered once more for it."""
    with tempfile.TemporaryDirectory() as folder:
        new = {"xla_debug_buffer_assignment_show_max": time.time_ns() % 2**31}  # in no cache
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True} | new)
        whole = lambda end: max(pathlib.Path(folder).glob(f"*{end}"), key=lambda path: path.stat().st_size).read_text()  # noqa: E731
        buffers = dict(_buffers(whole("after_optimizations-buffer-assignment.txt")))
        ranges = list(_ranges(whole("live-range.txt")))
    counted_ones = [(first, last, buffers[name]) for name, first, last in ranges if name in buffers]
    counted_ones = [(first, last, x) for first, last, x in counted_ones if counted(x.shape)]
    times = {first for first, _, _ in counted_ones}
    return max(_covered([x for first, last, x in counted_ones if first <= time <= last]) for time in times)


def _buffers(text: str) -> Iterator[tuple[str, Buffer]]:
    """(name, buffer) of all that a program sets aside itself."""
    allocation = None
    for line in text.splitlines():
        if found := re.match(r"allocation (\d+): (.*)", line):
            given = re.search("parameter|constant|thread-local", found[2])
            allocation = None if given else int(found[1])
        pattern = r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): ([^\s{]+)"
        if (found := re.match(pattern, line)) and allocation is not None:
            begin = int(found[4])
            yield found[1] + (found[2] or "{}"), Buffer(found[5], allocation, begin, begin + int(found[3]))


def _ranges(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, first, last) of what is live from one instruction to another."""
    listed = text.split("BufferLiveRange:")[1].split("Live ranges at")[0]
    for found in re.finditer(r"^\s+(\S+?):(\d+)-(\d+)$", listed, re.MULTILINE):
        yield found[1], int(found[2]), int(found[3])


def _covered(buffers: list[Buffer]) -> int:
    """Bytes of their union: aliases share a place."""
    total, allocation, end = 0, -1, 0
    for x in sorted(buffers, key=lambda x: x[1:]):
        if x.allocation != allocation:
            allocation, end = x.allocation, 0
        total, end = total + max(x.end - max(x.begin, end), 0), max(x.end, end)
    return total
