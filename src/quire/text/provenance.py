"""Track which characters of a text the chat template wrote itself, through all operations of a template.

Only characters that are known to be the template's own count: an operation that is not tracked returns a plain `str`,
which counts as the caller's. So a gap may lose a template's control token, but never gives one to a caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

_OWN = b"\1"
_CONVERSION = re.compile(r"%(?:\((?P<key>[^()]*)\))?[#0\- +]*\d*(?:\.\d*)?[hlL]?(?P<kind>.)", re.DOTALL)
_OWN_RUN = re.compile(b"\1+")
_LONGEST_IN_CHARS = 1 << 16  # a separate character takes about 150 bytes


class TemplateText(str):
    """A text that the template wrote at least in part: `_own` has a 1 per character that it wrote.

    The methods are those of `str`. They return a TemplateText if a character of the template is left.
    """

    __slots__ = ("_own",)
    _own: bytes

    def __new__(cls, text: str, own: bytes | None = None) -> TemplateText:
        self = str.__new__(cls, text)
        self._own = _OWN * len(text) if own is None else own
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return TemplateText(str.__add__(self, other), self._own + own_of(other))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return TemplateText(str.__add__(other, self), own_of(other) + self._own)

    def __mul__(self, times: SupportsIndex) -> str:
        return _text(str.__mul__(self, times), self._own * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return percent(self, values)

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        own = self._own[index]
        return _text(str.__getitem__(self, index), own if isinstance(own, bytes) else bytes((own,)))

    def __iter__(self) -> Iterator[str]:
        if len(self) > _LONGEST_IN_CHARS:
            return str.__iter__(self)
        return map(_text, str.__iter__(self), map(bytes, zip(self._own, strict=True)))

    def upper(self) -> str:
        return self._mapped(str.upper)

    def lower(self) -> str:
        return self._mapped(str.lower)

    def casefold(self) -> str:
        return self._mapped(str.casefold)

    def swapcase(self) -> str:
        return self._mapped(str.swapcase)

    def title(self) -> str:
        return self._mapped(str.title)

    def capitalize(self) -> str:
        return self._mapped(str.capitalize)

    def lstrip(self, chars: str | None = None, /) -> str:
        text = str.lstrip(self, chars)
        return _text(text, self._own[len(self) - len(text) :])

    def rstrip(self, chars: str | None = None, /) -> str:
        text = str.rstrip(self, chars)
        return _text(text, self._own[: len(text)])

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        text = str.removeprefix(self, prefix)
        return _text(text, self._own[len(self) - len(text) :])

    def removesuffix(self, suffix: str, /) -> str:
        text = str.removesuffix(self, suffix)
        return _text(text, self._own[: len(text)])

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._cut(str.splitlines(self, keepends), None)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._cut(str.partition(self, sep), "")
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._cut(str.rpartition(self, sep), "")
        return head, middle, tail

    def join(self, items: Iterable[str], /) -> str:
        items = list(items)
        return _text(str.join(self, items), self._own.join(map(own_of, items)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        text = str.replace(self, old, new, count)
        if not old:  # between all characters: no template needs this
            return text
        kept = self._cut(str.split(self, old, count), old)
        return _text(text, own_of(new).join(map(own_of, kept)))

    def _mapped(self, change: Callable[[str], str]) -> str:
        """Change the case. A character becomes one or more, never none; how many depends on it and the one before."""
        text, own = change(self), self._own
        if len(text) != len(own):
            plain = str.__str__(self)
            befores = ["", *plain[:-1]]
            sizes = (len(change(a + b)) - len(change(a)) for a, b in zip(befores, plain, strict=True))
            own = b"".join(bytes((flag,)) * size for flag, size in zip(own, sizes, strict=True))
        return _text(text, own) if len(text) == len(own) else text

    def _cut(self, pieces: Iterable[str], separator: str | None) -> list[str]:
        """The pieces in order, separated by `separator`; None for white space or line ends."""
        found: list[str] = []
        start = 0
        for piece in pieces:
            if separator is None:
                start = str.find(self, piece, start)
            end = start + len(piece)
            found.append(_text(piece, self._own[start:end]))
            start = end + len(separator or "")
        return found


def own_of(text: str) -> bytes:
    """A 1 per character of the template, a 0 per character of the caller."""
    return text._own if type(text) is TemplateText else bytes(len(text))


def own_spans(text: str) -> tuple[tuple[int, int], ...]:
    """The ranges of characters that the template wrote, ascending."""
    return tuple(match.span() for match in _OWN_RUN.finditer(own_of(text)))


def followed(text: str) -> TemplateText:
    """`text` as a TemplateText, whose methods also track arguments."""
    return text if type(text) is TemplateText else TemplateText(text, bytes(len(text)))


def concat(parts: list[str]) -> str:
    """Join parts to one text."""
    text = "".join(parts)
    if TemplateText not in map(type, parts):
        return text
    made = str.__new__(TemplateText, text)
    made._own = b"".join([part._own if type(part) is TemplateText else bytes(len(part)) for part in parts])
    return made


def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """jinja2's filter of this name."""
    step = width if isinstance(width, str) else " " * width
    head, *lines = followed(text + "\n").splitlines()
    parts = [step if first else "", head]
    for line in lines:
        parts += ["\n", step if line or blank else "", line]
    return concat(parts)


def percent(template: str, values: Any) -> str:
    """`template % values`."""
    text = str.__mod__(template, values)
    rest: Iterator[Any] = iter(values if isinstance(values, tuple) else (values,))
    parts: list[str] = []
    start = 0
    for match in _CONVERSION.finditer(template):
        parts.append(template[start : match.start()])
        start = match.end()
        if match["kind"] == "%":
            parts.append("%")
            continue
        keyed = match["key"] is not None and isinstance(values, Mapping)
        value = values[match["key"]] if keyed else next(rest, None)
        as_it_is = match[0] == "%s" or (keyed and match[0].endswith(")s"))
        one = {match["key"]: value} if keyed else (value,)
        parts.append(value if as_it_is and isinstance(value, str) else str.__mod__(match[0], one))
    parts.append(template[start:])
    result = concat(parts)
    return result if result == text else text


def _text(text: str, own: bytes) -> str:
    return TemplateText(text, own) if _OWN in own else text
