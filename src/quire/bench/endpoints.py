"""Requests and answers of each server: OpenAI's two routes and the native ones of four servers.

    chat, completions    OpenAI; also Quire, vLLM, SGLang, llama-server, TGI, Ollama, …
    llama-server         POST /completion            (tools/server/README.md of llama.cpp)
    sglang               POST /generate              (SGLang, native API)
    tgi                  POST /generate_stream       (Text Generation Inference)
    ollama, ollama-chat  POST /api/generate, /api/chat (docs/api.md of Ollama; JSON lines)

An answer becomes a sequence of `Event`s. The rest of the benchmark is independent of the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Any

from quire.bench.sse import Decoder, LineDecoder, SseDecoder, StreamError
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """The prompt of a request: exactly one of the three."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request. `extra` is merged into the body and overrides the rest."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = 0.0
    seed: int | None = None
    ignore_eos: bool = True
    stream: bool = True
    count_tokens: bool = False  # request the token count of every chunk, if the server supports it
    extra: dict[str, Any] = field(default_factory=dict)


MakeBody = Callable[[SentPrompt, RequestOptions], dict[str, Any]]


@dataclass(slots=True)
class Event:
    """One part of an answer. `tokens` counts this part, `total` the answer so far; None if the server does not say."""

    text: str = ""
    tokens: int | None = None
    total: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str = ""
    error: str = ""
    server: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One kind of request. `body` makes the JSON, `read` an event from a part of the answer (or the whole one).

    `cumulative`: every part repeats the text so far. `ids`: prompts may be token ids.
    """

    name: str
    path: str
    body: MakeBody
    read: Callable[[dict[str, Any]], Event]
    chat: bool = False
    ids: bool = False
    lines: bool = False
    cumulative: bool = False
    eos: bool = True  # supports ignore_eos
    whole_path: str = ""  # route without streaming, if different

    def decoder(self) -> Decoder:
        return LineDecoder() if self.lines else SseDecoder()

    def route(self, *, stream: bool) -> str:
        return self.path if stream or not self.whole_path else self.whole_path

    def event(self, data: bytes) -> Event | None:
        """Read one event; None for the end mark. Raises StreamError for JSON of an unexpected shape."""
        if data.strip() == b"[DONE]":
            return None
        try:
            found = json.loads(data)
            if isinstance(found, list) and len(found) == 1:  # TGI wraps whole answers in a list
                found = found[0]
            if not isinstance(found, dict):
                raise StreamError("bad answer: not a JSON object")
            if error := found.get("error"):
                return Event(error=_error_text(error))
            return self.read(found)
        except (ValueError, RecursionError):
            raise StreamError(f"bad answer: not JSON: {data[:80]!r}") from None
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise StreamError(f"bad answer: unexpected shape ({type(error).__name__}: {error})") from None


def error_message(status: int, body: bytes) -> str:
    """Describe an error answer in one line: its status and the server's message."""
    try:
        found = json.loads(body)
        text = _error_text(found.get("error", found.get("message", found.get("detail", found))))
    except (ValueError, RecursionError, AttributeError):
        text = body[:200].decode("utf-8", "replace")
    return f"HTTP {status}: {' '.join(text.split())[:200]}".removesuffix(": ")


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)


def _given(**values: Any) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in values.items() if value is not None}


def _messages(prompt: SentPrompt) -> list[dict[str, Any]]:
    return prompt.messages or [{"role": "user", "content": prompt.text}]


def _ids_or_text(prompt: SentPrompt) -> list[int] | str | None:
    return prompt.text if prompt.token_ids is None else prompt.token_ids


def _timings(found: dict[str, Any]) -> dict[str, float]:
    """llama-server's split of its time, in every chunk if requested."""
    timings = found.get("timings")
    items = timings.items() if isinstance(timings, dict) else ()
    return {name: float(value) for name, value in items if isinstance(value, int | float)}


# ---- OpenAI

