"""Sets of strings: what keywords leave of them, as a regular language and as an expression of a terminal."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from quire.records import dataclass
from quire.structured.json_schema.ecma_patterns import read_pattern
from quire.structured.json_schema.languages import ANY_TEXT, Language, Languages, lark
from quire.structured.json_schema.refusal import MAX_ENDLESS
from quire.structured.json_schema.string_formats import LONGEST, format_pattern

ANY_STRING = f'"\\"" /{ANY_TEXT}/ "\\""'
_MAX_FORMAT = 1_000_000
# Made once: json.dumps makes one for each of what may be 40,000 values.
_AS_IT_IS, _IN_ASCII = json.JSONEncoder(ensure_ascii=False), json.JSONEncoder()


@dataclass(frozen=True, slots=True)
class Strings:
    """The strings of a language; if `listed` is given, those of it that the language has."""

    language: Language
    listed: frozenset[str] | None = None

    def values(self, languages: Languages, limit: int) -> list[str] | None:
        """All strings of the set if they are at most `limit`; None for more."""
        if self.listed is not None:
            return [word for word in sorted(self.listed) if languages.matches(self.language, word)]
        return languages.listed(self.language, limit)

    def empty(self, languages: Languages) -> bool:
        if self.listed is not None:
            return not self.values(languages, 0)
        return languages.empty(self.language)


class StringSets:
    """Gathers sets of strings; patterns and formats are read once."""

    def __init__(self, languages: Languages) -> None:
        self.languages = languages
        self._patterns: dict[str, Language] = {}
        self._formats: dict[str, Language] = {}

    def pattern(self, text: str) -> Language:
        """Raises PatternError."""
        if text not in self._patterns:
            self._patterns[text] = read_pattern(self.languages, text)
        return self._patterns[text]

    def format(self, name: str) -> Language | None:
        """The language of a format; None if the format is not known."""
        if name not in self._formats:
            text = format_pattern(name)
            if text is None:
                return None
            of = self.languages
            parts = [read_pattern(of, text, _MAX_FORMAT)]
            if name in LONGEST:
                parts.append(of.rep(of.anything, 0, LONGEST[name]))
            self._formats[name] = of.both(*parts)
        return self._formats[name]

    def gather(self, atoms: tuple[tuple[Any, ...], ...]) -> Strings | None:
        """The strings that satisfy all atoms; None if there are none at once."""
        of, listed, low, high = self.languages, None, 0, MAX_ENDLESS
        banned: frozenset[str] = frozenset()
        parts: list[Language] = []
        for kind, *rest in atoms:
            value = rest[0]
            if kind == "size":
                low, high = max(low, value), min(high, rest[1])
            elif kind == "in":
                listed = value if listed is None else listed & value
            elif kind == "out":
                banned |= value
            else:
                language = self.pattern(value) if kind == "pattern" else self.format(value)
                assert language is not None
                parts.append(language if rest[1] else of.no(language))
        if low > high or listed == frozenset():
            return None
        if low > 0 or high < MAX_ENDLESS:
            parts.append(of.rep(of.anything, low, high if high < MAX_ENDLESS else None))
        if banned and listed is None:
            parts.append(of.no(of.words(sorted(banned))))
        language = of.both(*parts)
        return Strings(language, None if listed is None else listed - banned)

    def expression(self, strings: Strings) -> str | None:
        """The texts of a set as an expression of a terminal; None if there are none."""
        if strings.listed is not None:
            words = strings.values(self.languages, 0) or []
            return " | ".join(literal(json_text(word)) for word in words) or None
        if self.languages.empty(strings.language):
            return None
        return quoted_expression(self.languages, strings.language)


def quoted_expression(languages: Languages, language: Language) -> str:
    """The texts of a language as an expression of a terminal."""
    return ANY_STRING if language is languages.every else f'"\\"" {lark(language)} "\\""'


@cache
def format_expression(name: str) -> str:
    """The texts of all strings of a format as an expression of a terminal."""
    sets = StringSets(Languages())
    strings = sets.gather((("format", name, True),))
    assert strings is not None
    return sets.expression(strings) or ""


def json_text(word: str) -> str:
    """A string as JSON text, with the escapes that it needs."""
    return _AS_IT_IS.encode(word)


def literal(text: str) -> str:
    """Text as a literal of a grammar."""
    return _IN_ASCII.encode(text).replace("\\u007f", "\\x7f") if text else '""'
