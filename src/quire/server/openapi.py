"""The OpenAPI document, made from the request and response types."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from quire import __version__
from quire.server import requests, responses
from quire.server.errors import ErrorBody

_REF = "#/components/schemas/{name}"
_TYPES: tuple[type[Any], ...] = (
    requests.ChatCompletionRequest, requests.CompletionRequest, requests.RenderRequest, requests.TokenizeRequest,
    requests.DetokenizeRequest, responses.ChatCompletion, responses.ChatCompletionChunk, responses.Completion,
    responses.RenderedPrompt, responses.TokenizeResponse, responses.DetokenizeResponse, responses.ModelList,
    responses.ModelBody, responses.HealthBody, responses.VersionBody, responses.MemoryBody, ErrorBody,
)  # fmt: skip
# path, summary, request, response, streamed chunk
_POSTS = (
    (
        "/v1/chat/completions",
        "Answer a conversation",
        "ChatCompletionRequest",
        "ChatCompletion",
        "ChatCompletionChunk",
    ),
    ("/v1/completions", "Continue prompts", "CompletionRequest", "Completion", "Completion"),
    (
        "/v1/chat/completions/render",
        "A conversation as the model reads it",
        "RenderRequest",
        "RenderedPrompt",
        "",
    ),
    ("/tokenize", "Token ids of a text or conversation", "TokenizeRequest", "TokenizeResponse", ""),
    ("/detokenize", "Text of token ids", "DetokenizeRequest", "DetokenizeResponse", ""),
)
_GETS = (
    ("/v1/models", "The served models", "ModelList"),
    ("/v1/models/{model}", "One served model", "ModelBody"),
    ("/health", "200 when the engine is ready", "HealthBody"),
    ("/health/ready", "200 when the engine is ready", "HealthBody"),
    ("/health/live", "200 while the process answers", "HealthBody"),
    ("/ping", "200 when the engine is ready", "HealthBody"),
    ("/version", "Version of Quire", "VersionBody"),
    ("/debug/memory", "Bytes by part, planned and held", "MemoryBody"),
)
_ERRORS = {
    "400": "a field is malformed or out of range; `param` names it",
    "401": "no API key, or a wrong one",
    "403": "this Host or Origin may not call",
    "404": "no such path or model",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "415": "the body is not plain application/json",
    "429": "the queue is full; Retry-After says when to come back",
    "500": "a failure inside",
    "503": "the engine is not ready; Retry-After says when to come back",
    "504": "deadline_ms or max_queue_ms has passed",
}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"type": "string", "minLength": 1, "maxLength": 128,
                     "description": "system, user, assistant, tool, or what the model's template knows"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}],
                        "description": "null only for an assistant that called tools"},
        },
    },
}  # fmt: skip
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
# What the types cannot say, by name of the field.
_SHAPES: dict[str, dict[str, Any]] = {"messages": _MESSAGES}


@functools.cache
def document() -> bytes:
    """The document as JSON."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template=_REF)
    for name in ("ChatCompletionRequest", "CompletionRequest", "RenderRequest", "TokenizeRequest"):
        _refine(schemas[name]["properties"])
    schemas["CompletionRequest"]["properties"]["prompt"] |= _PROMPT
    paths: dict[str, Any] = {}
    for path, summary, request, response, chunk in _POSTS:
        operation = _operation(summary, response, chunk)
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        }
        paths[path] = {"post": operation}
    for path, summary, response in _GETS:
        paths[path] = {"get": _operation(summary, response)}
    paths["/v1/models/{model}"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    text = {
        "200": {"description": "text exposition", "content": {"text/plain": {"schema": {"type": "string"}}}}
    }
    paths["/metrics"] = {"get": {"summary": "Prometheus metrics", "responses": {**text, **_errors()}}}
    plain = {
        "200": {"description": "OpenAPI", "content": {"application/json": {"schema": {"type": "object"}}}}
    }
    paths["/openapi.json"] = {"get": {"summary": "This document", "responses": {**plain, **_errors()}}}
    return msgspec.json.encode({
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    })  # fmt: skip


def _refine(properties: dict[str, Any]) -> None:
    """Add shapes to a request's fields; null stays allowed where it was."""
    for name, shape in _SHAPES.items():
        if name in properties:
            nullable = any(kind.get("type") == "null" for kind in properties[name].get("anyOf", ()))
            properties[name] = {"anyOf": [shape, {"type": "null"}], "default": None} if nullable else shape


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def _operation(summary: str, response: str, chunk: str = "") -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(response)}}
    text = "done"
    if chunk:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no words for the events of a stream
        text = f"done; with stream true, server-sent events of {chunk} as JSON, then [DONE]"
    return {"summary": summary, "responses": {"200": {"description": text, "content": content}, **_errors()}}


def _errors() -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("ErrorBody")}}
    return {status: {"description": text, "content": content} for status, text in _ERRORS.items()}
