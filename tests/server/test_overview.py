"""What the control room is told: the same for all who watch, once a second, and to each client what is its own."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, read_all, serving
from quire.engine.view import EngineView

KEYS = ("key-of-a", "key-of-b")
ADMIN = "key-of-an-administrator"
A, B, CHIEF = ({"authorization": f"Bearer {key}"} for key in (*KEYS, ADMIN))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, ENDLESS | {"slo": ("chat:ttft=600000", "batch:")}, **PATIENT) as live:
        yield live


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, ENDLESS, api_key=KEYS, admin_api_key=(ADMIN,), **PATIENT) as live:
        yield live


def seen(server: LiveServer, headers: dict[str, str] | None = None) -> dict[str, Any]:
    reply = server.get("/v1/overview", headers)
    assert reply.status == 200
    found: dict[str, Any] = reply.json
    return found


def watching(server: LiveServer, headers: str = "") -> socket.socket:
    sock = server.connect()
    sock.sendall(f"GET /v1/overview?stream=true HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode())
    return sock


def events(sock: socket.socket, count: int) -> list[dict[str, Any]]:
    data = b""
    while data.count(b"\n\n") < count + 1:  # one ends the head
        got = sock.recv(65536)
        assert got
        data += got
    return [json.loads(part.split(b"\n\n")[0]) for part in data.split(b"data: ")[1 : count + 1]]


def test_a_running_sequence_is_seen_in_all_its_places(alone: LiveServer) -> None:
    with alone.busy(1, prompt="The same words begin this. " * 30):
        alone.wait(lambda: alone.engine.stats.blocks_used > 20)
        with watching(alone) as sock:
            *_, before, after = events(sock, 4)
        overview, detail = after["overview"], after["detail"]
        (request,) = after["requests"]
        (sequence,) = detail["sequences"]
        assert sequence[0] == request["id"]
        prompt, computed, tokens, _, blocks = sequence[2:]
        assert prompt == request["prompt_tokens"] <= computed <= tokens
        assert overview["running"] == 1
        assert overview["state"] == "ready"
        assert 0.5 < overview["seconds"] < 30
        assert overview["rates"]["output_tokens"] > 0
        assert 0 < overview["busy"] <= 1.1
        assert {"forward", "sample", "schedule", "update"} <= overview["step_ms"].keys()
        assert overview["cache"]["used"] >= before["overview"]["cache"]["used"] > 20
        assert [one["name"] for one in overview["classes"]] == ["chat", "batch"]
        assert overview["classes"][0]["levels"] == {"ttft": 600000.0}
        assert sum(overview["memory"].values()) > 0
        states = [
            state
            for state, count in zip(*[iter(detail["blocks"])] * 2, strict=True)
            for _ in range(count)
        ]  # fmt: skip
        assert 1 <= sum(state in {1, -2} for state in states) * detail["stride"] <= blocks + detail["stride"]
        assert sum(branch[1] for branch in detail["branches"]) >= 16
        assert sum(branch[2] for branch in detail["branches"]) == 1
        spans = detail["spans"]
        assert {span[0] for span in spans} == {request["id"]}
        assert {span[4] for span in spans} == {"decode"}
        assert all(-50 <= span[3] <= span[2] for span in spans)
    alone.wait(alone.idle)


def test_the_slowest_answers_can_be_explained(alone: LiveServer) -> None:
    name = alone.complete("How long?", max_tokens=9).json["id"]
    found: list[dict[str, Any]] = []

    def listed() -> bool:
        found[:] = seen(alone)["slowest"]
        return name in {one["id"] for one in found}

    alone.wait(listed)
    mine = next(one for one in found if one["id"] == name)
    told = alone.get(f"/v1/requests/{name}/explain").json
    assert mine["ms"] == pytest.approx(told["total_ms"], abs=0.01)
    assert mine["ended"] == pytest.approx(time.time(), abs=300)
    assert [one["ms"] for one in found] == sorted((one["ms"] for one in found), reverse=True)


def test_many_who_watch_cost_one_look_a_second(alone: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, real = [], alone.engine.view

    async def view(after: int) -> EngineView:
        looks.append(after)
        return await real(after)

    monkeypatch.setattr(alone.engine, "view", view)
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        bodies = list(pool.map(lambda _: alone.get("/v1/overview").body, range(40)))
    assert len(looks) <= 2 + (time.monotonic() - began) / 0.9
    assert len({json.loads(body)["overview"]["time"] for body in bodies}) <= len(looks) + 1
    assert looks == sorted(looks)


def test_clients_see_their_own_and_administrators_all(shared: LiveServer) -> None:
    with shared.busy(1, headers=f"authorization: Bearer {KEYS[0]}\r\n"):
        name = shared.post("/v1/completions", {"prompt": "A secret", "max_tokens": 4}, A).json["id"]
        shared.wait(lambda: any(one["id"] == name for one in seen(shared, CHIEF)["slowest"]))
        a, b, chief = (seen(shared, headers) for headers in (A, B, CHIEF))
        assert (len(a["requests"]), len(b["requests"]), len(chief["requests"])) == (1, 0, 1)
        assert a["detail"] is b["detail"] is None
        assert chief["detail"]["sequences"][0][0] == a["requests"][0]["id"]
        assert b["slowest"] == []
        assert name in {one["id"] for one in a["slowest"]}
        assert shared.get("/v1/overview").status == 401
        assert shared.get(f"/v1/requests/{name}/explain", CHIEF).json["finished"]
        assert shared.get(f"/v1/requests/{name}/explain", B).status == 404
        with watching(shared, f"authorization: Bearer {KEYS[1]}\r\n") as sock:
            (event,) = events(sock, 1)
            assert (event["detail"], event["requests"]) == (None, [])


def test_administrators_see_no_texts(shared: LiveServer) -> None:
    rules = "Today is 2026-11-{} and all is well. " + "Be kind to all who ask you. " * 12
    for day in ("20", "31"):
        body = {"prompt": rules.format(day), "max_tokens": 2}
        name = shared.post("/v1/completions", body, A).json["id"]
    cache = shared.get(f"/v1/requests/{name}/explain", CHIEF).json["cache"]
    assert (cache["kind"], cache["ours"], cache["theirs"]) == ("differs", "", "")


def test_what_is_wrong_is_named(alone: LiveServer) -> None:
    alone.get("/v1/overview?stream=maybe").error(400, param="stream")
    alone.get("/v1/overview?streem=true").error(400, param="streem")


def test_a_stream_ends_with_its_server(folder: Path) -> None:
    with serving(folder) as live:
        sock = watching(live)
        events(sock, 1)
    with sock:
        assert read_all(sock).endswith(b"0\r\n\r\n")


def test_a_viewer_that_does_not_read_holds_up_nobody(alone: LiveServer) -> None:
    with watching(alone), watching(alone) as other:
        assert len(events(other, 3)) == 3
        assert asyncio.run_coroutine_threadsafe(alone.engine.ping(30.0), alone.loop).result(30)
