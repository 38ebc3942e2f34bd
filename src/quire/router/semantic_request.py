"""Which chats a semantic cache may answer, and the two forms of an answer: one object, and a stream of events."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from quire.records import dataclass
from quire.router.resuming import events_of
from quire.types import PARAMETERS

PATH = "/v1/chat/completions"
_MOST_BODY = 256 * 1024  # bytes of a body that is looked at
_MOST_QUESTION = 2000  # characters
# Fields that do not change what is answered, but its form; they may differ between two requests.
_FORM = frozenset(("stream", "stream_options", "request_id", "priority"))
# Parameters that name a draw, may draw also at temperature 0, or ask for more than text.
_NOT_ANSWERED = {
    "seed", "dynatemp_range", "mirostat", "logprobs", "prompt_logprobs", "prompt_logprobs_start"
}  # fmt: skip
# Fields that have to be equal. A request with any other one is not answered: nobody knows what it asks for.
_EQUAL = frozenset(PARAMETERS) - _NOT_ANSWERED | {
    "model", "messages", "max_completion_tokens", "response_format", "tools", "tool_choice", "parallel_tool_calls",
    "reasoning_effort", "chat_template_kwargs", "user", "cache_salt", "safety_identifier", "prompt_cache_key",
    "session_id", "metadata",
}  # fmt: skip
_ROLES = frozenset(("system", "developer", "user", "assistant"))
_THOUGHTS = ("reasoning_content", "reasoning")
_TEXTS = ("content", *_THOUGHTS)


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """A request that may be answered. `key` is a digest of all that has to be equal, `text` what has to be near."""

    key: bytes
    text: str
    model: str
    stream: bool
    wants_usage: bool


class KeptChat(msgspec.Struct, omit_defaults=True):
    """An answer as it is kept: the message, the usage of the request that it was made for, and by what."""

    message: dict[str, Any]
    model: str = ""
    usage: dict[str, Any] | None = None
    fingerprint: str = ""


_encode = msgspec.json.Encoder(order="sorted").encode
_kept = msgspec.json.Decoder(KeptChat)


def chat_question(body: bytes, domain: bytes, *, sampled: bool) -> ChatQuestion | None:
    """What a chat asks; None if it may not be answered.

    It may, if its answer is one text that depends on the conversation alone: one sample, without a seed, of temperature
    0 unless `sampled` ones may be answered too, without log-probabilities, and with no field that is not known here;
    the conversation ends with a user's text and has no images, calls of tools or results of them. `domain` is of those
    who may see each other's answers.
    """
    if len(body) > _MOST_BODY:
        return None
    try:
        return _question(msgspec.json.decode(body, type=dict[str, Any]), domain, sampled=sampled)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError):
        return None  # what the server says about it is said by the server


def _question(fields: dict[str, Any], domain: bytes, *, sampled: bool) -> ChatQuestion | None:
    if not fields.keys() <= _EQUAL | _FORM or not _is_one_text(fields, sampled=sampled):
        return None
    text = _last_text(fields["messages"])
    if text is None:
        return None
    options = fields.get("stream_options")
    equal = {name: value for name, value in fields.items() if name not in _FORM}
    equal["messages"] = fields["messages"][:-1]
    last = {name: value for name, value in fields["messages"][-1].items() if name != "content"}
    digest = hashlib.sha256(domain)
    digest.update(_encode([equal, last]))
    return ChatQuestion(
        digest.digest(), text, fields["model"], fields.get("stream") is True,
        bool(options and options.get("include_usage")),
    )  # fmt: skip


def _is_one_text(fields: dict[str, Any], *, sampled: bool) -> bool:
    temperature, count, options = (fields.get(name) for name in ("temperature", "n", "stream_options"))
    cold = isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    streams = fields.get("stream") is True
    return (
        (cold or sampled)
        and (count is None or (type(count) is int and count == 1))
        and isinstance(fields.get("model"), str) and fields["model"] != ""
        and isinstance(fields.get("stream"), bool | None)
        and (options is None or (streams and isinstance(options, dict) and options.keys() <= {"include_usage"}))
    )  # fmt: skip


def _last_text(messages: Any) -> str | None:
    """The question at the end of a conversation; None if it has none, or if there is more than text in it."""
    if not isinstance(messages, list) or not messages or not all(map(_is_plain, messages)):
        return None
    last = messages[-1]
    if last["role"] != "user":
        return None
    text: str = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
    return text if text.strip() and len(text) <= _MOST_QUESTION else None


def _is_plain(message: Any) -> bool:
    """Whether a message is one text of somebody."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return False
    if not message.keys() <= {"role", "content", "name"}:
        return False
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(part := content[0], dict):
        return part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)
    return isinstance(content, str)


