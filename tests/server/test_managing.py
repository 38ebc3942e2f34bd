"""Models that are pulled, removed, loaded and unloaded over HTTP, and that share a place in memory."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import TinyModel
from helpers.fake_hub import FakeHub
from helpers.process import Process, children, running, until
from helpers.server import Reply, request_bytes
from helpers.tokenizers import save_whole
from quire.config.serving import ServingConfig
from quire.server.dialects.keep_alive import keep_seconds
from quire.server.errors import ApiError

ADMIN = {"authorization": "Bearer for-administrators"}
NAME = "org/tiny"


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    with hub.running():
        yield hub


@pytest.fixture(scope="module")
def files(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model on the hub."""
    made = save_whole(
        TinyModel("tiny", "LlamaConfig", {"max_position_embeddings": 2048}), tmp_path_factory.mktemp("tiny")
    )
    found = {file.name: file.read_bytes() for file in made.iterdir()}
    hub.add(NAME, found)
    hub.add("org/large", {"config.json": b"{}", "model-large.safetensors": bytes(8192)})
    hub.faults.lie["model-large.safetensors"] = 40 * 2**20
    return found


@pytest.fixture(scope="module")
def server(
    folder: Path, hub: FakeHub, files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """A server with a place for one model at a time."""
    place = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "QUIRE_STORE_LIMIT"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_TOKEN", "hf_secret")
        patch.setenv("HF_HOME", str(place / "hf"))
        patch.setenv("QUIRE_STORE", str(place / "store"))
        patch.setenv("OLLAMA_MODELS", str(place / "ollama"))
        options = ["--memory", "900MiB", "--admin-api-key", "for-administrators", "--pull-limit", "20MiB"]
        with running(folder, *options, "--max-num-seqs", "8", "--max-model-len", "1000") as process:
            yield process


def ollama(server: Process, verb: str, path: str, body: Any, *, admin: bool = True) -> Reply:
    return server.request(verb, path, body, ADMIN if admin else None)


def lines(reply: Reply) -> list[dict[str, Any]]:
    return [json.loads(line) for line in reply.text.splitlines()]


def states(server: Process) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in server.request("GET", "/models").json["data"]}


def chat(server: Process, model: str, **fields: Any) -> Reply:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": False}
    return server.request("POST", "/api/chat", body | {"options": {"num_predict": 2}} | fields, ADMIN)


@pytest.fixture
def pulled(server: Process) -> str:
    assert ollama(server, "POST", "/api/pull", {"model": NAME, "stream": False}).json == {"status": "success"}
    return NAME


def test_pulling_is_for_administrators_and_takes_names_of_the_hub_alone(
    server: Process, hub: FakeHub
) -> None:
    for verb, path in (("POST", "/api/pull"), ("DELETE", "/api/delete"), ("POST", "/models/load")):
        assert ollama(server, verb, path, {"model": NAME}, admin=False).status == 401
    for name in ("/etc", "../x", "./x", "http://127.0.0.1/x", "plain", "org/../x", ""):
        refused = ollama(server, "POST", "/api/pull", {"model": name})
        assert (refused.status, refused.json["error"][:6]) == (400, "model:"), name
    assert "insecure" in ollama(server, "POST", "/api/pull", {"model": NAME, "insecure": True}).json["error"]
    assert not hub.seen
    missing = ollama(server, "POST", "/api/pull", {"model": "org/none", "stream": False})
    assert (missing.status, "there is no such" in missing.json["error"]) == (404, True)
    large = lines(ollama(server, "POST", "/api/pull", {"model": "org/large"}))[-1]
    assert "20.00 MiB" in large["error"]
    for path in ("/api/push", "/api/create"):
        refused = ollama(server, "POST", path, {"model": NAME}, admin=False)
        assert (refused.status, path in refused.json["error"]) == (400, True)
    with pytest.raises(ValueError, match=r"pull_limit: .*admin_api_key"):
        ServingConfig(pull_limit=1)


def test_a_pulled_model_is_served_in_the_place_of_the_one_that_was_idle_for_longest(
    server: Process, hub: FakeHub, folder: Path
) -> None:
    assert chat(server, str(folder)).status == 200
    told = lines(ollama(server, "POST", "/api/pull", {"model": NAME}))
    assert told[0] == {"status": "pulling manifest"}
    assert told[-1] == {"status": "success"}
    assert any(each.get("completed") == each.get("total", 0) > 0 for each in told)
    assert {seen.token for seen in hub.seen if seen.server == "cdn"} == {None}
    assert {seen.token for seen in hub.seen if seen.server == "hub"} == {"Bearer hf_secret"}
    assert states(server) == {str(folder): "loaded", NAME: "unloaded"}
    shown = ollama(server, "POST", "/api/show", {"model": NAME}, admin=False).json
    assert shown["capabilities"] == ["completion"]
    assert states(server)[NAME] == "unloaded"
    answer = chat(server, NAME)
    assert answer.status == 200, answer.text
    assert (answer.status, answer.json["model"], answer.json["eval_count"]) == (200, NAME, 2)
    assert states(server) == {str(folder): "unloaded", NAME: "loaded"}
    assert len(children(server.process.pid)) == 1
    running = server.request("GET", "/api/ps").json["models"]
    assert [each["name"] for each in running] == [NAME]
    assert running[0]["size"] > 100 * 2**20
    assert "messages" in ollama(server, "POST", "/api/show", {"model": NAME}, admin=False).json["template"]
    first = chat(server, str(folder), options={"num_predict": 8, "temperature": 0})
    assert states(server) == {str(folder): "loaded", NAME: "unloaded"}
    assert chat(server, NAME).headers["x-quire-deployment"] == f"{NAME}@1"
    again = chat(server, str(folder), options={"num_predict": 8, "temperature": 0})
    assert again.json["message"] == first.json["message"]


