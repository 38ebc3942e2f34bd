"""Routes for administrators: off by default, open to their keys alone; what vLLM's do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, Reply, serving
from quire.config.serving import ServingConfig
from quire.server.admin import check_all_keys
from quire.server.app import ROUTES

ADMIN = {"authorization": "Bearer root-key"}
CLIENT = {"authorization": "Bearer client-key"}
PATHS = [(route.method, route.path) for route in ROUTES if route.admin]


@pytest.fixture(scope="module")
def folder_of_profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "new"


@pytest.fixture(scope="module")
def server(folder: Path, folder_of_profiles: Path) -> Iterator[LiveServer]:
    options = {
        "admin_api_key": ("root-key",),
        "api_key": ("client-key",),
        "profile_dir": str(folder_of_profiles),
    }
    with serving(folder, ENDLESS, **options, **PATIENT) as live:
        yield live


def post(server: LiveServer, path: str, headers: dict[str, str] = ADMIN) -> Reply:
    return server.request("POST", path, b"", headers)


def test_they_are_off_by_default(folder: Path) -> None:
    """Also with a client's key; the error has the form of the API."""
    with serving(folder, api_key=("client-key",)) as live:
        for method, path in PATHS:
            for headers in ({}, CLIENT):
                reply = live.request(method, path.format("x"), b"", headers)
                assert reply.status == 404
                assert "a server with --admin-api-key has it" in reply.text
        described = live.get("/openapi.json", CLIENT).json["paths"]
        assert not {path for _, path in PATHS} & described.keys()


def test_only_an_administrator_may_call_them(server: LiveServer) -> None:
    for method, path in PATHS:
        for headers in ({}, CLIENT, {"x-api-key": "root-kez"}):
            reply = server.request(method, path.format("x"), b"", headers)
            assert reply.status == 401, path
            assert "root-key" not in reply.text
    server.get("/v1/models", ADMIN).error(401, "invalid_api_key")  # and of clients' routes none
    assert server.get("/server_info", {"x-api-key": "root-key"}).status == 200


def test_keys_of_administrators(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# us\nboth\n")
    with pytest.raises(ValueError, match="admin_api_key: a key is also one of api_key"):
        check_all_keys(ServingConfig(api_key=("both",), admin_api_key_file=str(file)))
    with pytest.raises(ValueError, match="admin_api_key_file: cannot be read"):
        check_all_keys(ServingConfig(admin_api_key_file=str(tmp_path / "none")))
    with pytest.raises(ValueError, match="admin_api_key: a key must be printable"):
        ServingConfig(admin_api_key=(" ",))


def test_server_info_has_no_keys(server: LiveServer) -> None:
    reply = server.get("/server_info", ADMIN)
    assert reply.json["vllm_config"]["max_num_queued_reqs"] == 1024
    assert "root-key" not in reply.text
    assert "client-key" not in reply.text


def test_load(server: LiveServer) -> None:
    assert server.get("/load", CLIENT).json == {"server_load": 0}
    with server.busy(1, "authorization: Bearer client-key\r\n"):
        server.wait(lambda: server.get("/load", CLIENT).json["server_load"] == 1)


def test_the_prefix_cache_is_reset(server: LiveServer) -> None:
    body = {"prompt": "word " * 60, "max_tokens": 1}

    def cached() -> int:
        usage = server.post("/v1/completions", body, CLIENT).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert post(server, "/reset_prefix_cache").status == 200
    assert cached() == 0
    assert cached() > 0


def test_a_profile_has_the_steps_between_its_start_and_its_end(
    server: LiveServer, folder_of_profiles: Path
) -> None:
    post(server, "/stop_profile").error(409, "no_profile")
    assert post(server, "/start_profile").status == 200
    post(server, "/start_profile").error(409, "profile_runs")
    asked = server.post("/v1/completions", {"prompt": "one", "max_tokens": 5}, CLIENT)
    assert asked.status == 200
    assert post(server, "/stop_profile").status == 200
    later = server.post("/v1/completions", {"prompt": "two", "max_tokens": 5}, CLIENT)
    told, plain = (
        server.get(f"/v1/requests/{one.json['id']}/explain", headers=CLIENT).json for one in (asked, later)
    )
    assert [*told["stages"]] == ["embed", "layers", "project", "sample"]
    assert 0 < sum(told["stages"].values()) < told["total_ms"]
    assert "its steps, with all that was in them: embed " in told["text"]
    assert plain["stages"] == {}
    (file,) = folder_of_profiles.iterdir()
    trace = json.loads(file.read_text())
    steps = [event for event in trace["traceEvents"] if event["name"] == "step"]
    assert len(steps) == trace["otherData"]["steps"] >= 5
    assert trace["otherData"]["missed_steps"] == 0
    assert sum(step["args"]["decode_tokens"] for step in steps) >= 4
    names = [event["name"] for event in trace["traceEvents"]]
    stages = ["embed", "layers", "project", "sample"]
    assert names == ["step", "schedule", "execute", *stages, "update"] * len(steps)
    for index, event in enumerate(trace["traceEvents"]):
        if event["name"] == "execute":  # its stages are within it, and follow each other
            inner = trace["traceEvents"][index + 1 : index + 5]
            assert event["ts"] <= inner[0]["ts"]
            assert inner[-1]["ts"] + inner[-1]["dur"] == pytest.approx(event["ts"] + event["dur"])
            assert all(each["dur"] > 0 for each in inner)
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in trace["traceEvents"])


def test_a_profile_that_is_full_ends_by_itself(
    server: LiveServer, folder_of_profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.step_profile.MAX_STEPS", 3)
    before = {*folder_of_profiles.glob("*")}
    assert post(server, "/start_profile").status == 200

    def timed() -> bool:
        asked = server.post("/v1/completions", {"prompt": "one", "max_tokens": 5}, CLIENT)
        return bool(server.get(f"/v1/requests/{asked.json['id']}/explain", headers=CLIENT).json["stages"])

    assert timed()
    server.wait(lambda: not timed())
    post(server, "/start_profile").error(409, "profile_runs")
    assert post(server, "/stop_profile").status == 200
    (file,) = {*folder_of_profiles.iterdir()} - before
    assert json.loads(file.read_text())["otherData"] == {"steps": 3, "missed_steps": 0}


def test_profiles_need_a_folder(folder: Path) -> None:
    with serving(folder, admin_api_key=("root-key",)) as live:
        assert "--profile-dir" in post(live, "/start_profile").error(400, "profiles_off")
