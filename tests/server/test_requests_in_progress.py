"""GET /v1/requests and DELETE /v1/requests/{id}: one's own requests, and all of them for administrators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, Reply, serving

KEYS = ("key-of-a", "key-of-b")
ADMIN = "key-of-an-administrator"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    options = ENDLESS | {"max_num_seqs": 1, "slo": ("chat:", "batch:")}
    with serving(folder, options, api_key=KEYS, admin_api_key=(ADMIN,), **PATIENT) as live:
        yield live


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def listed(server: LiveServer, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/v1/requests", of(key)).json["data"]
    return found


def cancel(server: LiveServer, name: str, key: str) -> Reply:
    return server.request("DELETE", f"/v1/requests/{name}", headers=of(key))


def test_each_client_sees_and_ends_its_own_and_an_administrator_all(server: LiveServer) -> None:
    asked = f"authorization: Bearer {KEYS[0]}\r\n"
    with server.busy(2, headers=asked, service_tier="batch") as socks:
        server.wait(lambda: [one["status"] for one in listed(server, KEYS[0])] == ["running", "waiting"])
        server.wait(lambda: listed(server, KEYS[0])[0]["completion_tokens"] > 3)
        first, second = listed(server, KEYS[0])
        assert first["service_class"] == "batch"
        assert (first["max_tokens"], first["prompt_tokens"] > 0, first["tenant"]) == (60_000, True, None)
        assert 0 < first["ttft"] < first["age"]
        assert first["queued"] <= first["ttft"]
        assert second["ttft"] is None
        assert listed(server, KEYS[1]) == []
        assert [one["id"] for one in listed(server, ADMIN)] == [first["id"], second["id"]]
        tenant = listed(server, ADMIN)[0]["tenant"]
        assert len(tenant) == 12
        assert tenant not in KEYS
        cancel(server, first["id"], KEYS[1]).error(404, "request_not_found", "id")
        cancel(server, "cmpl-none", KEYS[0]).error(404, "request_not_found", "id")
        assert server.get("/v1/requests", of("none")).status == 401
        assert cancel(server, first["id"], KEYS[0]).json == {
            "id": first["id"], "object": "request", "cancelled": True,
        }  # fmt: skip
        server.wait(lambda: [one["status"] for one in listed(server, ADMIN)] == ["running"])
        assert cancel(server, second["id"], ADMIN).status == 200
        server.wait(lambda: listed(server, ADMIN) == [])
        text = b""
        while b"request_cancelled" not in text:
            text += (got := socks[0].recv(65536))
            assert got
    assert (
        json.loads(b"{" + text.split(b"data: {")[-1].split(b"\n")[0])["error"]["code"] == "request_cancelled"
    )


def test_all_prompts_of_a_request_end_together(server: LiveServer) -> None:
    asked = f"authorization: Bearer {KEYS[1]}\r\n"
    with server.busy(1, headers=asked, prompt=["one", "two", "three"]):
        server.wait(lambda: len(listed(server, KEYS[1])) == 3)
        assert cancel(server, listed(server, KEYS[1])[0]["id"], KEYS[1]).status == 200
        server.wait(lambda: listed(server, KEYS[1]) == [])
