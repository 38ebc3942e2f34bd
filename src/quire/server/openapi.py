"""The OpenAPI document, generated from the routes and their types."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from quire import __version__
from quire.server.dialects.generate_route import GenerateRoute
from quire.server.routes import Act, HttpRoute, Post

_ERRORS = {
    400: "a field is malformed or out of range; `param` names the field",
    401: "missing or incorrect API key",
    403: "this Host or Origin is not allowed",
    404: "no such path or model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not plain application/json",
    429: "the queue is full; Retry-After says when to try again",
    500: "internal error",
    503: "the engine is not ready; Retry-After says when to try again",
    504: "deadline_ms or max_queue_ms has passed",
}
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@functools.cache
def document(routes: tuple[HttpRoute, ...]) -> bytes:
    """The document as JSON."""
    kinds: list[type[Any]] = list(dict.fromkeys(itertools.chain(*map(_types, routes))))
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(kinds, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = paths.setdefault(route.path.format(f"{{{route.rest}}}"), {})
        path[route.method.lower()] = _operation(route, schemas)
        if route.rest:
            place = {"name": route.rest, "in": "path", "required": True}
            path["parameters"] = [place | {"schema": {"type": "string", "minLength": 1}}]
    return msgspec.json.encode({
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _KEYS},
        "security": [{}, *({name: []} for name in _KEYS)],
    })  # fmt: skip


def _types(route: HttpRoute) -> list[type[Any]]:
    kinds = [route.response, route.errors.schema]
    for post in _posts(route):
        kinds += [post.request, post.response, post.errors.schema, *((post.chunk,) if post.chunk else ())]
    return kinds


def _posts(route: HttpRoute) -> tuple[Post[Any, Any], ...]:
    """The routes with a body that share a path and method."""
    if isinstance(route, GenerateRoute):
        return tuple(route.choices.values())
    return (route,) if isinstance(route, Post) else ()


def _any_of(kinds: Iterable[type[Any]], schemas: dict[type[Any], Any]) -> Any:
    found = [schemas[kind] for kind in dict.fromkeys(kinds)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _operation(route: HttpRoute, schemas: dict[type[Any], Any]) -> dict[str, Any]:
    posts = _posts(route)
    answers = _any_of([post.response for post in posts] or [route.response], schemas)
    content: dict[str, Any] = {route.media.partition(b";")[0].decode(): {"schema": answers}}
    answer = {"description": "done", "content": content}
    forms = [post.errors for post in posts] or [route.errors]
    errors = {"application/json": {"schema": _any_of([form.schema for form in forms], schemas)}}
    texts = _ERRORS | dict(route.further)
    operation: dict[str, Any] = {
        "summary": route.summary,
        "tags": [route.tag],
        "responses": {
            "200": answer,
            **{
                str(form.statuses.get(status, status)): {"description": text, "content": errors}
                for form in forms
                for status, text in texts.items()
            },
        },
    }
    if isinstance(route, Act) and route.query:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query
        ]
    if isinstance(route, Act) and route.form:
        form = {"type": "object", "properties": dict(route.form), "required": list(route.form)}
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    if posts:
        body = {"application/json": {"schema": _any_of((post.request for post in posts), schemas)}}
        operation["requestBody"] = {"required": True, "content": body}
    for post in posts:
        if post.chunk is not None:
            content[post.stream_media] = {}  # OpenAPI 3.1 cannot describe the events of a stream
            answer["description"] = f"done; with stream true, a stream of {post.chunk.__name__} as JSON"
    return operation
