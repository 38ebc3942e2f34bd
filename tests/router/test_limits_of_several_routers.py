"""Several routers that count the limits of their tenants together, over HTTP."""

from __future__ import annotations

import concurrent.futures
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fake_llm import Behaviour
from helpers.process import until
from helpers.redis_servers import FakeRedis, redis_server
from helpers.routed import Routed, routed
from quire.config.tenants import key_digest

pytest.importorskip("redis", reason="needs redis-py, which is optional")
FAST = Behaviour(ttft=0.0, itl=0.0)
KEY = "qk-ann-012345678901234567890123"
AUTH = {"authorization": f"Bearer {KEY}"}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[FakeRedis]:
    with redis_server("fake", tmp_path) as server:
        assert isinstance(server, FakeRedis)
        yield server


def tenants(folder: Path, shared: str, limits: str) -> dict[str, str]:
    """The option for a file with one tenant."""
    path = folder / "tenants.toml"
    path.write_text(f"{shared}\n[tenants.ann]\nkeys = ['sha256:{key_digest(KEY).hex()}']\n{limits}\n")
    return {"tenants": str(path)}


def section(redis: FakeRedis, instances: int) -> str:
    return f"[shared]\nredis = '{redis.url}'\ninstances = {instances}\ntimeout = 60"


def statuses(routers: list[Routed], each: int) -> Counter[int]:
    """Of so many chats with every router, at once."""
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(router.request, "POST", "/v1/chat/completions", CHAT, AUTH)
                 for _ in range(each) for router in routers]  # fmt: skip
    return Counter(one.result().status for one in asked)


@pytest.mark.parametrize(("shares", "admitted"), [(True, 12), (False, 24)])
def test_two_routers_admit_as_many_as_one(
    redis: FakeRedis, tmp_path: Path, shares: bool, admitted: int
) -> None:
    """And twice as many where each counts for itself."""
    options = tenants(tmp_path, section(redis, 2) if shares else "", "requests_per_minute = 12")
    with routed(FAST, serving=options) as one, routed(FAST, serving=options) as two:
        assert statuses([one, two], 20) == {200: admitted, 429: 40 - admitted}
        refused = one.request("POST", "/v1/chat/completions", CHAT, AUTH)
        assert refused.json["error"]["code"] == "rate_limit_exceeded"
        assert 0 < float(refused.headers["retry-after"]) <= 60
        text = one.request("GET", "/metrics", headers=AUTH).text
        assert 'quire_rate_limited_requests_total{limit="requests_per_minute",tenant="ann"}' in text
        assert ("quire_shared_limits_up 1.0" in text) == shares


def test_routers_go_on_without_redis_and_come_back(redis: FakeRedis, tmp_path: Path) -> None:
    options = tenants(tmp_path, section(redis, 2), "requests_per_minute = 12")
    with routed(FAST, serving=options) as one, routed(FAST, serving=options) as two:
        first = one.request("POST", "/v1/chat/completions", CHAT, AUTH)
        assert first.headers["x-ratelimit-limit-requests"] == "12"
        assert first.headers["x-ratelimit-remaining-requests"] == "11"
        redis.stop()
        assert statuses([one, two], 10) == {200: 11, 429: 9}
        text = one.request("GET", "/metrics", headers=AUTH).text
        assert "quire_shared_limits_up 0.0" in text
        assert "quire_shared_limits_alone_total 10.0" in text
        redis.start()
        for router in (one, two):
            until(
                lambda router=router: "limits_up 1.0" in router.request("GET", "/metrics", headers=AUTH).text
            )  # type: ignore[misc]
        assert statuses([one, two], 3) == {429: 6}


def test_requests_at_once_end_for_all_routers(redis: FakeRedis, tmp_path: Path) -> None:
    """Each answer makes room for the next one, wherever that comes."""
    options = tenants(tmp_path, section(redis, 2), "concurrent_requests = 1")
    with routed(FAST, serving=options) as one, routed(FAST, serving=options) as two:
        for router in (one, two, one, two):
            until(lambda router=router: statuses([router], 1) == {200: 1})  # type: ignore[misc]
