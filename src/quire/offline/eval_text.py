"""What models are compared on: a file, or a built-in text and the model's own answers to built-in prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.engine.build.opening import Model
from quire.offline.texts import QUESTIONS, TEXT
from quire.text.chat_renderer import ChatAsk, ChatRenderer
from quire.text.tokenizer import Tokenizer
from quire.types import CheckpointError, RequestError

MAX_TEXT_BYTES = 4 * 2**20
BUILT_IN = "built in"
_OPENING_WORDS = 8


def eval_texts(model: Model, file: str | None) -> tuple[dict[str, Sequence[int]], list[list[int]]]:
    """Texts as tokens by name, and prompts, which a file takes the place of.

    Raises ValueError for a model without a tokenizer and for a file that is missing, too large or not UTF-8.
    """
    tokenizer = tokenizer_of(model)
    if file is not None:
        return {file: tokenizer.encode(text_of(file))}, []
    return {BUILT_IN: tokenizer.encode(TEXT)}, _prompts(tokenizer)


def tokenizer_of(model: Model) -> Tokenizer:
    """Raises ValueError if there is none."""
    if model.tokenizer is None:
        raise ValueError(f"model: {model.folder} has no tokenizer, so a text cannot be run")
    return model.tokenizer


def text_of(path: str | None) -> str:
    """The text of a file, or the one that is built in. Raises ValueError naming the file."""
    if path is None:
        return TEXT
    try:
        size = Path(path).stat().st_size
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"text: {path} has {size} bytes, more than the limit of {MAX_TEXT_BYTES}")
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"text: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {path} is not UTF-8: {error}") from error


def check_same_tokens(original: Model, candidate: Model) -> None:
    """Raise ValueError unless both models have the same tokens, as far as their vocabularies and a text show."""
    one, other = original.facts.spec.vocab, candidate.facts.spec.vocab
    if one != other:
        raise ValueError(
            f"against: the vocabularies have {one} and {other} tokens; predictions cannot be compared"
        )
    if original.tokenizer is None or candidate.tokenizer is None:
        return
    for text in (TEXT, *QUESTIONS, "Zürich 東京 \U0001f600\n\n\tx = [1, 2]"):
        if original.tokenizer.encode(text) != candidate.tokenizer.encode(text):
            raise ValueError(
                f"against: {candidate.folder.name} has another tokenizer than {original.folder.name}; predictions of "
                "different tokens cannot be compared"
            )


def prompts_of(model: Model, file: str | None) -> list[list[int]]:
    """Prompts for the model: the lines of a file, else built-in ones. Raises ValueError."""
    tokenizer = tokenizer_of(model)
    if file is None:
        return _prompts(tokenizer)
    lines = [line for line in text_of(file).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"eval: {file} has no lines; each is a prompt")
    try:
        return _chats(tokenizer, lines)
    except (CheckpointError, RequestError):
        return [tokenizer.encode(line) for line in lines]


def _chats(tokenizer: Tokenizer, questions: Sequence[str]) -> list[list[int]]:
    chat = ChatRenderer(tokenizer)
    return [chat.encode(ChatAsk(messages=[{"role": "user", "content": each}])) for each in questions]


def _prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts for the model: questions if its chat template accepts them, else openings of texts."""
    try:
        return _chats(tokenizer, QUESTIONS)
    except (CheckpointError, RequestError):
        openings = (" ".join(part.split()[:_OPENING_WORDS]) for part in TEXT.split("\n\n"))
        return [tokenizer.encode(opening) for opening in openings if opening]
