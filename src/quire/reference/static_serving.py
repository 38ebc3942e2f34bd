"""Static batching and contiguous allocation: what continuous batching and blocks are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class StaticBatch(NamedTuple):
    """Steps that a batch takes, and the share of its places that work: all wait for the longest answer."""

    requests: tuple[int, ...]
    steps: int
    used: float


def static_batches(outputs: Sequence[int], size: int) -> Iterator[StaticBatch]:
    """Batches of `size` requests in the order they came; `outputs` are the tokens of each one's answer."""
    for at in range(0, len(outputs), size):
        lengths = outputs[at : at + size]
        steps = max(lengths)
        yield StaticBatch(tuple(range(at, at + len(lengths))), steps, sum(lengths) / (steps * size))


class Contiguous:
    """A cache that sets aside a run of places for each sequence's longest answer, in the first gap that holds it."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._runs: dict[str, tuple[int, int]] = {}  # name -> first place, number

    def allocate(self, name: str, longest: int) -> int | None:
        """The first place of a new run, or None where no gap is large enough, however much is free in all."""
        start = 0
        for first, count in sorted(self._runs.values()):
            if first - start >= longest:
                break
            start = first + count
        if self.places - start < longest:
            return None
        self._runs[name] = start, longest
        return start

    def free(self, name: str) -> None:
        """Give a sequence's run back."""
        del self._runs[name]

    @property
    def free_places(self) -> int:
        return self.places - sum(count for _, count in self._runs.values())


def paged_waste(lengths: Sequence[int], block_size: int) -> list[int]:
    """Places of each sequence's last block that hold nothing: at most block_size − 1."""
    return [-length % block_size for length in lengths]
