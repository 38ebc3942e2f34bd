"""A source whose tensor names differ from those of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from quire.loader.source import Array, CodesSource, PrefetchingSource, Source, TensorInfo
from quire.program.formats import WeightFormat
from quire.quant.groups import GroupCodes
from quire.types import CheckpointError


class Renamed:
    """`source` with prefixes of its names replaced: the first of `prefixes` (stored, wanted) that matches.

    Implements Source. Raises CheckpointError if two tensors would get the same name.
    """

    def __init__(self, source: Source, prefixes: Sequence[tuple[str, str]]) -> None:
        self._source = source
        self._codes_source = source if isinstance(source, CodesSource) else None
        self._stored: dict[str, str] = {}
        for name in source.names():
            wanted = renamed(name, prefixes)
            if wanted in self._stored:
                raise CheckpointError(
                    f"tensors {self._stored[wanted]} and {name} have the same name in the model"
                )
            self._stored[wanted] = name

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def info(self, name: str) -> TensorInfo:
        found = self._source.info(self._stored[name])
        return replace(found, name=name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        return self._source.read(self._stored[name], start, stop)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        if isinstance(self._source, PrefetchingSource):
            self._source.prefetch(self._stored[name], start, stop)

    def packed(self, name: str) -> WeightFormat | None:
        """See CodesSource; None if the source has no codes."""
        return self._codes_source.packed(self._stored[name]) if self._codes_source is not None else None

    def read_codes(self, name: str, start: int, stop: int) -> GroupCodes:
        assert self._codes_source is not None
        return self._codes_source.read_codes(self._stored[name], start, stop)

    def release(self, name: str) -> None:
        self._source.release(self._stored[name])


def renamed(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """`name` with the first of `prefixes` that it begins with replaced."""
    for stored, wanted in prefixes:
        if name.startswith(stored):
            return wanted + name.removeprefix(stored)
    return name
