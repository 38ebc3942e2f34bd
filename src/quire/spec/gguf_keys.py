"""Typed reads of GGUF metadata for its translation into a config; see spec/gguf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader, show
from quire.types import CheckpointError, UnsupportedModelError

Config = dict[str, object]
_MAX_NUMBER = 1e15


@dataclass(frozen=True, slots=True)
class GGUFSummary:
    """A file as the translation needs it. `where` names it; `metadata` has plain values and arrays (numpy arrays, or
    objects whose `numbers()` returns one); `shapes` are the sizes of tensors, outermost first; `stored` the tensor
    types by name; `vector` reads a small float tensor; `control` are the texts of control tokens by id; `sha256` is
    that of the header.
    """

    where: str
    metadata: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, str]
    vector: Callable[[str], Sequence[float]]
    control: Callable[[], Mapping[int, str]]
    sha256: str


class Keys:
    """Typed reads of `{architecture}.{key}`; records the keys that were read."""

    def __init__(self, summary: GGUFSummary, architecture: str, notices: list[str]) -> None:
        self.summary, self.architecture = summary, architecture
        self.reader = ConfigReader(summary.metadata, summary.where, notices)
        self.read: set[str] = set()

    def _name(self, key: str) -> str:
        name = f"{self.architecture}.{key}"
        self.read.add(name)
        return name

    def has(self, key: str) -> bool:
        return self.reader.has(self._name(key))

    def has_tensor(self, name: str) -> bool:
        return name in self.summary.shapes

    def integer(self, key: str, high: int, *, low: int = 1) -> int:
        return self.reader.integer(self._name(key), low=low, high=high)

    def integer_or(self, key: str, default: int, high: int) -> int:
        return self.reader.integer(self._name(key), default, low=0, high=high)

    def number(self, key: str, default: float | None = None) -> float | None:
        return self.reader.number(self._name(key), default, low=-_MAX_NUMBER, high=_MAX_NUMBER)

    def string(self, key: str, default: str) -> str:
        return self.reader.string(self._name(key), default)

    def boolean(self, key: str, default: bool) -> bool:
        return self.reader.boolean(self._name(key), default)

    def flags(self, key: str, count: int) -> list[bool] | None:
        """A list of `count` booleans or 0/1 integers; None if the value is a single one or missing."""
        value = self.summary.metadata.get(self._name(key))
        numbers = _numbers(value)
        if numbers is None:
            return None
        if numbers.ndim != 1 or numbers.dtype.kind not in "biu" or len(numbers) != count:
            raise self.error(key, f"{show(value)} is not a list of {count} booleans")
        return [bool(number) for number in numbers]

    def error(self, key: str, message: str) -> CheckpointError:
        return self.reader.error(self._name(key), message)

    def unsupported(self, key: str, why: str) -> UnsupportedModelError:
        return self.reader.unsupported(self._name(key), why)


def _numbers(value: object) -> npt.NDArray[np.generic] | None:
    """The numbers of a metadata array; None for anything else, such as an array of strings."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "numbers") or getattr(value, "holds_strings", False):
        return None
    found: npt.NDArray[np.generic] = value.numbers()
    return found
