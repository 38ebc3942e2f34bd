"""A bound on how much the steps of a tokenizer can lengthen any text, derived from its JSON.

A normalizer may replace one letter by a thousand, and several steps multiply. The bound of a step is a factor on its
input in bytes of UTF-8; a text that may exceed MAX_GROWN_BYTES is refused before it is processed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from math import ceil, prod
from typing import Any

from quire.text.tokenizer_files import ESCAPED_LETTER
from quire.types import CheckpointError, RequestError

MAX_GROWTH = 1024  # published tokenizers stay below 400, those of language models below 40
MAX_GROWN_BYTES = 1 << 26
MAX_ADDED_AROUND = 1024  # tokens added around a text

_VALUE = re.compile(rb"\s*:\s*[{\[]")
# The largest output of each step for one byte, over all of Unicode; 1 for other steps.
_UNICODE = {"BertNormalizer": 15, "ByteLevel": 2, "Lowercase": 2, "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
_DECODERS = {"BPEDecoder": 2, "ByteLevel": 3, "CTC": 2, "WordPiece": 2}
_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")


def check_normalizer(data: bytes) -> None:
    """Raise CheckpointError if loading this tokenizer.json could cost too much, because the library normalizes the
    added tokens. Reads only the normalizer.
    """
    grown = max((_growth(state, _normalizer) for state in _values(data, "normalizer")), default=1)
    _check_factor(grown, "normalizer")
    if grown * len(data) > MAX_GROWN_BYTES:
        for tokens in _values(data, "added_tokens"):
            contents = [token.get("content") for token in tokens or [] if isinstance(token, dict)]
            check_added([text for text in contents if isinstance(text, str)], grown)


def check_added(contents: Sequence[str], growth: int) -> None:
    """Raise CheckpointError if normalizing these added tokens could cost too much."""
    size = sum(map(len, contents))
    if 4 * size * growth > MAX_GROWN_BYTES:
        raise CheckpointError(
            f"tokenizer.json: added tokens of {size} characters are too long for a normalizer that can make a text "
            f"{growth} times as long"
        )


class Growth:
    """The growth of a text in a loaded tokenizer. Raises CheckpointError if a part has no acceptable bound.

    The arguments are the components of the library in their JSON form.
    """

    def __init__(
        self,
        normalizer: bytes | None,
        pre_tokenizer: bytes | None,
        post_processor: bytes | None,
        decoder: bytes | None,
    ) -> None:
        self.normalizer = _growth(_state(normalizer), _normalizer)
        self.factor = self.normalizer * _growth(_state(pre_tokenizer), _pre_tokenizer)
        _check_factor(self.factor, "normalizer and pre-tokenizer")
        _check_factor(_growth(_state(decoder), _decoder), "decoder")
        _check_around(_state(post_processor))

    def check(self, text: str) -> None:
        """Raise RequestError for a text that could grow too long."""
        if 4 * len(text) * self.factor <= MAX_GROWN_BYTES:
            return
        size = len(text.encode("utf-8", "surrogatepass"))
        if size * self.factor > MAX_GROWN_BYTES:
            raise RequestError(
                "text",
                f"{size} bytes exceed the limit of {MAX_GROWN_BYTES // self.factor}: this model's tokenizer can make a "
                f"text {self.factor} times as long, and the result is limited to {MAX_GROWN_BYTES} bytes",
            )


def _growth(state: Any, one: Callable[[dict[str, Any]], float]) -> int:
    """The product over the steps of a component."""
    return ceil(min(prod(max(one(step), 1.0) for step in _steps(state)), 1e18))


def _steps(state: Any) -> Iterator[dict[str, Any]]:
    """The steps of a component. The library also accepts steps without `type` and recognises them by their fields."""
    if not isinstance(state, dict):
        return
    nested = [state[name] for name in _SEQUENCES if isinstance(state.get(name), list)]
    if not nested:
        yield state
    for steps in nested:
        for step in steps:
            yield from _steps(step)


def _normalizer(step: dict[str, Any]) -> float:
    if "pattern" in step:
        return _replaced(step)
    if "prepend" in step:  # before each piece of text between two added tokens
        return 1 + _size(step["prepend"])
    if "precompiled_charsmap" in step:
        return _longest_mapping(step["precompiled_charsmap"])
    return _UNICODE.get(str(step.get("type")), 1)


def _pre_tokenizer(step: dict[str, Any]) -> float:
    if "replacement" in step:  # Metaspace: for a space, and before each word
        return 2 * _size(step["replacement"])
    if step.get("type") == "ByteLevel":
        return 4 if step.get("add_prefix_space") else 2
    return 1


def _decoder(step: dict[str, Any]) -> float:
    if "pattern" in step:
        return _replaced(step)
    return _DECODERS.get(str(step.get("type")), 1)


def _replaced(step: dict[str, Any]) -> float:
    """For Replace: a string by its length, an expression as if it matched the empty string at every character."""
    pattern, content = step.get("pattern"), _size(step.get("content"))
    text = pattern.get("String") if isinstance(pattern, dict) else pattern
    return content / _size(text) if isinstance(text, str) and text else 1 + 2 * content


def _longest_mapping(charsmap: Any) -> int:
    """The longest text in a SentencePiece charsmap: the size of a trie, the trie, and NUL-terminated texts."""
    try:
        blob = base64.b64decode(charsmap, validate=True)
    except (ValueError, TypeError):
        return 1  # the library refuses it
    texts = blob[4 + int.from_bytes(blob[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _check_factor(factor: int, what: str) -> None:
    if factor > MAX_GROWTH:
        shown = factor if factor < 10**9 else "over a billion"
        raise CheckpointError(
            f"tokenizer.json: its {what} can make a text {shown} times as long, more than the limit of {MAX_GROWTH}"
        )


def _check_around(state: Any) -> None:
    """Check a post-processor: the library repeats a text each time that a template names it."""
    tokens = 0
    for step in _steps(state):
        single, known = step.get("single"), step.get("special_tokens")
        if not isinstance(single, list) or not isinstance(known, dict):
            continue
        texts = sum("Sequence" in piece for piece in single)
        if texts > 1:
            raise CheckpointError(f"tokenizer.json: its post-processor repeats a text {texts} times")
        for piece in single:
            token = known.get(piece["SpecialToken"]["id"], {}) if "SpecialToken" in piece else {}
            tokens += len(token.get("ids", ()))
    if tokens > MAX_ADDED_AROUND:
        raise CheckpointError(
            f"tokenizer.json: its post-processor adds {tokens} tokens to a text, limit {MAX_ADDED_AROUND}"
        )


def _size(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _state(state: bytes | None) -> Any:
    return None if state is None else json.loads(state)


def _values(data: bytes, key: str) -> Iterator[Any]:
    """Yield every value of a key that is an object or a list, anywhere in the JSON."""
    if b"\\u00" in data and ESCAPED_LETTER.search(data):
        yield _parsed(data.decode("utf-8", "replace"), json.loads).get(key)
        return
    spelled = f'"{key}"'.encode()
    position = data.find(spelled)
    while position >= 0:
        position += len(spelled)
        if start := _VALUE.match(data, position):
            for end in (start.end() + (1 << 20), len(data)):
                value = _parsed(
                    data[start.end() - 1 : end].decode("utf-8", "replace"), json.JSONDecoder().raw_decode
                )
                if value:
                    yield value[0]
                    break
        position = data.find(spelled, position)


def _parsed(text: str, parse: Callable[[str], Any]) -> Any:
    """Parse a text, or return nothing if it is not JSON: it is truncated, or the library refuses it."""
    try:
        return parse(text)
    except RecursionError:
        raise CheckpointError("tokenizer.json is nested too deep") from None
    except ValueError:
        return {}
