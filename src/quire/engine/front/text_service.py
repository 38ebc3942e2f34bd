"""Tokenizer and chat template for an event loop: long work runs in threads that release the interpreter lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

from quire.engine.api import InputAsk
from quire.engine.front.pool_inputs import PoolInputs
from quire.engine.front.text_tokens import text_tokens
from quire.parameters import TextTokens
from quire.text.chat_renderer import ChatAsk, ChatRenderer
from quire.text.reading import AnswerFormat, Reading
from quire.text.token_bytes import TokenBytes
from quire.text.tokenizer import Tokenizer
from quire.text.tools import ToolUse
from quire.types import CheckpointError, ContextLengthError, RequestError, SamplingParams
from quire.util.threads import full_pool

# Characters of prompt per token of context. Natural text stays far below; a longer text has more tokens than fit,
# unless it is one long run of a single character.
CHARS_PER_TOKEN = 16
LONG_TEXT = 32_768  # characters; longer texts queue among themselves
TEXTS_AT_ONCE = 16  # of a request with many
_KNOWN_PIECES = 2**13

T = TypeVar("T")

if TYPE_CHECKING:
    from quire.text.infill import InfillAsk, InfillPrompt  # imported by the first request that has one


class TextService:
    """Encodes, renders and decodes off the event loop. Short and long texts have separate threads."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: str | None = None,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._chat: ChatRenderer | None = None
        self._format: AnswerFormat | None = None
        self._no_chat = "this model folder has no tokenizer, and therefore no chat template"
        if tokenizer is not None:
            try:
                self._chat = ChatRenderer(tokenizer, template=template)
            except CheckpointError as error:
                if template is not None:
                    raise
                self._no_chat = str(error)  # text completion works without it
            else:
                names = {"tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
                self._format = AnswerFormat(tokenizer, template, reads_tools=self._chat.reads_tools, **names)
                self._format.prepare(self._chat)
        self._short = full_pool(2, "quire-text")
        self._long = full_pool(1, "quire-long-text")
        self._max_tokens = 0
        self.words = 0, 0  # of texts so far, and their tokens
        self._piece = lru_cache(_KNOWN_PIECES)(
            lambda token_id: self.token_bytes(token_id).decode("utf-8", "replace")
        )

    @property
    def template_hash(self) -> str | None:
        """SHA-256 of the chat template in use, in hex."""
        return self._chat.template_hash if self._chat else None

    @property
    def template_source(self) -> str:
        """The chat template in use; "" without one."""
        return self._chat.source if self._chat else ""

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables of the chat template that a request may set."""
        return self._chat.arguments if self._chat else frozenset()

    @property
    def answers(self) -> Mapping[str, Mapping[str, str | None]]:
        """The formats of tool calls and reasoning, and how they were found; empty without a chat template."""
        return {} if self._format is None else self._format.regions.found.facts()

    @property
    def calls(self) -> Mapping[str, int]:
        """Calls of functions so far, by what became of them."""
        return {} if self._format is None else self._format.calls

    def limit(self, max_model_len: int) -> None:
        """Set the context length; longer prompts are refused."""
        self._max_tokens = max_model_len - 1

    def close(self) -> None:
        """Stop the threads; work in progress is finished."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool, name: str
    ) -> list[int]:
        """Token ids of a text. Raises RequestError when there are more than the context holds."""
        tokenizer = self._require(name)
        self._check_chars(name, len(text))
        limit = self._max_tokens
        return await self.apart(
            name,
            len(text),
            lambda: self._counted(
                text, tokenizer.encode(text, add_special_tokens, parse_special, max_tokens=limit)
            ),
        )

    async def text_tokens(self, params: SamplingParams) -> TextTokens | None:
        """The tokens of the texts in parameters. Raises RequestError."""
        if not params.has_texts:
            return None
        return await self.apart("prompt", 0, lambda: text_tokens(params, self.tokenizer))

    async def encode_inputs(self, inputs: PoolInputs, asks: Sequence[InputAsk]) -> list[list[int]]:
        """Token ids of texts, or pairs of texts, for a model with pooling; some at a time, between others' texts."""
        found: list[list[int]] = []
        for first in range(0, len(asks), TEXTS_AT_ONCE):
            some = asks[first : first + TEXTS_AT_ONCE]
            sizes = [len(ask.text) + len(ask.second or "") for ask in some]
            for ask, size in zip(some, sizes, strict=True):
                if ask.truncate is None:
                    self._check_chars(ask.name, size)
            found += await self.apart(some[0].name, sum(sizes), partial(_encode_all, inputs, some))
        return found

    async def encode_chat(self, ask: ChatAsk) -> list[int]:
        """Token ids of a rendered conversation."""
        tokenizer, chat, limit = self._require("messages"), self._require_chat(), self._max_tokens

        def work() -> list[int]:
            rendered = chat.render(ask)
            self._check_chars("messages", len(rendered.text))
            ids = tokenizer.encode_guarded(rendered.text, rendered.own, max_tokens=limit)
            return self._counted(rendered.text, ids)

        return await self.apart("messages", _size(ask), work)

    async def encode_infill(self, ask: InfillAsk) -> InfillPrompt:
        """The prompt that asks for the text between two others."""
        from quire.text.infill import infill_prompt

        tokenizer = self._require("suffix")
        size = len(ask.prefix) + len(ask.suffix) + len(ask.opening) + sum(len(text) for _, text in ask.files)
        for name, chars in (("suffix", len(ask.suffix)), ("prompt", size)):
            self._check_chars(name, chars)
        return await self.apart("prompt", size, lambda: infill_prompt(tokenizer, ask))

    async def render_chat(self, ask: ChatAsk) -> str:
        """A rendered conversation."""
        chat = self._require_chat()
        return await self.apart("messages", _size(ask), lambda: chat.render(ask).text)

    def reading(self, tools: ToolUse | None) -> Reading | None:
        """How an answer to a conversation is read. Raises RequestError for calls that cannot be read."""
        if self._format is None:
            return None
        return self._format.reading(tools)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        tokenizer = self._require("tokens")
        if len(token_ids) > self._max_tokens + 1:
            raise ContextLengthError(
                "tokens", f"{len(token_ids)} tokens exceed max_model_len {self._max_tokens + 1}"
            )
        return await self.apart(
            "tokens", len(token_ids), lambda: tokenizer.decode(token_ids, skip_special_tokens)
        )

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's bytes decoded on their own."""
        return list(map(self._piece, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; empty without a tokenizer."""
        return self.tokenizer.token_bytes(token_id) if self.tokenizer else b""

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that texts without special tokens leave out."""
        return frozenset() if self.tokenizer is None else self.tokenizer.special_ids

    async def vocabulary(self, size: int) -> TokenBytes:
        """The bytes of all tokens. Raises RequestError without a tokenizer."""
        tokenizer = self._require("vocabulary")
        return await self.apart("vocabulary", LONG_TEXT + 1, lambda: tokenizer.all_bytes(size))

    def _counted(self, text: str, ids: list[int]) -> list[int]:
        """Count the words and tokens of a text; returns the tokens. Long texts would take memory, and are left out."""
        if len(text) <= LONG_TEXT:
            words, tokens = self.words
            self.words = words + len(text.split()), tokens + len(ids)
        return ids

    async def apart(self, name: str, size: int, work: Callable[[], T]) -> T:
        """Do work on so many characters in a thread. `name`: the field of a RequestError."""
        pool = self._short if size <= LONG_TEXT else self._long
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except RequestError as error:
            if error.field not in {"text", "token_ids"}:
                raise
            raise type(error)(name, error.message) from None  # the field as the caller names it

    def _check_chars(self, name: str, count: int) -> None:
        limit = CHARS_PER_TOKEN * self._max_tokens
        if count > limit:
            raise ContextLengthError(
                name,
                f"{count} characters exceed the limit of {limit}: {CHARS_PER_TOKEN} for each of the {self._max_tokens}"
                " tokens that fit in a prompt",
            )

    def _require(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(name, "this model folder has no tokenizer; send token ids")
        return self.tokenizer

    def _require_chat(self) -> ChatRenderer:
        if self._chat is None:
            raise RequestError("messages", self._no_chat)
        return self._chat


def _size(ask: ChatAsk) -> int:
    """Approximate number of characters of a conversation, enough to tell short from long."""
    size = 0
    for message in ask.messages:
        content = message.get("content")
        for part in (content,) if isinstance(content, str) else content if isinstance(content, list) else ():
            text = part.get("text") if isinstance(part, dict) else part
            size += 1 + (len(text) if isinstance(text, str) else 0)
            if size > LONG_TEXT:
                return size
    return size


def _encode_all(inputs: PoolInputs, asks: Sequence[InputAsk]) -> list[list[int]]:
    return [inputs.encode(ask) for ask in asks]
