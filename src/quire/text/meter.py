"""The budget of a template: steps, characters and seconds, counted as it runs.

One unit is one call, filter, test or visited element, a third of a loop item, or 16 characters. Operations that could
do more than their inputs suggest are estimated *before* they run, so that no single operation can stall or exhaust
memory; the running count stops the rest.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView

from quire.records import dataclass

_CHARS_PER_UNIT = 16
_ITEM_UNITS = 3
MAX_INT_BITS = 4096
_CONTAINERS = (list, tuple, dict, KeysView, ValuesView, ItemsView)
_CLOCK_EVERY = 256  # units between readings of the clock


class LimitExceededError(Exception):
    """A template exceeded a limit. Not a subclass of exceptions that jinja2 or its filters catch."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one rendering.

    `source_chars` of template text; `output_chars` of rendered text; `value_chars` of any one intermediate
    text; `items` of any one list; `width` of padding, indents and number formats; `int_bits` of integers
    made by arithmetic; `steps` in the units above, to which the size of the input is added; `seconds` of
    wall time.
    """

    source_chars: int = 1 << 20
    output_chars: int = 1 << 23
    value_chars: int = 1 << 23
    items: int = 1_000_000
    width: int = 4096
    int_bits: int = MAX_INT_BITS
    steps: int = 2_000_000
    seconds: float = 10.0


class Meter:
    """The use of one rendering. Raises LimitExceededError naming a limit that is exceeded."""

    __slots__ = ("_clock_at", "_deadline", "_left", "limits")

    def __init__(self, limits: TemplateLimits, input_size: int = 0) -> None:
        self.limits = limits
        self._left = limits.steps + input_size
        self._clock_at = self._left - _CLOCK_EVERY
        self._deadline = time.monotonic() + limits.seconds

    def spend(self, units: int = 1) -> None:
        self._left -= units
        if self._left < self._clock_at:
            self._clock_at = self._left - _CLOCK_EVERY
            if self._left < 0:
                raise LimitExceededError(f"it took more than {self.limits.steps} steps")
            if time.monotonic() > self._deadline:
                raise LimitExceededError(f"it took more than {self.limits.seconds:g} seconds")

    def text(self, chars: int) -> None:
        """Account for a text of `chars` characters, existing or about to exist."""
        if chars > self.limits.value_chars:
            raise LimitExceededError(
                f"it made a text of {chars} characters, more than the limit of {self.limits.value_chars}"
            )
        self.spend(1 + chars // _CHARS_PER_UNIT)

    def items(self, items: int) -> None:
        """Account for a list of `items` elements."""
        if items > self.limits.items:
            raise LimitExceededError(
                f"it made a list of {items} items, more than the limit of {self.limits.items}"
            )
        self.spend(1 + items // 16)

    def width(self, width: int) -> None:
        if width > self.limits.width:
            raise LimitExceededError(
                f"it padded to a width of {width}, more than the limit of {self.limits.width}"
            )

    def bits(self, bits: int) -> None:
        if bits > self.limits.int_bits:
            raise LimitExceededError(
                f"it made an integer of {bits} bits, more than the limit of {self.limits.int_bits}"
            )

    def each(self, items: Iterable[object]) -> Iterator[object]:
        """Yield the items, and account for each pass through a loop."""
        for item in items:
            self.spend(_ITEM_UNITS)
            yield item

    def result(self, value: object) -> None:
        """Account for the result of an operation."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, list | tuple | dict):
            self.items(len(value))
        else:
            self.spend()

    def deep(self, value: object) -> int:
        """Estimate the characters of `value` as text; shared parts count each time they would be printed.

        Lists can share elements, so a small value can print, compare or sort like an exponentially large one; this walk
        prevents it.
        """
        if isinstance(value, str):
            self.text(len(value))
            return len(value)
        if not isinstance(value, _CONTAINERS):
            self.spend()
            return 32
        chars = 0
        stack: list[object] = [value]
        while stack:
            node = stack.pop()
            if isinstance(node, str):
                chars += len(node) + 4
                self.spend(1 + len(node) // _CHARS_PER_UNIT)
            elif isinstance(node, _CONTAINERS):
                self.spend(1 + len(node))
                chars += 4 * len(node) + 2
                stack.extend(node)
                if isinstance(node, dict):
                    stack.extend(node.values())
            else:
                chars += 32
            if chars > self.limits.value_chars:
                self.text(chars)
        return chars