_KNOW_EOS = frozenset(("quire", "vllm", "sglang", "llama-server"))
# The field that requests the token count of every chunk.
_COUNTING: dict[str, dict[str, Any]] = {
    "quire": {"return_token_ids": True},
    "vllm": {"stream_options": {"continuous_usage_stats": True}},
    "sglang": {"stream_options": {"continuous_usage_stats": True}},
    "llama-server": {"timings_per_token": True},
}


def _openai_body(backend: str, *, chat: bool) -> MakeBody:
    def body(prompt: SentPrompt, ask: RequestOptions) -> dict[str, Any]:
        counting = _COUNTING.get(backend, {}) if ask.count_tokens else {}
        usage = {"include_usage": True} if ask.stream else {}
        options = {**usage, **counting.get("stream_options", {})}
        return {
            "model": ask.model, "stream": ask.stream,
            **_given(max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed),
            **({"ignore_eos": True} if ask.ignore_eos and backend in _KNOW_EOS else {}),
            **counting, **({"stream_options": options} if options else {}),
            **({"messages": _messages(prompt)} if chat else {"prompt": _ids_or_text(prompt)}),
            **ask.extra,
        }  # fmt: skip

    return body


def _read_openai(found: dict[str, Any]) -> Event:
    event = Event(server=_timings(found))
    usage = found.get("usage")
    if isinstance(usage, dict):
        event.input_tokens = usage.get("prompt_tokens")
        event.output_tokens = event.total = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            event.cached_tokens = details.get("cached_tokens")
    if "predicted_n" in event.server:
        event.total = found["timings"]["predicted_n"]
    for choice in (found.get("choices") or [])[:1]:
        # a stream's part, a whole chat answer, or a completion's text
        part = choice.get("delta") or choice.get("message") or {}
        event.text = part.get("content") or choice.get("text") or ""
        event.text += part.get("reasoning_content") or part.get("reasoning") or ""
        for call in part.get("tool_calls") or ():
            function = call.get("function") or {}
            event.text += (function.get("name") or "") + (function.get("arguments") or "")
        event.finish = choice.get("finish_reason") or ""
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            event.tokens = len(ids)
    return event


# ---- llama-server


def _ggml_body(prompt: SentPrompt, ask: RequestOptions) -> dict[str, Any]:
    return {
        "prompt": _ids_or_text(prompt), "stream": ask.stream,
        "n_predict": -1 if ask.max_tokens is None else ask.max_tokens, "ignore_eos": ask.ignore_eos,
        "return_tokens": True, **_given(temperature=ask.temperature, seed=ask.seed), **ask.extra,
    }  # fmt: skip


def _read_ggml(found: dict[str, Any]) -> Event:
    event = Event(text=found.get("content") or "")
    tokens = found.get("tokens")
    if isinstance(tokens, list) and tokens:
        event.tokens = len(tokens)
    if found.get("stop"):
        event.finish, event.server = str(found.get("stop_type") or "stop"), _timings(found)
        event.input_tokens, event.output_tokens = found.get("tokens_evaluated"), found.get("tokens_predicted")
        event.cached_tokens = (found.get("timings") or {}).get("cache_n")
    return event


# ---- SGLang


def _sglang_body(prompt: SentPrompt, ask: RequestOptions) -> dict[str, Any]:
    params = {
        "ignore_eos": ask.ignore_eos, **_given(max_new_tokens=ask.max_tokens, temperature=ask.temperature)
    }  # fmt: skip
    given = {"input_ids": prompt.token_ids} if prompt.token_ids is not None else {"text": prompt.text}
    return {**given, "sampling_params": params, "stream": ask.stream, **ask.extra}


def _read_sglang(found: dict[str, Any]) -> Event:
    meta = found.get("meta_info") or {}
    reason = meta.get("finish_reason")
    finish = reason.get("type", "stop") if isinstance(reason, dict) else reason or ""
    event = Event(text=found.get("text") or "", total=meta.get("completion_tokens"), finish=str(finish))
    if event.finish:
        event.input_tokens, event.output_tokens = meta.get("prompt_tokens"), event.total
        event.cached_tokens = meta.get("cached_tokens")
    return event


# ---- Text Generation Inference


