"""What an engine does with texts: its tokenizer and its chat template, off the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.engine.api import EngineUnavailableError, InputAsk
from quire.engine.front.pool_inputs import PoolInputs
from quire.engine.front.text_service import TextService
from quire.parameters import TextTokens
from quire.text.chat_renderer import ChatAsk
from quire.types import NO_POOLING, RequestError, SamplingParams

if TYPE_CHECKING:
    from quire.text.infill import InfillAsk, InfillPrompt
    from quire.text.reading import Reading
    from quire.text.tokenizer import Tokenizer
    from quire.text.tools import ToolUse


class EngineTexts:
    """The part of an api.Engine that needs no engine process. None are there while the model is loaded."""

    _text: TextService | None
    _inputs: PoolInputs | None  # of a model with pooling

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the checkpoint, if it has one."""
        return self._texts().tokenizer

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True, name: str = "prompt"
    ) -> list[int]:
        return await self._texts().encode(
            text, add_special_tokens=add_special_tokens, parse_special=parse_special, name=name
        )

    async def text_tokens(self, params: SamplingParams) -> TextTokens | None:
        return await self._texts().text_tokens(params)

    async def encode_inputs(self, asks: Sequence[InputAsk]) -> list[list[int]]:
        if self._inputs is None:
            raise RequestError("model", NO_POOLING)
        return await self._texts().encode_inputs(self._inputs, asks)

    async def encode_chat(self, ask: ChatAsk) -> list[int]:
        return await self._texts().encode_chat(ask)

    async def encode_infill(self, ask: InfillAsk) -> InfillPrompt:
        return await self._texts().encode_infill(ask)

    async def render_chat(self, ask: ChatAsk) -> str:
        return await self._texts().render_chat(ask)

    def reading(self, tools: ToolUse | None) -> Reading | None:
        return self._texts().reading(tools)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await self._texts().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return self._texts().pieces(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts().token_bytes(token_id)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._texts().special_ids

    def _texts(self) -> TextService:
        if self._text is None:
            raise EngineUnavailableError("the engine is loading")
        return self._text
