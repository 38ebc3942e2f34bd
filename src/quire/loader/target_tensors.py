"""Tensors of one checkpoint beside those of another: what a draft takes of its target, when it holds it itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from quire.loader.source import Array, CodesSource, PrefetchingSource, Source, TensorInfo
from quire.program.formats import WeightFormat
from quire.quant import GroupCodes


class TargetTensors:
    """`source`, and some tensors of `other`: name here -> name there. Implements Source."""

    def __init__(self, source: Source, other: Source, taken: Mapping[str, str]) -> None:
        self._source, self._other, self._taken = source, other, taken

    def _at(self, name: str) -> tuple[Source, str]:
        return (self._other, self._taken[name]) if name in self._taken else (self._source, name)

    def names(self) -> Iterable[str]:
        return [*self._source.names(), *self._taken]

    def info(self, name: str) -> TensorInfo:
        source, there = self._at(name)
        return replace(source.info(there), name=name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        source, there = self._at(name)
        return source.read(there, start, stop)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        source, there = self._at(name)
        if isinstance(source, PrefetchingSource):
            source.prefetch(there, start, stop)

    def packed(self, name: str) -> WeightFormat | None:
        """See CodesSource; None if the source has no codes."""
        source, there = self._at(name)
        return source.packed(there) if isinstance(source, CodesSource) else None

    def read_codes(self, name: str, start: int, stop: int) -> GroupCodes:
        source, there = self._at(name)
        assert isinstance(source, CodesSource)
        return source.read_codes(there, start, stop)

    def release(self, name: str) -> None:
        source, there = self._at(name)
        source.release(there)
