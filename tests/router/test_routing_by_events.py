"""A router that follows what real servers have cached: blocks come and go, events are lost, an engine is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.process import Process, running, until
from helpers.routed import Routed, routed
from quire.loader import DEFAULT_MODEL

EVENTS = json.dumps({"enable_kv_cache_events": True, "publisher": "null"})
KEY = {"authorization": "Bearer the-administrator"}
TEXT = "Answer from what follows. " + " ".join(
    f"Room {n} is painted in colour {n * 7 % 12}." for n in range(60)
)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Process]]:
    with ExitStack() as stack:
        options = (
            "--max-model-len",
            "2048",
            "--kv-events-config",
            EVENTS,
            "--admin-api-key",
            "the-administrator",
        )
        starts = stack.enter_context(ThreadPoolExecutor(2))
        yield [*starts.map(lambda _: stack.enter_context(running(Path(DEFAULT_MODEL), *options)), range(2))]


@pytest.fixture
def router(servers: list[Process], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Routed]:
    (tmp_path / "key").write_text("the-administrator\n")
    urls = [f"http://127.0.0.1:{server.port}" for server in servers]
    for server in servers:
        assert server.request("POST", "/reset_prefix_cache", headers=KEY).status == 200
    options = {"backend_admin_key_file": str(tmp_path / "key"), "prefix_source": request.param}
    with routed(urls=urls, **options) as made:
        until(lambda: all(each["reports"] == "current" for each in seen(made)))
        yield made


def seen(router: Routed) -> list[dict[str, Any]]:
    """The servers as the router sees them."""
    found: list[dict[str, Any]] = router.request("GET", "/router/backends").json["data"]
    return found


def gauge(router: Routed, name: str) -> float:
    """The sum of a metric of the router."""
    lines = [line.rpartition(" ") for line in router.request("GET", "/metrics").text.splitlines()]
    return sum(float(value) for head, _, value in lines if head.partition("{")[0] == name)


@pytest.mark.parametrize("router", ["reported", "hybrid"], indirect=True)
def test_prompts_go_where_their_beginning_is(servers: list[Process], router: Routed) -> None:
    """Also after the server has evicted it: then they may go anywhere, which a prediction does not know."""
    home = router.chat(TEXT).headers["x-quire-backend"]
    until(lambda: sum(each["reported_blocks"] for each in seen(router)) > 40)
    cached = []
    for number in range(4):
        reply = router.chat(f"{TEXT} {number}")
        assert reply.headers["x-quire-backend"] == home
        cached.append(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert min(cached) > 500
    number = int(home.removeprefix("backend-")) - 1
    (known,) = router.do(lambda: [router.backends.reports])
    digests = next(iter(known._known.values())).keys()
    assert known.tokens(home, [*digests][::-1][:1]) > 0
    servers[number].request("POST", "/reset_prefix_cache", headers=KEY)
    until(lambda: seen(router)[number]["reported_blocks"] == 0)
    assert known.tokens(home, [*digests][::-1][:1]) == 0
    assert gauge(router, "quire_router_routing_confidence") > 0.5
    assert gauge(router, "quire_router_backend_resyncs_total") == 0


@pytest.mark.parametrize("router", ["hybrid"], indirect=True)
def test_lost_events_are_told_and_found_again(servers: list[Process], router: Routed) -> None:
    """Those of an engine that was killed: all blocks are gone; and those that the router did not get."""
    home = router.chat(TEXT).headers["x-quire-backend"]
    number = int(home.removeprefix("backend-")) - 1
    until(lambda: seen(router)[number]["reported_blocks"] > 40)
    blocks = seen(router)[number]["reported_blocks"]
    before = gauge(router, "quire_router_routing_confidence")
    router.do(lambda: setattr(router.backends.reports.cache(home), "number", 0))  # as if some were lost
    router.do(lambda: setattr(router.backends.all[number].follower._client, "_connect_timeout", 0.0))
    router.chat(TEXT + " And then?")
    until(lambda: seen(router)[number]["reports"] == "lost")
    assert gauge(router, "quire_router_routing_confidence") == pytest.approx(before / 2, rel=0.2)
    router.do(lambda: setattr(router.backends.all[number].follower._client, "_connect_timeout", 5.0))
    until(lambda: seen(router)[number]["reports"] == "current")
    assert seen(router)[number]["reported_blocks"] >= blocks
    assert gauge(router, "quire_router_backend_resyncs_total") == 1
    os.kill(servers[number].engine, signal.SIGKILL)
    until(lambda: seen(router)[number].get("reported_blocks") == 0)
    until(lambda: servers[number].ready())
