"""Pages of memory that an idle engine gives back to the system, and gets again when it touches them."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from quire.util.resident import Area

_CACHE = "kv"  # the area of keys and values: nothing is read there before it is written
_MAP_FIXED = 0x10
_LINE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r(.).. \S+ \S+ (\d+)")


def give_pages(areas: Iterable[Area]) -> int:
    """Give back the pages of cached keys and values, which are lost, and those of files that are mapped to be
    read, which are read again. Weights that were packed in memory stay. Returns the bytes that were given
    back.
    """
    files, given, libc = _read_only_files(), 0, ctypes.CDLL(None)
    for name, address, size in areas:
        whole = (address, address + size)
        for begin, end in [whole] if name == _CACHE else _within(files, *whole):
            first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            length = last - first
            if length <= 0:
                continue
            failed = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
            given += 0 if failed else length
    return given


def write_through(fd: int, address: int, size: int) -> Callable[[], None]:
    """Have pages of this process, which nothing was written to, in a file of that size: what is written there is
    written to it. Returns what lets those go that are in memory. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    place, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(place, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, ctypes.c_long(0)) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return lambda: libc.madvise(place, length, mmap.MADV_DONTNEED)


def _within(ranges: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    return [(max(begin, first), min(end, last)) for first, last in ranges if first < end and last > begin]


def _read_only_files() -> list[tuple[int, int]]:
    """Addresses of mapped files that this process cannot have changed."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = _LINE.match(line)
        if match is not None and match[3] == "-" and match[4] != "0":
            found.append((int(match[1], 16), int(match[2], 16)))
    return found
