"""openai_app: the server's routes in another application, under a prefix, from start to end."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest
import uvicorn

import quire
from helpers.server import GUARD
from quire.types import QuireError

EXAMPLE = Path(quire.__file__).parents[2] / "examples/own_application.py"
OPTIONS: dict[str, Any] = {"max_model_len": 200, "threads": 1}
BODY = {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True}


@contextmanager
def running(application: Any, **options: Any) -> Iterator[str]:
    """The address of a plain server that runs an application."""
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_config=None, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    end = time.monotonic() + GUARD
    while not server.started:
        assert time.monotonic() < end
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(GUARD)
    assert not thread.is_alive()


def answer(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=GUARD) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_example(folder: Path) -> None:
    with mock.patch.dict(os.environ, MODEL=str(folder)):
        spec = importlib.util.spec_from_file_location("own_application", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
    with running(example.site) as url, openai.OpenAI(base_url=f"{url}/llm/v1", api_key="-") as client:
        assert answer(url) == (200, b"The model is at /llm/v1.")
        name = client.models.list().data[0].id
        text = client.completions.create(model=name, prompt="Hi", max_tokens=4, temperature=0).choices[0].text
        pieces = client.completions.create(model=name, prompt="Hi", max_tokens=4, temperature=0, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == text
        status, raw = answer(f"{url}/llm/v1/nothing")
        assert (status, json.loads(raw)["error"]["code"]) == (404, "not_found")
        assert answer(f"{url}/v1/models")[0] == 404


def test_an_application_of_its_own(folder: Path, tmp_path: Path) -> None:
    """A server that runs it starts and stops it; keys, limits and batches are those of quire serve."""
    application = quire.openai_app(
        folder, api_key=["secret"], max_body_bytes=500, files_dir=str(tmp_path), **OPTIONS
    )
    secret = {"authorization": "Bearer secret"}
    for _ in range(2):  # a lifespan may come again
        with running(application, root_path="/behind/a/proxy") as url:
            assert answer(f"{url}/v1/completions", BODY)[0] == 401
            assert answer(f"{url}/v1/completions", BODY, **secret)[0] == 200
            assert answer(f"{url}/v1/completions", BODY | {"prompt": "x" * 600}, **secret)[0] == 413
            assert answer(f"{url}/v1/files", **secret)[0] == 200
            assert answer(f"{url}/health", host="any.example")[0] == 200


async def sent(application: Any, *messages: str) -> list[dict[str, Any]]:
    """What an application sends in a lifespan of these messages."""
    given, found = iter(messages), []

    async def receive() -> dict[str, Any]:
        return {"type": f"lifespan.{next(given)}"}

    async def send(message: dict[str, Any]) -> None:
        found.append(message)

    await application({"type": "lifespan"}, receive, send)
    return found


def test_what_cannot_start(folder: Path, tmp_path: Path) -> None:
    (failed,) = asyncio.run(sent(quire.openai_app(tmp_path / "none"), "startup"))
    assert failed["type"] == "lifespan.startup.failed"
    assert "none" in failed["message"]
    application = quire.openai_app(folder, **OPTIONS)
    with pytest.raises(
        QuireError, match="not started; the application that it is mounted in needs its `lifespan`"
    ):
        asyncio.run(
            application({"type": "http", "path": "/", "headers": []}, mock.AsyncMock(), mock.AsyncMock())
        )
    for options, message in (
        ({"port": 80}, "port: is up to the server that runs the application"),
        ({"reader_timeout": 0.0}, "reader_timeout: 0.0 is not above 0"),
        ({"max_model_lem": 1}, "max_model_lem is not an option; did you mean max_model_len"),
        ({"api_key_file": str(tmp_path / "none")}, "api_key_file: cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            quire.openai_app(folder, **options)
    started = asyncio.run(sent(application, "startup", "shutdown"))
    assert [message["type"] for message in started] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


def test_bodies_that_find_no_memory_are_refused(folder: Path) -> None:
    """Though another server has received them."""
    application = quire.openai_app(folder, **OPTIONS)
    body = json.dumps(BODY).encode()
    scope = {"type": "http", "method": "POST", "path": "/llm/v1/completions", "root_path": "/llm",
             "http_version": "1.1", "headers": [(b"host", b"x"), (b"content-type", b"application/json")]}  # fmt: skip

    async def status() -> list[int]:
        found: list[int] = []
        parts: list[bytes] = []

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                found.append(message["status"])

        async def receive() -> dict[str, Any]:
            if not parts:
                await asyncio.get_running_loop().create_future()  # nobody hangs up
            return {"type": "http.request", "body": parts.pop(), "more_body": False}

        async with application.lifespan():
            service = application._service
            assert service is not None
            bodies = service.context.memory.bodies
            parts = [body]
            await application(dict(scope), receive, send)
            assert bodies.used == 0
            await bodies.take(bodies.limit - 1)
            parts = [body]
            await application(dict(scope), receive, send)
            bodies.give(bodies.limit - 1)
        return found

    assert asyncio.run(status()) == [200, 429]
