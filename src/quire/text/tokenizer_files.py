"""Read the untrusted files of a tokenizer folder.

A native library loads `tokenizer.json`, and its cost of loading and pre-tokenization depends on the file. So its size,
the number of entries and every regular expression in it are checked before the library gets it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from quire.records import dataclass
from quire.types import CheckpointError
from quire.util.files import open_regular

# Unsupported vocabularies, by file name.
OTHER_VOCABULARIES = {
    "tokenizer.model": "a SentencePiece model",
    "tekken.json": "a Mistral Tekken vocabulary",
    "tiktoken.model": "a tiktoken vocabulary",
    "vocab.json": "a bare vocabulary",
    "vocab.txt": "a bare vocabulary",
}

MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_SIDE_FILE_BYTES = 32 * 2**20
MAX_TEMPLATE_BYTES = 1 * 2**20
# Every vocabulary entry and merge costs at least one comma. The largest published vocabularies (256k
# entries with their merges as pairs) have about 2 million.
MAX_JSON_COMMAS = 16_000_000
MAX_REGEX_CHARS = 8192
MAX_REGEXES = 64
MAX_REGEX_REPEAT = 1000

_REGEX_KEY = b'"Regex"'
_REGEX_VALUE = re.compile(rb'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")', re.DOTALL)
# JSON may spell the key with escapes ("Regex"); no writer does, so such a file takes the slow path.
ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")


@dataclass(frozen=True, slots=True)
class LoadBudget:
    """Bounds on a tokenizer folder: sizes in bytes, `commas` counts JSON separators in tokenizer.json."""

    tokenizer_bytes: int = MAX_TOKENIZER_BYTES
    side_file_bytes: int = MAX_SIDE_FILE_BYTES
    template_bytes: int = MAX_TEMPLATE_BYTES
    commas: int = MAX_JSON_COMMAS


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises CheckpointError naming the file."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path.name} has {size} bytes, more than the limit of {limit}")
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from None
    if len(data) > limit:  # it grew between stat and read
        raise CheckpointError(f"{path.name} exceeds the limit of {limit} bytes")
    return data


def read_text(path: Path, limit: int) -> str:
    """Read the UTF-8 text of a bounded file."""
    try:
        return read_bounded(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8 text: {error}") from None


def read_json_object(path: Path, limit: int) -> dict[str, object]:
    """Read the JSON object in a bounded file, {} if the file does not exist."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must contain a JSON object, not {type(value).__name__}")
    return value


def check_tokenizer_json(data: bytes, budget: LoadBudget) -> None:
    """Raise CheckpointError if loading or running this tokenizer.json could cost too much."""
    commas = data.count(b",") if len(data) > budget.commas else 0  # counting ten million takes a while
    if commas > budget.commas:
        raise CheckpointError(
            f"tokenizer.json has {commas} JSON elements, more than the limit of {budget.commas}"
        )
    patterns = list(_regexes(data))
    if len(patterns) > MAX_REGEXES:
        raise CheckpointError(
            f"tokenizer.json has {len(patterns)} regular expressions, more than the limit of {MAX_REGEXES}"
        )
    for pattern in patterns:
        check_regex(pattern)


def check_regex(pattern: str) -> None:
    """Raise CheckpointError for a pattern that can backtrack exponentially or compile to something huge.

    A group that repeats without bound must have one fixed shape (no alternation, no variable quantifier inside), and
    the product of counted repeats stays below 1000. Every published tokenizer pattern obeys this; ambiguous repeats
    that make backtracking explode, such as (a+)+ or (a|aa)*, do not.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        raise CheckpointError(
            f"tokenizer.json: a regular expression has {len(pattern)} characters, limit {MAX_REGEX_CHARS}"
        )
    # One frame per group: whether it has alternation or a variable quantifier, and the product of counted repeats.
    stack: list[_Group] = [_Group()]
    last: _Group | None = None  # the group that just closed, None if the last atom was a single character
    position = 0
    while position < len(pattern):
        char = pattern[position]
        if char == "(":
            stack.append(_Group())
            position = _skip_group_head(pattern, position + 1)
            last = None
            continue
        if char == ")" and len(stack) > 1:
            last = stack.pop()
            stack[-1].loose |= last.loose
            stack[-1].repeats = max(stack[-1].repeats, last.repeats)
        elif char == "|":
            stack[-1].loose = True
            last = None
        elif char == "[":
            position = _skip_class(pattern, position)
            last = None
            continue
        elif quantifier := _QUANTIFIER.match(pattern, position):
            _quantify(pattern, quantifier, stack[-1], last)
            position = quantifier.end()
            last = None
            continue
        else:
            position += char == "\\"
            last = None
        position += 1


@dataclass(slots=True)
class _Group:
    loose: bool = False
    repeats: int = 1


_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d{0,9})(,?)(\d{0,9})\})[?+]?")
_GROUP_HEAD = re.compile(r"\?(?:[:=!>]|<[=!]|P?<\w+>|[a-zA-Z-]*:?)")


def _skip_group_head(pattern: str, position: int) -> int:
    head = _GROUP_HEAD.match(pattern, position)
    return head.end() if head else position


def _skip_class(pattern: str, position: int) -> int:
    """The position after a character class, which may nest ([a&&[^b]]) and start with a literal ]."""
    depth = 0
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 1
        elif char == "[":
            depth += 1
            if pattern.startswith("[^]", position):
                position += 2
            elif pattern.startswith("[]", position):
                position += 1
        elif char == "]":
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return position


def _quantify(pattern: str, quantifier: re.Match[str], outer: _Group, inner: _Group | None) -> None:
    low, comma, high = quantifier.groups()
    counted = low is not None
    unbounded = (bool(comma) and not high) if counted else pattern[quantifier.start()] in "*+"
    count = max(int(low or 0), int(high or 0), 1) if counted else 1
    repeats = count * (inner.repeats if inner else 1)
    if repeats > MAX_REGEX_REPEAT:
        raise CheckpointError(
            f"tokenizer.json: regular expression {pattern[:80]!r} repeats {repeats} times, "
            f"more than the limit of {MAX_REGEX_REPEAT}"
        )
    if inner is not None and inner.loose and (unbounded or count > 4):
        raise CheckpointError(
            f"tokenizer.json: regular expression {pattern[:80]!r} repeats a group whose shape varies, "
            "which can backtrack without bound"
        )
    outer.repeats = max(outer.repeats, repeats)
    outer.loose |= not counted or bool(comma)


def _regexes(data: bytes) -> Iterator[str]:
    # Nearly all of a file is vocabulary: `in` and `find` skip it ten times as fast as a regular expression.
    if b"\\u00" in data and ESCAPED_LETTER.search(data):
        yield from _regexes_of(_parse(data))
        return
    position = data.find(_REGEX_KEY)
    while position >= 0:
        match = _REGEX_VALUE.match(data, position)
        if match is None:
            position = data.find(_REGEX_KEY, position + 1)
            continue
        pattern = _parse(match.group(1))
        assert isinstance(pattern, str)
        yield pattern
        position = data.find(_REGEX_KEY, match.end())


def _parse(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json is not valid JSON: {error}") from None


def _regexes_of(value: object) -> Iterator[str]:
    """Every value of a "Regex" key, at any depth; plain entries of the vocabulary are skipped."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            pattern = node.get("Regex")
            if isinstance(pattern, str):
                yield pattern
            stack.extend(child for child in node.values() if isinstance(child, dict | list))
        elif isinstance(node, list):
            stack.extend(child for child in node if isinstance(child, dict | list))
