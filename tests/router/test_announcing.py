"""Servers that announce themselves: who may, for how long they are known, and how they leave; and endpoint pickers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.process import until
from helpers.raw_server import RawServer, answer
from helpers.routed import Routed, routed
from helpers.server import GUARD, Reply
from quire.config.router_link import RouterLink, parse_router
from quire.config.routing import RouterConfig
from quire.config.serving import ServingConfig
from quire.router.picked import gateway_code
from quire.routing.announcing import CODE, EXPIRES, PATH, AnnouncedServers, Announcement, announcement_code
from quire.server.announcer import Announcer, announced, announcers

KEY = b"a key that all of them have"
NO_ADDRESSES = (
    "",
    "a:1",
    "ftp://a",
    "http://",
    "http://me@a:1",
    "http://a:1?x=1",
    "http://a:1#x",
    "http://a:x",
    "http://a/ b",
)
ANSWER = answer(200, b'{"choices": []}')


def said(
    known: AnnouncedServers, now: float, name: str = "one", url: str = "http://a:1", **fields: Any
) -> bytes:
    return msgspec.json.encode(Announcement(name, url, known.nonce(now), **fields))


def take(known: AnnouncedServers, body: bytes, now: float) -> bool | None:
    return known.take(body, announcement_code(KEY, body), now)


def test_a_server_is_known_while_it_says_so() -> None:
    known = AnnouncedServers(KEY)
    assert take(known, said(known, 0.0), 0.0) is True
    assert take(known, said(known, 5.0), 5.0) is False, "nothing has changed"
    assert [*known.servers] == ["one"]
    assert not known.expire(5.0 + EXPIRES - 0.1)
    assert known.expire(5.0 + EXPIRES)
    assert not known.servers
    assert take(known, said(known, 50.0, role="prefill", weight=2.0), 50.0) is True
    assert known.servers["one"].role == "prefill"
    assert take(known, said(known, 51.0, leaving=True), 51.0) is True
    assert take(known, said(known, 51.0, leaving=True), 51.0) is False
    assert not known.servers


def test_who_may_announce() -> None:
    known = AnnouncedServers(KEY)
    body = said(known, 0.0)
    for code in ("", "0" * 64, announcement_code(b"another key, and not the same", body), "\xe9"):
        with pytest.raises(PermissionError):
            known.take(body, code, 0.0)
    with pytest.raises(PermissionError):
        known.take(body.replace(b"a:1", b"b:1"), announcement_code(KEY, body), 0.0)
    assert take(known, body, 31.0) is None, "it was said long ago"
    assert take(AnnouncedServers(KEY), body, 0.0) is None, "to another router"
    for wrong in ("", "x", "nan-0", "1.0-"):
        made = msgspec.json.encode(Announcement("one", "http://a:1", wrong))
        assert take(known, made, 1.0) is None
    for body in (
        b"",
        b"{}",
        b"[]",
        said(known, 0.0, role="all"),
        said(known, 0.0, name=""),
        said(known, 0.0, name="é"),
        said(known, 0.0, weight=0),
        *(said(known, 0.0, url=url) for url in NO_ADDRESSES),
    ):
        with pytest.raises(ValueError, match=r"."):
            take(known, body, 0.0)
    assert not known.servers


def test_a_name_is_of_one_server() -> None:
    known = AnnouncedServers(KEY)
    take(known, said(known, 0.0), 0.0)
    with pytest.raises(LookupError):
        take(known, said(known, 1.0, url="http://b:1"), 1.0)
    with pytest.raises(LookupError):
        take(known, said(known, 1.0, url="http://b:1", leaving=True), 1.0)
    assert known.servers["one"].url == "http://a:1"
    assert take(known, said(known, 1.0 + EXPIRES, url="http://b:1"), 1.0 + EXPIRES) is True


@pytest.mark.parametrize("seed", range(20))
def test_histories_end_as_a_model_of_them(seed: int) -> None:
    generator, known = random.Random(seed), AnnouncedServers(KEY)
    heard: dict[str, float] = {}
    now = 0.0
    for _ in range(500):
        now += generator.uniform(0.0, 3.0)
        name = generator.choice("abcd")
        match generator.randrange(4):
            case 0 | 1:
                take(known, said(known, now, name, f"http://{name}:1"), now)
                heard[name] = now
            case 2:
                take(known, said(known, now, name, f"http://{name}:1", leaving=True), now)
                heard.pop(name, None)
            case _:
                known.expire(now)
        known.expire(now)
        assert {*known.servers} == {each for each, at in heard.items() if now - at < EXPIRES}


def announce(router: Routed, name: str, url: str, key: bytes = KEY, **fields: Any) -> Reply:
    nonce = router.do(lambda: router.backends.announced.nonce(router.loop.time()))
    body = {"name": name, "url": url, "nonce": nonce, **fields}
    return router.request("POST", PATH, body, {CODE: announcement_code(key, json.dumps(body).encode())})


@pytest.fixture
def key(tmp_path: Path) -> str:
    (tmp_path / "router.key").write_bytes(KEY)
    return str(tmp_path / "router.key")


def test_a_router_without_servers_gets_them(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RawServer(ANSWER)
    try:
        with routed(kv_key_file=key, serving={"api_key": ("client",)}) as router:
            assert announce(router, "one", server.url, b"another key, and not the same").status == 403
            assert not router.backends.all
            assert announce(router, "one", server.url).status == 200
            until(lambda: [each.healthy for each in router.backends.all] == [True])
            asked = {"authorization": "Bearer client"}
            body = {"messages": [{"role": "user", "content": "hi"}]}
            assert router.request("POST", "/v1/chat/completions", body, asked).status == 200
            assert announce(router, "one", "http://127.0.0.1:1").status == 409
            for _ in range(2):
                assert announce(router, "bad", f"{server.url}?x=1").status == 400
            for url in ("http://127.0.0.1:1", "http://no..host:1"):
                assert announce(router, "two", url).status == 200
                until(lambda: [each.why for each in router.backends.all if each.name == "two"] == ["connect"])
                assert announce(router, "two", url, leaving=True).status == 200
            assert router.request("GET", PATH).status == 405
            monkeypatch.setattr("quire.routing.announcing.EXPIRES", 0.0)
            assert announce(router, "one", server.url).status == 200
            until(lambda: not router.backends.all)
    finally:
        server.close()


def test_without_a_key_nobody_is_taken() -> None:
    server = RawServer(ANSWER)
    try:
        with routed(urls=[server.url]) as router:
            assert announce(router, "two", server.url).status == 404
            assert len(router.backends.all) == 1
    finally:
        server.close()
    with pytest.raises(ValueError, match="name at least one server"):
        RouterConfig()


def test_a_silent_router_delays_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after `leave` runs before the goodbye has been heard, and the end waits for it a moment at most."""
    monkeypatch.setattr("quire.server.announcer._SECONDS", 3600.0)
    monkeypatch.setattr("quire.server.announcer._LEAVING_SECONDS", 3600.0)
    silent = RawServer(b"", hangs=True)
    said = Announcement("one", "http://127.0.0.1:1")

    async def serve() -> list[bool]:
        drained = []
        async with announced([Announcer(silent.url, KEY, said)]) as leave:
            while not silent.asked:
                await asyncio.sleep(0.01)
            leave()
            while not any(body["leaving"] for _, body in silent.asked):
                await asyncio.sleep(0.01)
            drained.append(True)
        return drained

    try:
        assert asyncio.run(asyncio.wait_for(serve(), GUARD)) == [True]
    finally:
        silent.close()


