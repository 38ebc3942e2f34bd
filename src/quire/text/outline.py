"""The outline of a checkpoint's tokenizer without building it: kind, size, templates.

Building one means reading its merges, which takes a second for a vocabulary of 256k. In every file that the tokenizers
library writes, the kind and the ids precede the merges; a file in another order is read whole, which is only slower.
The parts that are read are checked as in text.tokenizer and text.gguf; whether the merges match the vocabulary is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from quire.records import dataclass
from quire.text.folder import TokenizerFolder, read_folder
from quire.text.tokenizer_files import LoadBudget
from quire.types import CheckpointError

_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class TokenizerOutline:
    """`kind` is the algorithm ("BPE"); `size` counts tokens including added ones; the largest id may be larger.

    `chat_templates`, `special_tokens` and `response_template` are those of Tokenizer.
    """

    kind: str
    size: int
    highest_id: int
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    response_template: Mapping[str, object] | None = None


def folder_outline(path: Path, budget: LoadBudget | None = None) -> TokenizerOutline:
    """The outline of the tokenizer that Tokenizer.from_dir would build.

    Raises CheckpointError naming a file that is missing, malformed or over the load budget.
    """
    folder = read_folder(path, budget or LoadBudget())
    whole, model = _read(folder.tokenizer_json)
    ids = _ids(model.get("vocab"))
    added = _added(whole.get("added_tokens"))
    free = max(len(ids), 1 + max(added.values(), default=-1))  # the library's next id
    ids = ids | added
    highest = max(ids.values(), default=-1)
    for text in _declared(folder):
        if text not in ids:
            ids[text] = free
            highest, free = max(highest, free), free + 1
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")
    return TokenizerOutline(
        str(kind), len(ids), highest, folder.chat_templates, folder.special_tokens, folder.response_template
    )


def _declared(folder: TokenizerFolder) -> Iterator[str]:
    """Tokens that other files add, in the order of their ids."""
    for _, token in sorted(folder.added_tokens.items()):
        yield token.content
    for token in folder.named_tokens:
        yield token.content


def _read(data: bytes) -> tuple[dict[str, object], dict[str, object]]:
    """tokenizer.json without its model, and the model up to its merges (an empty list if it has merges)."""
    whole: dict[str, object] = {}
    model: dict[str, object] = {}
    try:
        cursor = _Cursor(data.decode("utf-8"))
        for key in cursor.members():
            if key != "model":
                whole[key] = cursor.value()
                continue
            for name in cursor.members():
                if name == "merges" and model.keys() >= {"type", "vocab"} and "added_tokens" in whole:
                    if not data.rstrip().endswith(b"}"):
                        cursor.fail("unexpected end")
                    return whole, model | {"merges": []}
                model[name] = cursor.value()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json is not valid JSON: {error}") from None
    if not model:
        raise CheckpointError("tokenizer.json has no model")
    return whole, model


class _Cursor:
    """A position in a JSON text for reading members one by one, without the rest."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._decode = json.JSONDecoder().raw_decode

    def fail(self, message: str) -> NoReturn:
        raise json.JSONDecodeError(message, self._text, self._at)

    def value(self) -> object:
        """Read the value that starts here."""
        self._pass_space()
        value, self._at = self._decode(self._text, self._at)
        return value

    def members(self) -> Iterator[str]:
        """Yield the keys of the object that starts here; the caller reads each value before the next key."""
        if not self._take("{"):
            self.fail("expected an object")
        if self._take("}"):
            return
        while True:
            key = self.value()
            if not isinstance(key, str) or not self._take(":"):
                self.fail("expected a key")
            yield key
            if self._take("}"):
                return
            if not self._take(","):
                self.fail("expected ','")

    def _take(self, char: str) -> bool:
        self._pass_space()
        found = self._text.startswith(char, self._at)
        self._at += found
        return found

    def _pass_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at


def _ids(vocab: object) -> dict[str, int]:
    """Token text -> id of a model's vocabulary: an object, or Unigram's list of pieces with scores."""
    if isinstance(vocab, list):
        pieces = [entry[0] for entry in vocab if isinstance(entry, list) and entry]
        if len(pieces) == len(vocab) and all(isinstance(piece, str) for piece in pieces):
            return {piece: number for number, piece in enumerate(pieces)}
    if isinstance(vocab, dict) and all(type(number) is int and number >= 0 for number in vocab.values()):
        return vocab
    raise CheckpointError("tokenizer.json: model.vocab is not an object of token ids or a list of pieces")


def _added(tokens: object) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in tokens if isinstance(tokens, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise CheckpointError("tokenizer.json: an added token has no content")
        if type(entry.get("id")) is not int or entry["id"] < 0:
            raise CheckpointError(f"tokenizer.json: added token {entry['content'][:80]!r} has no id")
        found[entry["content"]] = entry["id"]
    return found
