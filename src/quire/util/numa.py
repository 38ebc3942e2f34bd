"""Processors by the memory that is near them (NUMA nodes), and which of them each of several processes takes.

A process that stays on the processors of a node has its memory there: the kernel gives a page from the node of the
thread that writes to it first.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from quire.records import dataclass

_NODES = Path("/sys/devices/system/node")
_ANYWHERE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """A node, the processors of it that this process may use, and the bytes of its memory."""

    number: int
    cores: frozenset[int]
    nbytes: int


def memory_nodes(root: Path = _NODES) -> tuple[MemoryNode, ...]:
    """The nodes with processors that this process may use, in order; none where the kernel does not tell."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    found = []
    for folder in root.glob("node[0-9]*"):
        try:
            cores = frozenset(parsed_cores((folder / "cpulist").read_text())) & usable
            lines = (folder / "meminfo").read_text().splitlines()
        except OSError:
            continue
        total = next((int(line.split()[3]) * 1024 for line in lines if "MemTotal" in line), 0)
        if cores:
            found.append(MemoryNode(int(folder.name.removeprefix("node")), cores, total))
    return tuple(sorted(found, key=lambda node: node.number))


def parsed_cores(text: str) -> list[int]:
    """The numbers of a list of the kernel's, such as "0-3,8"."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores += range(int(first), int(last or first) + 1)
    return cores


def near(nodes: Sequence[MemoryNode], processes: int) -> list[frozenset[int]]:
    """Processors for each of several processes; an empty set is any, where there is one node.

    Neighbours share a node where there are more processes than nodes, and have several nodes where there are fewer.
    """
    count = len(nodes)
    if count < 2:
        return [_ANYWHERE] * processes
    if processes >= count:
        return [nodes[number * count // processes].cores for number in range(processes)]
    bounds = [number * count // processes for number in range(processes + 1)]
    return [_ANYWHERE.union(*(node.cores for node in nodes[first:stop])) for first, stop in pairwise(bounds)]


def rank_cores(ranks: int, hosts: int = 1) -> list[frozenset[int]]:
    """Processors of each of several ranks, as many of which are on each of `hosts` like this one; see `near`. None for
    no ranks, which is what a model of one has."""
    if not ranks:
        return []
    return near(memory_nodes(), ranks // hosts) * hosts


def stay_on(cores: Collection[int]) -> None:
    """Have the calling thread, and what it starts, run on these processors only; anywhere if there are none."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def staying_on(cores: Collection[int]) -> Iterator[None]:
    """`stay_on` for a while: what is started meanwhile stays there."""
    before = os.sched_getaffinity(0) if cores else ()
    stay_on(cores)
    try:
        yield
    finally:
        stay_on(before)
