"""A typed view of one JSON object of a checkpoint: every value is checked for type and range when read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar, overload

from quire.types import CheckpointError, UnsupportedModelError

T = TypeVar("T")


class _Required:
    """Marks a key that has no default."""


REQUIRED: Final = _Required()
_SHOWN = 80  # characters of an offending value in a message


def show(value: object) -> str:
    """`value` as JSON-like text of bounded length, for messages."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class ConfigReader:
    """Reads typed values from a JSON object. A missing or null key takes its default.

    `where` names the object in messages. `notices` collects keys that are deliberately ignored.

    Raises CheckpointError, naming key and limit, for a missing required key, a wrong JSON type, or a number
    out of range.
    """

    def __init__(
        self, values: Mapping[str, object], where: str = "config.json", notices: list[str] | None = None
    ) -> None:
        self.values = values
        self.where = where
        self.notices: list[str] = [] if notices is None else notices

    def has(self, key: str) -> bool:
        """True when the key is present and not null."""
        return self.values.get(key) is not None

    def error(self, key: str, message: str) -> CheckpointError:
        """Return the exception for a malformed value."""
        return CheckpointError(f"{self.where}: {key}: {message}")

    def unsupported(self, key: str, why: str) -> UnsupportedModelError:
        """Return the exception for a valid value that is not implemented."""
        value = show(self.values.get(key))
        return UnsupportedModelError(f"{self.where}: {key} = {value} is not supported: {why}")

    @overload
    def integer(self, key: str, default: int | _Required = ..., *, low: int = ..., high: int) -> int: ...
    @overload
    def integer(self, key: str, default: None, *, low: int = ..., high: int) -> int | None: ...
    def integer(
        self, key: str, default: int | _Required | None = REQUIRED, *, low: int = 1, high: int
    ) -> int | None:
        """An integer in [low, high]; floats such as 2.0 are refused."""
        if not self.has(key):
            return self._default(key, default)
        value = self.values[key]
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"{show(value)} is not an integer")
        if not low <= value <= high:
            raise self.error(key, f"{show(value)} is not in [{low}, {high}]")
        return value

    @overload
    def number(self, key: str, default: float | _Required = ..., *, low: float, high: float) -> float: ...
    @overload
    def number(self, key: str, default: None, *, low: float, high: float) -> float | None: ...
    def number(
        self, key: str, default: float | _Required | None = REQUIRED, *, low: float, high: float
    ) -> float | None:
        """A finite number in [low, high]; an integer is accepted."""
        if not self.has(key):
            return self._default(key, default)
        value = self.values[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"{show(value)} is not a number")
        # The range test comes first: it is false for NaN, and a huge integer cannot become a float.
        if not low <= value <= high or not math.isfinite(value):
            raise self.error(key, f"{show(value)} is not in [{low:g}, {high:g}]")
        return float(value)

    def numbers(self, key: str, count: int, *, low: float, high: float) -> tuple[float, ...]:
        """A required list of `count` finite numbers in [low, high]."""
        if not self.has(key):
            raise self.error(key, "is missing")
        value = self.values[key]
        if not isinstance(value, list) or len(value) != count:
            raise self.error(key, f"{show(value)} is not a list of {count} numbers")
        items = ConfigReader({f"{key}[{i}]": item for i, item in enumerate(value)}, self.where)
        return tuple(items.number(name, low=low, high=high) for name in items.values)

    def integers(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in [low, high] of any length; empty if the key is missing."""
        if not self.has(key):
            return ()
        value = self.values[key]
        if not isinstance(value, list):
            raise self.error(key, f"{show(value)} is not a list of integers")
        items = ConfigReader({f"{key}[{i}]": item for i, item in enumerate(value)}, self.where)
        return tuple(items.integer(name, low=low, high=high) for name in items.values)

    def boolean(self, key: str, default: bool) -> bool:
        if not self.has(key):
            return default
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.error(key, f"{show(value)} is not true or false")
        return value

    @overload
    def string(self, key: str, default: str | _Required = ...) -> str: ...
    @overload
    def string(self, key: str, default: None) -> str | None: ...
    def string(self, key: str, default: str | _Required | None = REQUIRED) -> str | None:
        if not self.has(key):
            return self._default(key, default)
        value = self.values[key]
        if not isinstance(value, str):
            raise self.error(key, f"{show(value)} is not a string")
        return value

    def strings(self, key: str) -> Sequence[str] | None:
        """A list of strings, or None if the key is missing."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"{show(value)} is not a list of strings")
        return value

    def child(self, key: str) -> ConfigReader | None:
        """The nested object of `key`, or None if it is missing or empty."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.error(key, f"{show(value)} is not an object")
        return ConfigReader(value, f"{self.where}: {key}", self.notices) if value else None

    def _default(self, key: str, default: T | _Required) -> T:
        if isinstance(default, _Required):
            raise self.error(key, "is missing")
        return default