def test_another_version_on_the_hub_becomes_another_version_here(
    server: Process, hub: FakeHub, files: dict[str, bytes], pulled: str
) -> None:
    before = chat(server, pulled).headers["x-quire-deployment"]
    hub.add(NAME, files | {"generation_config.json": b'{"temperature": 0.5}'})
    try:
        assert ollama(server, "POST", "/api/pull", {"model": NAME, "stream": False}).status == 200
        after = chat(server, pulled).headers["x-quire-deployment"]
        assert (before, after) == (f"{NAME}@1", f"{NAME}@2")
        assert server.request("POST", "/v1/completions", {"model": before, "prompt": "Hi"}).status == 404
    finally:
        hub.add(NAME, files)


def test_models_are_copied_and_deleted(server: Process, folder: Path, pulled: str) -> None:
    copied = ollama(server, "POST", "/api/copy", {"source": pulled, "destination": "mine:v2"})
    assert copied.status == 200, copied.text
    assert chat(server, "mine:v2").status == 200
    taken = ollama(server, "POST", "/api/copy", {"source": pulled, "destination": "mine:v2"})
    assert (taken.status, "taken" in taken.text) == (400, True)
    (engine,) = children(server.process.pid)
    assert ollama(server, "DELETE", "/api/delete", {"model": "mine:v2"}).status == 200
    assert str(engine) not in map(str, children(server.process.pid))
    assert chat(server, "mine:v2").status == 404
    assert chat(server, pulled).status == 200  # its files are those of the copy
    rule = {"best": {"targets": {pulled: 1}}}
    assert server.request("PUT", "/admin/traffic", rule, ADMIN).status == 200
    assert ollama(server, "DELETE", "/api/delete", {"name": pulled}).status == 409
    assert server.request("PUT", "/admin/traffic", {}, ADMIN).status == 200
    assert ollama(server, "DELETE", "/api/delete", {"name": pulled}).status == 200
    assert ollama(server, "DELETE", "/api/delete", {"name": pulled}).status == 404
    assert [*states(server)] == [str(folder)]


def test_a_client_that_leaves_stops_its_pull_and_the_next_one_goes_on(server: Process, hub: FakeHub) -> None:
    weights = bytes(range(256)) * 8_000
    hub.add("org/slow", {"config.json": b"{}", "model-slow.safetensors": weights})
    hub.faults.held = {"model-slow.safetensors": 2**20}
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(
        request_bytes(
            "/api/pull", {"model": "org/slow"}, headers=f"authorization: {ADMIN['authorization']}\r\n"
        )
    )
    until(lambda: bool(hub.fetched("model-slow.safetensors")))
    alone = len(children(server.process.pid))
    sock.close()
    until(lambda: len(children(server.process.pid)) == alone - 1)
    hub.faults.held = {}
    hub.faults.go_on.set()
    assert ollama(server, "POST", "/api/pull", {"model": "org/slow", "stream": False}).status == 200
    assert ollama(server, "DELETE", "/api/delete", {"model": "org/slow"}).status == 200


def test_requests_say_how_long_a_model_stays(server: Process, folder: Path) -> None:
    name = str(folder)
    assert chat(server, name, keep_alive="5m").status == 200
    (entry,) = server.request("GET", "/api/ps").json["models"]
    left = (datetime.fromisoformat(entry["expires_at"]) - datetime.now(UTC)).total_seconds()
    assert 200 < left <= 300
    body = {"model": name, "keep_alive": 0}
    refused = server.request("POST", "/api/generate", body)
    assert (refused.status, "keep_alive" in refused.text) == (400, True)
    gone = server.request("POST", "/api/generate", body, ADMIN)
    assert (gone.status, gone.json["done_reason"]) == (200, "unload")
    until(lambda: states(server)[name] == "unloaded")
    assert chat(server, name, keep_alive=-1).status == 200
    until(lambda: "loaded" in states(server)[name])
    assert chat(server, name, keep_alive="soon").status == 400


def test_a_router_loads_and_unloads(server: Process, folder: Path) -> None:
    name = str(folder)
    chat(server, name)
    assert ollama(server, "POST", "/models/unload", {"model": name}).json == {"success": True}
    assert states(server)[name] == "unloaded"
    refused = ollama(server, "POST", "/models/unload", {"model": name})
    assert (refused.status, refused.json["error"]["code"]) == (400, 400)
    assert ollama(server, "POST", "/models/load", {"model": name}).json == {"success": True}
    until(lambda: states(server)[name] == "loaded")
    assert ollama(server, "POST", "/models/load", {"model": "none"}).status == 404


DURATIONS = {
    5: 5.0, "5": 5.0, -1: -1.0, "0": 0.0, "5m": 300.0, "1h30m": 5400.0, "-1m": -60.0, "300ms": 0.3, "1.5h": 5400.0,
}  # fmt: skip


@pytest.mark.parametrize(("given", "seconds"), DURATIONS.items())
def test_durations_are_those_of_go(given: str | float, seconds: float) -> None:
    assert keep_seconds(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "m", "5 m", "1d", "nan", float("nan"), float("inf"), "1m" * 40, "٣m"])
def test_what_is_no_duration_is_refused(given: str | float) -> None:
    with pytest.raises(ApiError, match="keep_alive"):
        keep_seconds(given)
