"""Messages of the text part of OpenAI's Realtime API: https://platform.openai.com/docs/api-reference/realtime."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from quire.server.dialects.responses_types import MAX_METADATA, FunctionOffer, ReasoningOptions
from quire.server.fields import RefusedFields
from quire.server.requests import MAX_MESSAGES
from quire.text.tools import MAX_TOOLS

_Part = Raw | UnsetType


class ClientMessage(msgspec.Struct, kw_only=True):
    """A message of the client; `type` determines which of the other fields it has."""

    type: str
    event_id: str | None = None
    session: _Part = UNSET
    item: _Part = UNSET
    response: _Part = UNSET
    item_id: str | None = None
    previous_item_id: str | None = None
    response_id: str | None = None


class SessionConfig(msgspec.Struct, kw_only=True):
    """What a session sets for its responses; null leaves a field as it is."""

    type: Literal["realtime"] | None = None
    model: str | None = None
    instructions: str | None = None
    output_modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None
    max_output_tokens: int | Literal["inf"] | None = None
    temperature: float | None = None
    tools: Annotated[list[FunctionOffer], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None


class ResponseConfig(SessionConfig, kw_only=True):
    """What one response sets for itself. With `input` it continues these items, else the conversation; `conversation`
    "none" keeps it out of the conversation.
    """

    conversation: Literal["auto", "none"] | None = None
    input: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None


# Fields of sessions and responses for what is not text, or is not done.
REFUSED: RefusedFields = {
    "audio": (),
    "include": ([],),
    "input_audio_format": (),
    "input_audio_transcription": (),
    "modalities": (["text"],),
    "output_audio_format": (),
    "prompt": (),
    "tracing": (),
    "truncation": ("disabled",),
    "turn_detection": (),
    "voice": (),
}
