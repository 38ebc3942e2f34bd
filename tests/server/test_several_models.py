"""Several models in one server: shares, loading, leaving, sleeping, and engines that do not disturb each other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from test_kserve import ask as ask_inference
from test_kserve import infer

from helpers.naming import naming_adapter, naming_base
from helpers.process import Process, children, gone, running, until
from helpers.server import read_all
from quire.cli.several_models import served_models
from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.shares import ServedModel, divided
from quire.types import MemoryBudgetError

ADMIN = {"authorization": "Bearer for-administrators"}
MEMORY = ["--memory", "1500MiB", "--admin-api-key", "for-administrators"]
SERVER = [
    "--max-num-seqs",
    "8",
    "--max-connections",
    "256",
    "--grpc-port",
    "0",
    "--simulator-memory",
    "128MiB",
]


@pytest.fixture(scope="module")
def sections(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one checkpoint, one with a share of its own."""
    file = tmp_path_factory.mktemp("models") / "models.toml"
    file.write_text(
        f'[second]\npath = "{folder}"\nmemory = "500MiB"\naliases = ["other"]\nmax-model-len = 4096\n'
    )
    return file


@pytest.fixture(scope="module")
def server(folder: Path, sections: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    files = ["--files-dir", str(tmp_path_factory.mktemp("files"))]
    with running(folder, *MEMORY, "--models", str(sections), *SERVER, *files) as process:
        yield process


def ask(server: Process, model: str | None, tokens: int = 3, **fields: Any) -> Any:
    body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **fields}
    return server.request("POST", "/v1/completions", body | ({} if model is None else {"model": model}))


def states(server: Process) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.request("GET", "/v1/models").json["data"]}


def test_models_load_on_first_use_and_have_their_names_in_every_api(server: Process, folder: Path) -> None:
    first = str(folder)
    table = "\n".join(server.lines)
    assert "500.00 MiB" in table
    assert "at most, of 1.46 GiB" in table
    assert states(server) == {first: "unloaded", "second": "unloaded", "other": "unloaded"}
    assert children(server.process.pid) == []
    assert ask(server, "second").json["model"] == "second"
    assert states(server) == {first: "unloaded", "second": "ready", "other": "ready"}
    assert ask(server, "other").json["model"] == "other"
    assert ask(server, None).json["model"] == first
    assert len(children(server.process.pid)) == 2
    limits = [each["max_model_len"] for each in server.request("GET", "/v1/models").json["data"]]
    assert limits == [65_000, 4096, 4096]
    tags = server.request("GET", "/api/tags").json["models"]
    assert [each["name"] for each in tags] == [first, "second", "other"]
    chat = {"model": "second:latest", "messages": [{"role": "user", "content": "Hi"}], "stream": False}
    answer = server.request("POST", "/api/chat", chat | {"options": {"num_predict": 2}})
    assert (answer.status, answer.json["model"]) == (200, "second:latest")
    for path, message in (
        ("/v1/completions", "error"),
        ("/api/generate", "error"),
        ("/v1/messages", "error"),
    ):
        refused = server.request(
            "POST", path, {"model": "third", "prompt": "Hi", "messages": [], "max_tokens": 1}
        )
        assert refused.status == 404, path
        assert "third" in str(refused.json[message])
    names = {
        line.split('model_name="')[1].split('"')[0]
        for line in metrics(server, "quire_generation_tokens_total")
    }
    assert names == {first, "second"}


def metrics(server: Process, name: str) -> list[str]:
    lines = server.request("GET", "/metrics").text.splitlines()
    assert len([line for line in lines if line.startswith(f"# TYPE {name}")]) <= 1
    return [line for line in lines if line.startswith(f"{name}{{")]


def test_the_death_of_an_engine_leaves_the_others_untouched(server: Process, folder: Path) -> None:
    ask(server, "second")
    stream = server.stream(300, model=str(folder))
    os.kill(engine_of(server, "second@1"), signal.SIGKILL)
    assert b"[DONE]" in read_all(stream)
    until(lambda: states(server)["second"] == "ready" and ask(server, "second").status == 200)


def engine_of(server: Process, member: str) -> int:
    """The process of a version's engine."""
    return int(server.request("GET", "/debug/memory").json["models"][member]["pid"])


