"""A route is all that an endpoint needs: it is served, its fields are checked, and OpenAPI has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from unittest import mock

import msgspec
import pytest

from helpers.server import LiveServer, serving
from quire.server import app, tokens
from quire.server.context import ServerContext
from quire.server.exchange import Body, Exchange
from quire.server.routes import Get, Post


class Ask(msgspec.Struct):
    """A text to repeat."""

    text: str
    times: Annotated[int, msgspec.Meta(ge=1, description="how often")] = 2


class Echo(msgspec.Struct):
    """A text, repeated."""

    text: str
    bytes: int


async def echo(_: ServerContext, _exchange: Exchange, read: Body[Ask]) -> Echo:
    return Echo(read.value.text * read.value.times, read.size)


async def nothing(_: ServerContext, exchange: Exchange) -> Echo:
    return Echo(exchange.path, 0)


TOYS = (
    Post(
        path="/toy", summary="Repeat a text", tag="toys", handler=echo, request=Ask, response=Echo,
        refused={"echo": (False,)},
    ),
    Get(path="/toy/{}", rest="name", summary="Nothing", tag="toys", handler=nothing, response=Echo, open=True),
)  # fmt: skip


@pytest.fixture(scope="module")
def toys(folder: Path) -> Iterator[LiveServer]:
    with mock.patch.object(app, "ROUTES", (*app.ROUTES, *TOYS)), serving(folder, api_key=("k",)) as live:
        yield live


def test_it_is_served(toys: LiveServer) -> None:
    key = {"authorization": "Bearer k"}
    assert toys.post("/toy", {"text": "ab"}, key).json == {"text": "abab", "bytes": 14}
    assert toys.get("/toy/some/name").json == {"text": "/toy/some/name", "bytes": 0}
    toys.post("/toy", {"text": "ab"}).error(401)
    toys.post("/toy", {"text": 1}, key).error(400, "invalid_type", "text")
    toys.post("/toy", {"text": "ab", "echo": True}, key).error(400, "unsupported_parameter", "echo")
    assert toys.post("/toy", {"text": "ab", "echo": False}, key).status == 200
    assert (
        toys.get("/toy", key).error(405, "method_not_allowed")
        == "GET is not allowed on this path; use OPTIONS, POST"
    )


def test_openapi_has_it_with_its_types(toys: LiveServer) -> None:
    document = toys.get("/openapi.json", {"authorization": "Bearer k"}).json
    posted = document["paths"]["/toy"]["post"]
    assert (posted["summary"], posted["tags"]) == ("Repeat a text", ["toys"])
    sent = posted["requestBody"]["content"]["application/json"]["schema"]
    made = posted["responses"]["200"]["content"]["application/json"]["schema"]
    assert (sent, made) == ({"$ref": "#/components/schemas/Ask"}, {"$ref": "#/components/schemas/Echo"})
    times = document["components"]["schemas"]["Ask"]["properties"]["times"]
    assert times == {"description": "how often", "default": 2, "minimum": 1, "type": "integer"}
    assert document["paths"]["/toy/{name}"]["parameters"][0]["name"] == "name"


def test_what_a_path_matches_has_a_name() -> None:
    assert [route.path for route in app.ROUTES if ("{}" in route.path) != bool(route.rest)] == []


def test_an_endpoint_is_known_to_its_own_file() -> None:
    """The other one that adding it touches is app.py, with the file's routes; docs/architecture.md says so."""
    server = Path(app.__file__).parent
    (route,) = (route for route in tokens.ROUTES if route.path == "/detokenize")
    names = re.compile(rf"/detokenize\b|{route.request.__name__}|{route.response.__name__}")
    assert [path.name for path in server.glob("*.py") if names.search(path.read_text())] == ["tokens.py"]
    assert set(tokens.ROUTES) < set(app.ROUTES)