def test_a_goodbye_is_said_whatever_ends_a_server(key: str) -> None:
    server = RawServer(ANSWER)
    try:
        with routed(kv_key_file=key) as router:
            address = f"http://127.0.0.1:{router.port}"

            async def serve() -> None:
                async with announced([Announcer(address, KEY, Announcement("one", server.url, weight=2.0))]):
                    while not router.backends.all:
                        await asyncio.sleep(0.01)
                    assert [each.weight for each in router.backends.all] == [2.0]

            asyncio.run(asyncio.wait_for(serve(), GUARD))
            until(lambda: not router.backends.all)
    finally:
        server.close()


def test_the_option_of_a_server(key: str) -> None:
    assert parse_router(None) == RouterLink()
    text = "key=a.key, announce=http://r:8000/,announce=https://s,url=http://me:1/,name=me"
    assert parse_router(text) == RouterLink("a.key", ("http://r:8000", "https://s"), "http://me:1", "me")
    assert parse_router(f"{text},weight=2.5").weight == 2.5
    for wrong in (
        "key=a,announce=http://r:1,weight=0", "key=a,announce=http://r:1,weight=nan", "key=a,weight=2",
        "key=a,announce=http://r:1,weight=1001", "key=a,announce=http://r:1,weight=x",
        "", "announce=http://r:1", "key=", "key=a,key=b", "key=a,announce=r", "key=a,url=http://x:1", "key=a,name=x",
        "key=a,announce=http://r:1,url=me:1", "key=a,announce=http://r:99999", "key=a,unknown=1",
        *(f"key=a,announce={url}" for url in NO_ADDRESSES),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="router: "):
            ServingConfig(router=wrong)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        (made,) = announcers(ServingConfig(router=f"key={key},announce=http://127.0.0.1:1"), sock, "decode")
        assert made.said == Announcement(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", role="decode")
        with pytest.raises(ValueError, match="router: key: "):
            announcers(ServingConfig(router="key=/none/there"), sock, "")
    with socket.create_server(("0.0.0.0", 0)) as sock:
        (made,) = announcers(ServingConfig(router=f"key={key},announce=http://127.0.0.1:1"), sock, "")
        assert made.said.url.startswith("http://127.0.0.1:"), "the address that the router sees"


def test_an_endpoint_picker_is_believed_if_its_gateway_has_the_key(key: str) -> None:
    servers = [RawServer(ANSWER) for _ in range(3)]
    at = [each.url.removeprefix("http://") for each in servers]
    body = {"messages": [{"role": "user", "content": "hi"}]}
    gateway = {"x-quire-gateway": gateway_code(KEY)}
    try:
        with routed(urls=[each.url for each in servers], kv_key_file=key, policy="round-robin") as router:
            until(lambda: all(each.healthy for each in router.backends.all))

            def ask(**headers: str) -> Reply:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return router.request("POST", "/v1/chat/completions", body, named)

            def picked(endpoints: str, **more: str) -> Reply:
                return ask(x_gateway_destination_endpoint=endpoints, **more)

            for number in (2, 0, 2, 2):
                reply = picked(at[number], **gateway)
                assert reply.headers["x-quire-backend"] == f"backend-{number + 1}"
                assert reply.headers["x-gateway-destination-endpoint-served"] == at[number]
            assert picked(f"10.9.9.9:1, {at[1]}", **gateway).headers["x-quire-backend"] == "backend-2"
            assert picked("10.9.9.9:1", **gateway).status == 503, (
                "no address but those of the router's servers"
            )
            assert picked(",".join(["a:1"] * 65), **gateway).status == 400
            subset = {"x_gateway_destination_endpoint_subset": f"{at[0]},{at[2]}"}
            found = {ask(**subset, **gateway).headers["x-quire-backend"] for _ in range(6)}
            assert found == {"backend-1", "backend-3"}
            router.do(lambda: setattr(router.backends.all[1], "draining", True))
            assert picked(f"{at[1]},{at[0]}", **gateway).headers["x-quire-backend"] == "backend-1"
            router.do(lambda: setattr(router.backends.all[1], "draining", False))
            for wrong in (
                {},
                {"x-quire-gateway": gateway_code(b"another key, and not the same")},
                {"x-quire-gateway": "\xe9"},
            ):
                seen: set[str] = set()

                def others(wrong: dict[str, str] = wrong, seen: set[str] = seen) -> bool:
                    reply = picked(at[2], **wrong)
                    assert "x-gateway-destination-endpoint-served" not in reply.headers
                    seen.add(reply.headers["x-quire-backend"])
                    return seen == {"backend-1", "backend-2", "backend-3"}

                until(others)
            for server in servers:
                for headers, _ in server.asked:
                    assert not any(name.startswith(("x-gateway", "x-quire-gateway")) for name in headers)
    finally:
        for each in servers:
            each.close()