def test_the_load_of_a_model_is_simulated_on_another(server: Process, folder: Path) -> None:
    for model, count in ((str(folder), 3), ("second", 2)):
        for _ in range(count):
            assert ask(server, model).status == 200
    asked = {"like": "second", "seeds": 1}
    found = server.request("POST", "/admin/whatif", asked, ADMIN)
    assert found.status == 200, found.text
    assert found.json["requests"] >= 3
    assert found.json["set"] == {}
    assert found.json["figures"]["e2el_mean"]["then"]["value"] > 0
    both = server.request("POST", "/admin/whatif", asked | {"set": {"max_num_seqs": 1}}, ADMIN)
    assert both.status == 200, both.text
    assert "no model 'third'" in server.request(
        "POST", "/admin/whatif", asked | {"like": "third"}, ADMIN
    ).error(400)


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_sleeps_until_it_is_woken_up(server: Process, folder: Path, level: int) -> None:
    answer = ask(server, "second", 8).json["choices"]
    assert server.request("POST", f"/sleep?level={level}&model=second").status == 401
    assert server.request("POST", "/sleep?level=3&model=second", headers=ADMIN).status == 400
    engine = engine_of(server, "second@1")
    assert server.request("POST", f"/sleep?level={level}&model=second", headers=ADMIN).status == 200
    assert server.request("GET", "/is_sleeping?model=second", headers=ADMIN).json == {"is_sleeping": True}
    refused = ask(server, "second")
    assert (refused.status, "wake_up" in refused.text) == (503, True)
    assert gone(engine) == (level == 2)
    assert server.request("POST", "/sleep?level=2&model=second", headers=ADMIN).status == 200
    assert gone(engine)
    assert server.request("GET", "/is_sleeping?model=second", headers=ADMIN).json == {"is_sleeping": True}
    assert ask(server, str(folder)).status == 200
    assert server.request("POST", "/wake_up?model=second", headers=ADMIN).status == 200
    assert ask(server, "second", 8).json["choices"] == answer


