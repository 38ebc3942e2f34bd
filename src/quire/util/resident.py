"""Resident memory of a process by part. Outside Linux only the sum is known.

A page of a file that several processes map, such as the code of a library, counts in each of them.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterable
from pathlib import Path

from quire.util.platform import resident_bytes

Area = tuple[str, int, int]  # name, address, bytes

_MAPPING = re.compile(rb"^([0-9a-f]+)-[0-9a-f]+ \S+ \S+ \S+ (\d+) *(.*)$")
_PRESENT = 2**63
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CODE = "code and data of programs and libraries"
_HEAP = "heap and stacks"


def resident_parts(pid: int, areas: Iterable[Area]) -> dict[str, int]:
    """Resident bytes of a process by part: the areas, files, and the rest. Their sum is the resident set.

    An area that is a mapped file is handled like any other: its resident part is mapped.
    """
    parts: dict[str, int] = {}
    inside: dict[str, int] = {}
    for name, address, size in areas:
        held = _present(pid, address, size)
        parts[name] = parts.get(name, 0) + held
        inside[name] = inside.get(name, 0) + held
    files, others = _smaps(pid)
    begins = sorted((address, address + size) for _, address, size in areas)
    of_files = sum(held for address, held in files if not any(a <= address < b for a, b in begins))
    in_files = sum(held for address, held in files if any(a <= address < b for a, b in begins))
    parts[_CODE] = of_files
    parts[_HEAP] = max(0, others + in_files - sum(inside.values()))
    return parts


def _smaps(pid: int) -> tuple[list[tuple[int, int]], int]:
    """Unchanged pages of files by the address of their mapping, and the bytes of all other pages."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_bytes().splitlines()
    except OSError:
        return [], resident_bytes() if pid == os.getpid() else 0  # a process that has ended holds nothing
    files: list[tuple[int, int]] = []
    address, is_file, held, others = 0, False, 0, 0
    for line in lines:
        if line.startswith(b"Rss:"):
            held = int(line.split()[1]) * 1024
        elif line.startswith(b"Anonymous:"):  # comes after Rss, in each mapping
            changed = int(line.split()[1]) * 1024 if is_file else held
            others += changed
            if held > changed:
                files.append((address, held - changed))
        elif b":" not in line[:8] or b"-" in line[:20]:
            mapping = _MAPPING.match(line)
            if mapping is not None:
                address, is_file = int(mapping[1], 16), mapping[2] != b"0"
    return files, others


def _present(pid: int, address: int, size: int) -> int:
    """Resident bytes of an area; see proc_pid_pagemap(5)."""
    first, last = address // _PAGE, -(-(address + size) // _PAGE)
    entries = array("Q")
    try:
        with Path(f"/proc/{pid}/pagemap").open("rb") as file:
            file.seek(8 * first)
            entries.frombytes(file.read(8 * (last - first)))
    except OSError:
        return 0
    return _PAGE * sum(entry >= _PRESENT for entry in entries)
