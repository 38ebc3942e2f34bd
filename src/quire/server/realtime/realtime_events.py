"""From the events of a streamed response (/v1/responses) to those of the Realtime API."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.server.exchange import ChunkPiece
from quire.server.realtime.conversation import Item, RealtimeConversation

RealtimeEvent = dict[str, Any]

_encode = msgspec.json.Encoder().encode

_ENDED = {"response.completed": "completed", "response.incomplete": "incomplete"}
# Events that are passed on with the id of the response, less what only the other API has.
_PASSED = (
    "response.output_text.delta", "response.output_text.done", "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
)  # fmt: skip
_ELSEWHERE = ("sequence_number", "logprobs")


class RealtimeAnswer:
    """One response: bytes of events in, Realtime events out. Its items go into `conversation`, if there is one. As a
    TextForm it has most events of a text made as Realtime's at once; `grow` is told of them.

    Reasoning is left out: the API has no place for it.
    """

    __slots__ = (
        "_begun", "_buffer", "_conversation", "_hidden", "_metadata", "_open", "_output", "_text", "around", "ended",
        "id", "numbers",
    )  # fmt: skip

    def __init__(
        self,
        conversation: RealtimeConversation | None,
        metadata: dict[str, str] | None,
        numbers: Iterator[int],
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.ended = False
        self._conversation, self._metadata = conversation, metadata
        self._begun = False
        self._buffer = b""
        self._hidden: set[int] = set()  # indices of reasoning
        self._output: list[Item] = []
        self._open: Item | None = None
        self._text = bytearray()  # of the open item so far, as JSON
        self.numbers = numbers  # of messages to the client
        self.around: tuple[bytes, bytes] | None = None  # the number in a message that continues the open text

    def feed(self, data: bytes) -> Iterator[RealtimeEvent]:
        """The events that these bytes complete."""
        *blocks, self._buffer = (self._buffer + data).split(b"\n\n")
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b"data: "):
                    yield from self._take(msgspec.json.decode(line[6:]))

    def grow(self, text: ChunkPiece) -> None:
        """Continue the open text by the JSON of a text, whose event was made in this form."""
        self._text += text[1:-1]

    def cancelled(self) -> Iterator[RealtimeEvent]:
        """The events after the last one of a response that the client ends."""
        yield from self._begin()
        if self._open is not None:
            yield from self._cut(self._open)
        yield self._done("cancelled", {"type": "cancelled", "reason": "client_cancelled"}, None)

    def failed(self, error: dict[str, Any]) -> Iterator[RealtimeEvent]:
        """The events after the last one of a response that fails."""
        yield from self._begin()
        if self._open is not None:
            yield from self._cut(self._open)
        yield self._done("failed", {"type": "failed", "error": error}, None)

    def _take(self, event: RealtimeEvent) -> Iterator[RealtimeEvent]:
        kind: str = event["type"]
        if kind == "error":
            yield from self.failed(event["error"])
        elif kind == "response.created":
            yield from self._begin()
        elif kind in _ENDED:
            status = _ENDED[kind]
            cut = event["response"]["incomplete_details"]
            yield self._done(status, cut and {"type": status, **cut}, event["response"]["usage"])
        elif "output_index" in event and not self._is_hidden(event):
            shown = event["output_index"]
            event["output_index"] -= sum(index < shown for index in self._hidden)
            yield from self._translate(kind, event)

    def _is_hidden(self, event: RealtimeEvent) -> bool:
        if event["type"] == "response.output_item.added" and event["item"]["type"] == "reasoning":
            self._hidden.add(event["output_index"])
        return event["output_index"] in self._hidden

    def _translate(self, kind: str, event: RealtimeEvent) -> Iterator[RealtimeEvent]:
        if kind == "response.output_item.added":
            yield from self._opened(event)
        elif kind == "response.output_item.done":
            yield from self._closed(_item(event["item"]), event["output_index"])
        elif kind in {"response.content_part.added", "response.content_part.done"}:
            part = {"type": "text", "text": event["part"]["text"]}
            yield self._event(kind, **_without(event, "part"), part=part)
        elif kind in _PASSED:
            if kind.endswith(".delta"):
                self._text += _encode(event["delta"])[1:-1]
            call = {} if self._open is None or "call_id" not in self._open else self._open
            named = {"call_id": call["call_id"]} if call else {}
            made = self._event(kind, **_without(event), **named)
            if kind == "response.output_text.delta":
                self._remember(made)
            yield made

    def _remember(self, made: RealtimeEvent) -> None:
        """Keep what all events of the open text have in common."""
        if self.around is None:
            fields = _encode({name: value for name, value in made.items() if name != "delta"})[1:-1]
            self.around = b'{"event_id":"event_', b'",%b,"delta":' % fields

    def _opened(self, event: RealtimeEvent) -> Iterator[RealtimeEvent]:
        item = self._open = _item(event["item"])
        self._text.clear()
        self.around = None
        yield self._event("response.output_item.added", output_index=event["output_index"], item=item)
        if self._conversation is not None:
            before = self._conversation.append(item)
            yield {"type": "conversation.item.added", "previous_item_id": before, "item": item}

    def _closed(self, found: Item, index: int) -> Iterator[RealtimeEvent]:
        kept, self._open, self.around = self._open, None, None
        self._output.append(found)
        if self._conversation is not None and kept is not None:
            self._conversation.fill(kept, found)
            yield {"type": "conversation.item.done", "item": found}
        yield self._event("response.output_item.done", output_index=index, item=found)

    def _cut(self, item: Item) -> Iterator[RealtimeEvent]:
        """The end of an item that is not complete."""
        index, found = len(self._output), item | {"status": "incomplete"}
        said = msgspec.json.decode(b'"%b"' % bytes(self._text))
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            text = {"type": "output_text", "text": said}
            found["content"] = [text]
            yield self._event("response.output_text.done", **place, content_index=0, text=said)
            yield self._event(
                "response.content_part.done", **place, content_index=0, part=text | {"type": "text"}
            )
        else:
            found["arguments"] = said
            named = {name: item[name] for name in ("call_id", "name")}
            yield self._event("response.function_call_arguments.done", **place, **named, arguments=said)
        yield from self._closed(found, index)

    def _begin(self) -> Iterator[RealtimeEvent]:
        if not self._begun:
            self._begun = True
            yield {"type": "response.created", "response": self._response("in_progress", None, None)}

    def _done(self, status: str, details: RealtimeEvent | None, usage: RealtimeEvent | None) -> RealtimeEvent:
        self.ended = True
        return {"type": "response.done", "response": self._response(status, details, usage)}

    def _response(
        self, status: str, details: RealtimeEvent | None, usage: RealtimeEvent | None
    ) -> RealtimeEvent:
        return {
            "object": "realtime.response", "id": self.id, "status": status, "status_details": details,
            "output": self._output, "output_modalities": ["text"], "metadata": self._metadata,
            "conversation_id": None if self._conversation is None else "conv_default",
            "usage": None if usage is None else _usage(usage),
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> RealtimeEvent:
        return {"type": kind, "response_id": self.id, **fields}


def _without(event: RealtimeEvent, *names: str) -> RealtimeEvent:
    return {key: value for key, value in event.items() if key not in {"type", *_ELSEWHERE, *names}}


def _item(found: Item) -> Item:
    """An item of a response as one of a conversation."""
    item = {"object": "realtime.item", **found}
    if item["type"] == "message":
        item["content"] = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
    return item


def _usage(usage: RealtimeEvent) -> RealtimeEvent:
    read, written = usage["input_tokens"], usage["output_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return {
        "total_tokens": usage["total_tokens"], "input_tokens": read, "output_tokens": written,
        "input_token_details": {"cached_tokens": cached, "text_tokens": read, "audio_tokens": 0},
        "output_token_details": {"text_tokens": written, "audio_tokens": 0},
    }  # fmt: skip
