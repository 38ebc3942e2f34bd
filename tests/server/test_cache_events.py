"""GET /kv/events: who may follow a cache, how many, and what is left when the server ends."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path

from helpers.server import GUARD, LiveServer, serving
from quire.engine.cache_log import MOST_FOLLOWERS

ON = {"enable_kv_cache_events": True, "publisher": "null"}
ADMIN = {"authorization": "Bearer root-key"}


@contextlib.contextmanager
def following(server: LiveServer) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=GUARD)
    with contextlib.closing(connection):
        connection.request("GET", "/kv/events", headers=ADMIN)
        yield connection.getresponse()


def test_administrators_alone_may_follow(folder: Path) -> None:
    options = {"api_key": ("client-key",), "admin_api_key": ("root-key",), "kv_events_config": ON}
    with serving(folder, **options) as server:  # type: ignore[arg-type]
        assert server.get("/kv/events").status == 401
        assert server.get("/kv/events", {"authorization": "Bearer client-key"}).status == 401
        server.get("/kv/events?replica=1", ADMIN).error(400, param="replica")
        server.get("/kv/events?x=1", ADMIN).error(400, "unknown_field")
        assert server.request("HEAD", "/kv/events", headers=ADMIN).status == 200
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(following(server)) for _ in range(MOST_FOLLOWERS)]
            assert {reader.status for reader in readers} == {200}
            server.get("/kv/events", ADMIN).error(503, "too_many_followers")
            assert readers[0].readline() == b"event: snapshot\n"
        server.wait(lambda: not server.engine.cache_logs()[0].is_followed)
        with following(server) as reader:
            assert reader.readline() == b"event: snapshot\n"
            server.loop.call_soon_threadsafe(server._stop.set)
            assert reader.read()  # it ends with the server


def test_it_is_off_unless_asked_for(folder: Path) -> None:
    with serving(folder, admin_api_key=("root-key",)) as server:
        assert "--kv-events-config" in server.get("/kv/events", ADMIN).error(404, "not_found")
    with serving(folder, kv_events_config=ON) as server:
        server.get("/kv/events", ADMIN).error(404, "not_found")  # without administrators