def test_batches_and_grpc_name_a_model(server: Process, folder: Path) -> None:
    body = {"prompt": "Hi", "max_tokens": 2}
    lines = b"".join(
        json.dumps({
            "custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name, **body},
        }).encode() + b"\n"
        for name in ("second", str(folder), "third")
    )  # fmt: skip
    part = b'--b\r\ncontent-disposition: form-data; name="'
    form = (
        part + b'purpose"\r\n\r\nbatch\r\n' + part + b'file"; filename="x"\r\n\r\n' + lines + b"\r\n--b--\r\n"
    )
    kind = {"content-type": "multipart/form-data; boundary=b"}
    sent = server.request("POST", "/v1/files", form, kind)
    assert sent.status == 200, sent.text
    asked = {"input_file_id": sent.json["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    made = server.request("POST", "/v1/batches", asked)
    assert made.status == 200, made.text
    at = f"/v1/batches/{made.json['id']}"
    until(lambda: server.request("GET", at).json["status"] == "completed")
    done = server.request("GET", at).json
    answers = server.request("GET", f"/v1/files/{done['output_file_id']}/content").text.splitlines()
    found = {one["custom_id"]: one["response"]["body"]["model"] for one in map(json.loads, answers)}
    assert found == {"second": "second", str(folder): str(folder)}
    wrong = json.loads(server.request("GET", f"/v1/files/{done['error_file_id']}/content").text)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("third", 404)
    (port,) = (int(line.rpartition(" ")[2]) for line in server.lines if "gRPC: listening" in line)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        asked = [ask_inference() for _ in range(4)]
        for each, name in zip(asked, ("second", str(folder), "", "third"), strict=True):
            each.model_name = name
        told = [infer(channel, each).model_name for each in asked[:3]]
        assert told == ["second", str(folder), str(folder)]
        with pytest.raises(grpc.RpcError, match="third"):
            infer(channel, asked[3])


def test_deadlines_and_errors_lead_to_the_fallback_that_is_for_them(server: Process, folder: Path) -> None:
    def rules(*on: str) -> dict[str, Any]:
        return {"safe": {"targets": {"second@1": 1}, "fallbacks": [{"target": f"{folder}@1", "on": [*on]}]}}

    def tried(**fields: Any) -> list[tuple[int, str]]:
        found = []
        for kind in ("overload", "deadline", "error"):
            assert server.request("PUT", "/admin/traffic", rules(kind), ADMIN).status == 200
            reply = ask(server, "safe", **fields)
            found.append((reply.status, reply.headers.get("x-quire-deployment", "")))
        return found

    ask(server, str(folder))
    first, second = f"{folder}@1", "second@1"
    ask(server, "second")
    engine = engine_of(server, second)
    os.kill(engine, signal.SIGSTOP)
    try:
        for seconds in (0.3, 3.0, 30.0):  # until it is enough for the other one
            found = tried(tokens=1, deadline_ms=1000 * seconds)
            if found[1][0] == 200:
                break
        assert found == [(504, second), (200, first), (504, second)]
    finally:
        os.kill(engine, signal.SIGCONT)
    assert server.request("POST", "/sleep?level=1&model=second", headers=ADMIN).status == 200
    assert tried(tokens=1) == [(503, ""), (503, ""), (200, first)]
    assert server.request("POST", "/wake_up?model=second", headers=ADMIN).status == 200
    assert server.request("PUT", "/admin/traffic", {}, ADMIN).status == 200


def test_an_idle_model_leaves_and_who_would_wait_too_long_is_told_when_to_come_back(sections: Path) -> None:
    options = ["--models", str(sections), "--keep-alive", "0.3", "--max-load-wait", "0.001"]
    with running(None, *MEMORY, *options) as server:
        refused = ask(server, "second")
        assert refused.status == 503
        assert "ready in about" in refused.text
        assert int(refused.headers["retry-after-ms"]) > 100
        until(lambda: ask(server, "second").status == 200)  # it was loaded meanwhile
        until(lambda: children(server.process.pid) == [] and states(server)["second"] == "unloaded")
        assert ask(server, "second").status == 503
        until(lambda: ask(server, "second").status == 200)
        busy = {"model": "second", "max_tokens": 1000}

        def begun() -> bool:
            with server.ask(1000, **busy) as stream:  # unless it has left again
                if not stream.recv(12).endswith(b"200"):
                    return False
                assert states(server)["second"] == "ready"  # it has work, however long that takes
                assert b"[DONE]" in read_all(stream)
                return True

        until(begun)


def test_adapters_are_names_of_their_model(folder: Path, tmp_path: Path) -> None:
    named = naming_adapter(tmp_path / "naming", naming_base(tmp_path / "base"), 40)
    file = tmp_path / "models.toml"
    file.write_text(f'[base]\npath = "{tmp_path / "base"}"\nlora-modules = ["forty={named}"]\n')
    with running(folder, *MEMORY, "--models", str(file)) as server:
        listed = {each["id"]: each for each in server.request("GET", "/v1/models").json["data"]}
        assert [*listed] == [str(folder), "base", "forty"]
        assert (listed["forty"]["parent"], listed["forty"]["state"]) == ("base", "unloaded")
        reply = ask(server, "forty", return_token_ids=True)
        assert set(reply.json["choices"][0]["token_ids"]) == {40}
        assert reply.headers["x-quire-deployment"] == "base@1"
        assert set(ask(server, "base", return_token_ids=True).json["choices"][0]["token_ids"]) != {40}
        assert server.request("GET", "/v1/models/forty").json["root"] == str(named)
        assert ask(server, "fifty").status == 404
        assert states(server)[str(folder)] == "unloaded"


def test_shipped_adapters_belong_to_their_model_alone() -> None:
    models = served_models(["quire-mini", "other"], EngineConfig(), ServingConfig())
    assert "quire-mini:pirate=quire-mini:pirate" in models[0].serving.lora_modules
    assert [each.config.adapters.enable_lora for each in models] == [True, False]
    logged = served_models(
        ["quire-mini", "hub/other"], EngineConfig().replace(record="logs/a.qlog"), ServingConfig()
    )
    assert [each.config.recording.record for each in logged] == [
        "logs/a-quire-mini.qlog",
        "logs/a-hub-other.qlog",
    ]
    plain = served_models(["quire-mini"], EngineConfig(), ServingConfig(), shipped=False)
    assert plain[0].serving.lora_modules == ()


def shares_of(bound: int, *asked: int | None) -> Any:
    models = [
        ServedModel(f"m{at}", "quire-mini", EngineConfig(memory=size), ServingConfig())
        for at, size in enumerate(asked)
    ]
    return divided(bound, models, ServingConfig())


def test_shares_are_within_the_bound_and_refused_by_part() -> None:
    made = shares_of(4 * 2**30, 2**30, None, None)
    assert made.models["m0"] == 2**30
    assert made.models["m1"] == made.models["m2"]
    assert 0 <= made.free < 3
    with pytest.raises(
        MemoryBudgetError, match=r"memory: 1\.00 GiB is less than the sum .*m0 1\.00 GiB; m1 2\.00 GiB"
    ):
        shares_of(2**30, 2**30, 2 * 2**30)
    with pytest.raises(MemoryBudgetError, match="m1 would have none"):
        shares_of(2**30, 2**30, None)


def test_a_model_that_does_not_fit_its_share_stops_the_start(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f'[b]\npath = "{folder}"\nmemory = "50MiB"\n')
    config = ServingConfig(models=str(file))
    models = served_models([], EngineConfig(), config)
    fleet = Fleet(models, divided(2**33, models, config), config)
    with pytest.raises(MemoryBudgetError, match=r"b: memory: 50\.00 MiB cannot hold"):
        asyncio.run(fleet.start())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1", "expected a section"),
        ("[a]\nport = 80", "port: an option of the whole server"),
        ("[a]\nmax-model-length = 80", "unknown"),
        ("[a]\nmemory = true", "wrong type"),
        ("[a]\naliases = 'x'", "list of strings"),
        ("[a", "models:"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        served_models([], EngineConfig(), ServingConfig(models=str(file)))


def test_names_are_unique_and_a_folder_gives_all_of_its_models(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(folder)
    config = ServingConfig(models_dir=str(tmp_path))
    models = served_models(["one"], EngineConfig(), config)
    assert [each.name for each in models] == ["one", "one", "two"]
    with pytest.raises(ValueError, match="one: two models have this name"):
        Fleet(models, divided(4 * 2**30, models, config), config)
    with pytest.raises(ValueError, match="served_model_name"):
        Fleet(models[1:], divided(4 * 2**30, models, config), ServingConfig(served_model_name=("one",)))