def _tgi_body(prompt: SentPrompt, ask: RequestOptions) -> dict[str, Any]:
    sampled = {"do_sample": True, "temperature": ask.temperature} if ask.temperature else {}
    given = _given(max_new_tokens=ask.max_tokens, seed=ask.seed)
    parameters = {"details": True, "decoder_input_details": False, **given, **sampled}
    return {"inputs": prompt.text, "parameters": parameters, **ask.extra}


def _read_tgi(found: dict[str, Any]) -> Event:
    token, details = found.get("token"), found.get("details") or {}
    event = Event()
    if isinstance(token, dict):
        event.text, event.tokens = ("" if token.get("special") else token.get("text") or ""), 1
    else:
        event.text = found.get("generated_text") or ""
    if details:
        event.finish = str(details.get("finish_reason") or "stop")
        event.output_tokens = details.get("generated_tokens")
        event.input_tokens = details.get("input_length") or len(details.get("prefill") or ()) or None
    return event


# ---- Ollama


def _native_body(prompt: SentPrompt, ask: RequestOptions, *, chat: bool = False) -> dict[str, Any]:
    options = _given(temperature=ask.temperature, seed=ask.seed, num_predict=ask.max_tokens)
    given = {"messages": _messages(prompt)} if chat else {"prompt": prompt.text, "raw": True}
    return {"model": ask.model, **given, "stream": ask.stream, "options": options, **ask.extra}


def _read_native(found: dict[str, Any]) -> Event:
    message = found.get("message") or {}
    event = Event(text=found.get("response") or message.get("content") or "")
    event.text += found.get("thinking") or message.get("thinking") or ""
    if found.get("done"):
        event.finish = str(found.get("done_reason") or "stop")
        event.input_tokens, event.output_tokens = found.get("prompt_eval_count"), found.get("eval_count")
        names = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
        event.server = {name: found[name] / 1e9 for name in names if isinstance(found.get(name), int)}
    return event


# ---- selection

BACKENDS = ("quire", "vllm", "sglang", "llama-server", "tgi", "ollama", "openai")
# owners of models in GET /v1/models
_OWNERS = {
    "quire": "quire",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama-server",
    "library": "ollama",
}
_NATIVE = {  # (backend, API)
    ("llama-server", "native"): Endpoint("llama-server", "/completion", _ggml_body, _read_ggml, ids=True),
    ("sglang", "native"): Endpoint("sglang", "/generate", _sglang_body, _read_sglang, ids=True, cumulative=True),
    ("tgi", "native"): Endpoint("tgi", "/generate_stream", _tgi_body, _read_tgi, eos=False, whole_path="/generate"),
    ("ollama", "native"): Endpoint("ollama", "/api/generate", _native_body, _read_native, lines=True, eos=False),
    ("ollama", "native-chat"): Endpoint(
        "ollama-chat", "/api/chat", partial(_native_body, chat=True), _read_native, chat=True, lines=True, eos=False
    ),
}  # fmt: skip


def endpoint(backend: str, api: str) -> Endpoint:
    """Return the endpoint of a backend. Raises ValueError if it has no such API."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if api in {"chat", "completions"}:
        chat, eos = api == "chat", backend in _KNOW_EOS
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = _openai_body(backend, chat=chat)
        return Endpoint(api, path, body, _read_openai, chat=chat, ids=eos and not chat, eos=eos)
    if (backend, api) in _NATIVE:
        return _NATIVE[backend, api]
    has = ", ".join(["chat", "completions", *(["native"] if (backend, "native") in _NATIVE else [])])
    raise ValueError(f"api: {backend} has {has}, not {api!r}")


def backend_of(models: Any) -> tuple[str, list[str]]:
    """Backend and model names from the answer to GET /v1/models; "openai" for an unknown one."""
    listed = models.get("data") if isinstance(models, dict) else None
    rows: Sequence[Any] = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    owners = [str(row.get("owned_by", "")) for row in rows]
    backend = next((_OWNERS[owner] for owner in owners if owner in _OWNERS), "openai")
    return backend, [str(row["id"]) for row in rows if "id" in row]
