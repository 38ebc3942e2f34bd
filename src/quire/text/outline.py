"""What a checkpoint's tokenizer is, without building it: kind, size, templates.

Building one means reading its merges, a second for a vocabulary of 256k. The kind and the ids stand before them in
every file that the tokenizers library writes; a file in another order is read whole, which is only slower. What is
read of it is checked as by text.tokenizer and text.gguf; whether the merges fit the vocabulary is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from quire.records import dataclass
from quire.text.files import LoadBudget
from quire.text.folder import TokenizerFolder, read_folder
from quire.types import CheckpointError

_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class TokenizerOutline:
    """`kind` is the algorithm ("BPE"); `size` counts tokens, added ones included; the largest id may be larger.

    `chat_templates` maps names to Jinja sources.
    """

    kind: str
    size: int
    highest_id: int
    chat_templates: Mapping[str, str]


def folder_outline(path: Path, budget: LoadBudget | None = None) -> TokenizerOutline:
    """The outline of a checkpoint folder's tokenizer, as Tokenizer.from_dir would build it.

    Raises CheckpointError naming the file when one is missing, malformed or over the load budget.
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
    return TokenizerOutline(str(kind), len(ids), highest, folder.chat_templates)


def _declared(folder: TokenizerFolder) -> Iterator[str]:
    """Tokens that side files add, in the order in which they get their ids."""
    for _, token in sorted(folder.added_tokens.items()):
        yield token.content
    for token in folder.named_tokens:
        yield token.content


def _read(data: bytes) -> tuple[dict[str, object], dict[str, object]]:
    """tokenizer.json but for its model, and the model, as far as its merges (an empty list where there are some)."""
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
                        cursor.fail("it breaks off")
                    return whole, model | {"merges": []}
                model[name] = cursor.value()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json is not valid JSON: {error}") from None
    if not model:
        raise CheckpointError("tokenizer.json has no model")
    return whole, model


class _Cursor:
    """A position in a JSON text from which members are read one by one, so that the rest can be left."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._decode = json.JSONDecoder().raw_decode

    def fail(self, message: str) -> NoReturn:
        raise json.JSONDecodeError(message, self._text, self._at)

    def value(self) -> object:
        """The value that starts here."""
        self._pass_space()
        value, self._at = self._decode(self._text, self._at)
        return value

    def members(self) -> Iterator[str]:
        """Keys of the object that starts here; the reader reads each one's value before the next."""
        if not self._take("{"):
            self.fail("an object was expected")
        if self._take("}"):
            return
        while True:
            key = self.value()
            if not isinstance(key, str) or not self._take(":"):
                self.fail("a key was expected")
            yield key
            if self._take("}"):
                return
            if not self._take(","):
                self.fail("',' was expected")

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
