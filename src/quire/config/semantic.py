"""The option of a semantic cache: `url=http://host:8009,threshold=0.95,size=64MiB,seconds=3600`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.records import dataclass
from quire.util.sizes import parse_size

_FORM = (
    "write url=URL of a server of embeddings, and if need be key-file=FILE, threshold=S, size=SIZE, seconds=S, "
    "timeout=S, sampled=yes, by commas"
)
LEAST_SIZE = 2**20


@dataclass(frozen=True, slots=True)
class SemanticOptions:
    """Where texts become vectors, and which answers are kept how long.

    url, key_file   a server with /v1/embeddings, and the file of the key that it asks for
    threshold       the cosine that two questions have at least
    size            bytes of vectors, answers and what belongs to them
    seconds         after which an answer is not given any more
    timeout         seconds that a request waits for its vector; after that it goes on without
    sampled         whether requests with a temperature other than 0 are answered too
    """

    url: str
    key_file: str = ""
    threshold: float = 0.95
    size: int = 64 * 2**20
    seconds: float = 3600.0
    timeout: float = 0.5
    sampled: bool = False


def parse_semantic(text: str) -> SemanticOptions:
    """The semantic cache of an option's text. Raises ValueError naming what is wrong."""
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equal, value = part.strip().partition("=")
        if name not in _READERS or not equal or not value or name in given:
            raise ValueError(f"semantic_cache: {part.strip()!r} is not understood; {_FORM}")
        given[name] = value
    if "url" not in given:
        raise ValueError(f"semantic_cache: url: missing; {_FORM}")
    found = {}
    for name, value in given.items():
        try:
            found[name.replace("-", "_")] = _READERS[name](value)
        except ValueError as error:
            raise ValueError(f"semantic_cache: {name}: {error}") from None
    return SemanticOptions(**found)


def _share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise ValueError(f"{text} is not above 0 and up to 1")
    return value


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError(f"{text} is not above 0")
    return value


def _size(text: str) -> int:
    if (value := parse_size(text)) < LEAST_SIZE:
        raise ValueError(f"{text} is below 1MiB")
    return value


def _yes(text: str) -> bool:
    if text not in {"yes", "no"}:
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError(f"{text!r} is not a file")
    return text


_READERS: dict[str, Callable[[str], Any]] = {
    "url": str, "key-file": _file, "threshold": _share, "size": _size, "seconds": _seconds, "timeout": _seconds,
    "sampled": _yes,
}  # fmt: skip
