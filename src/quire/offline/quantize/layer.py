"""The weights of a layer while it is quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from quire.loader.renamed import renamed
from quire.loader.source import Array, Source, TensorInfo
from quire.quant.floats import from_float32, to_float32
from quire.spec.model import ModelSpec

F32 = npt.NDArray[np.float32]


class LayerWeights:
    """Tensors by the program's names, float32; what is put here is written in place of what was read."""

    def __init__(self, source: Source, stored: Mapping[str, str]) -> None:
        self._source, self._stored = source, stored
        self.changed: dict[str, F32] = {}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._stored

    def stored(self, tensor: str) -> str:
        """Its name in the checkpoint."""
        return self._stored[tensor]

    def __getitem__(self, tensor: str) -> F32:
        found = self.changed.get(tensor)
        if found is not None:
            return found
        name = self._stored[tensor]
        data = np.array(self._source.read(name))
        self._source.release(name)
        return to_float32(data, self._source.info(name).dtype)

    def __setitem__(self, tensor: str, values: F32) -> None:
        self.changed[tensor] = values

    def written(self, tensor: str) -> tuple[TensorInfo, Array]:
        """A tensor in the format of the checkpoint."""
        name = self._stored[tensor]
        info = self._source.info(name)
        if tensor in self.changed:
            return TensorInfo(name, info.dtype, info.shape), from_float32(self.changed[tensor], info.dtype)
        return TensorInfo(name, info.dtype, info.shape), self._source.read(name)


def stored_names(spec: ModelSpec, source: Source, twins: Mapping[str, str]) -> dict[str, str]:
    """The program's name of every tensor -> its name in the checkpoint."""
    found = {renamed(name, spec.prefixes): name for name in source.names()}
    for asked, other in twins.items():
        if asked not in found and other in found:
            found[asked] = found[other]
    return found


class Replaced:
    """A source with the numbers of some tensors replaced, by their stored names. Implements Source."""

    def __init__(self, source: Source, values: Mapping[str, F32]) -> None:
        self._source, self._values = source, values

    def names(self) -> Iterable[str]:
        return self._source.names()

    def info(self, name: str) -> TensorInfo:
        if name in self._values:
            return TensorInfo(name, "F32", self._values[name].shape)
        return self._source.info(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        return (
            self._values[name][start:stop] if name in self._values else self._source.read(name, start, stop)
        )

    def release(self, name: str) -> None:
        self._source.release(name)