def kept_chat(body: bytes, *, stream: bool) -> KeptChat | None:
    """The answer in what a client got; None unless it is one complete text that ended by itself."""
    try:
        return _of_stream(body) if stream else _of_whole(msgspec.json.decode(body, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, AttributeError, KeyError):
        return None  # not an answer in OpenAI's form


def _of_whole(made: dict[str, Any]) -> KeptChat | None:
    (choice,) = made["choices"] if len(made["choices"]) == 1 else (None,)
    if choice is None or choice["finish_reason"] != "stop" or choice.get("logprobs"):
        return None
    return _chat(choice["message"], made)


def _of_stream(body: bytes) -> KeptChat | None:
    texts, about, usage, ended, done = dict.fromkeys(_TEXTS, ""), dict[str, Any](), None, False, False
    for payload in events_of(body):
        if done:
            return None
        if payload == b"[DONE]":
            done = True
            continue
        event = msgspec.json.decode(payload, type=dict[str, Any])
        if "error" in event or len(event["choices"]) > 1:
            return None
        about, usage = about or event, event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            if choice["index"] != 0 or choice.get("logprobs") or _has_more(delta):
                return None
            for name in _TEXTS:
                texts[name] += delta.get(name) or ""
            if (reason := choice.get("finish_reason")) is not None:
                if reason != "stop":
                    return None
                ended = True
    if not ended or not done:
        return None
    return _chat(
        {"role": "assistant", **{name: text for name, text in texts.items() if text}},
        {**about, "usage": usage},
    )


def _has_more(message: dict[str, Any]) -> bool:
    """Whether a message, or a part of one, has more than texts."""
    return any(value for name, value in message.items() if name not in {"role", *_TEXTS})


def _chat(message: dict[str, Any], about: dict[str, Any]) -> KeptChat | None:
    if _has_more(message) or not isinstance(message.get("content"), str) or not message["content"]:
        return None
    kept = {name: message[name] for name in ("role", *_TEXTS) if message.get(name)}
    return KeptChat(kept, about.get("model") or "", about.get("usage"), about.get("system_fingerprint") or "")


def packed(chat: KeptChat) -> bytes:
    """An answer as bytes."""
    return msgspec.json.encode(chat)


def answer_body(packed_chat: bytes, question: ChatQuestion) -> bytes | None:
    """An answer that was kept as the body of one to `question`, which has an id and a time of its own; None if usage is
    asked for that is not known."""
    chat = _kept.decode(packed_chat)
    if chat.usage is None and (question.wants_usage or not question.stream):
        return None
    about = {
        "id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time()),
        "model": chat.model or question.model, "system_fingerprint": chat.fingerprint or None,
    }  # fmt: skip
    if not question.stream:
        choice = {"index": 0, "message": chat.message, "logprobs": None, "finish_reason": "stop"}
        return msgspec.json.encode({**about, "choices": [choice], "usage": chat.usage})
    about["object"] = "chat.completion.chunk"
    return b"".join(_events(about, chat, wants_usage=question.wants_usage))


def _events(about: dict[str, Any], chat: KeptChat, *, wants_usage: bool) -> Iterable[bytes]:
    texts = {name: chat.message[name] for name in (*_THOUGHTS, "content") if name in chat.message}
    deltas = [{"role": "assistant", "content": ""}, *({name: text} for name, text in texts.items()), {}]
    for number, delta in enumerate(deltas, 1):
        reason = "stop" if number == len(deltas) else None
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        yield b"data: " + msgspec.json.encode({**about, "choices": [choice]}) + b"\n\n"
    if wants_usage:
        yield b"data: " + msgspec.json.encode({**about, "choices": [], "usage": chat.usage}) + b"\n\n"
    yield b"data: [DONE]\n\n"
