"""New versions of a model: nothing fails meanwhile, no answer mixes two, and what is broken gets no requests."""

from __future__ import annotations

import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import TinyModel
from helpers.process import Process, children, running, until
from helpers.server import Reply, request_bytes
from helpers.tokenizers import save_whole
from quire.cli.main import main
from quire.server.fleet.shadows import text_of

ADMIN = {"authorization": "Bearer for-administrators"}
SHARE = 400 * 2**20


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers otherwise."""
    shape = {"max_position_embeddings": 4096, "num_hidden_layers": 3}
    return save_whole(TinyModel("other", "LlamaConfig", shape), tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One model, and memory for three versions of it."""
    file = tmp_path_factory.mktemp("deploy") / "models.toml"
    file.write_text(f'[chat]\npath = "{folder}"\nmemory = "400MiB"\nmax-model-len = 2048\n')
    options = ["--memory", "1500MiB", "--admin-api-key", "for-administrators", "--models", str(file)]
    with running(None, *options, "--max-num-seqs", "8") as process:
        yield process


def ask(server: Process, model: str = "chat", **fields: Any) -> Reply:
    body = {
        "model": model,
        "prompt": [1, 2, 3],
        "max_tokens": 12,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    return server.request("POST", "/v1/completions", body)


def deploy(server: Process, path: Path, **fields: Any) -> Reply:
    return server.request("POST", "/admin/models", {"name": "chat", "path": str(path), **fields}, ADMIN)


def overview(server: Process) -> Any:
    return server.request("GET", "/admin/models", headers=ADMIN).json


def rules(server: Process, **rules: Any) -> Reply:
    return server.request("PUT", "/admin/traffic", rules, ADMIN)


def version(reply: Reply) -> str:
    assert reply.status == 200, reply.text
    return reply.headers["x-quire-deployment"]


def test_a_version_that_is_not_as_it_should_be_gets_no_requests(
    server: Process, folder: Path, other: Path, tmp_path: Path
) -> None:
    assert server.request("POST", "/admin/models", {"name": "chat", "path": str(other)}).status == 401
    before = overview(server)
    corrupt = tmp_path / "corrupt"
    shutil.copytree(other, corrupt)
    weights = next(corrupt.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    wrong = {weights.name: "0" * 64}
    pickled = tmp_path / "pickled"
    shutil.copytree(other, pickled)
    next(pickled.glob("*.safetensors")).rename(pickled / "pytorch_model.bin")
    for refused, why in (
        (deploy(server, corrupt), "nothing was changed"),
        (deploy(server, tmp_path / "nowhere"), "path"),
        (deploy(server, pickled), "pickle"),
        (deploy(server, other, sha256=wrong), "sha256"),
        (deploy(server, other, memory=20 * 2**20), "cannot hold"),
        (deploy(server, other, canary={"prompt": "Hi", "text": "no such answer"}), "canary: the answer is"),
    ):
        assert (refused.status, why in refused.text) == (422, True), refused.text
    refused = deploy(server, other, memory=2**40)
    assert (refused.status, "are free" in refused.text) == (409, True)
    assert deploy(server, other, unknown=1).status == 400
    assert server.request("POST", "/admin/models", {"name": "x", "path": "y"}, ADMIN).status == 404
    assert overview(server) | {"versions": 0} == before | {"versions": 0}
    assert version(ask(server)) == "chat@1"
    described = server.request("GET", "/openapi.json").json["paths"]
    assert {"get", "post"} <= described["/admin/models"].keys()
    assert {"/admin/traffic", "/v1/completions", "/sleep"} <= described.keys()


def test_versions_are_switched_under_load_without_an_outage(
    server: Process, folder: Path, other: Path
) -> None:
    texts = {"first": text_of(ask(server).body)}
    done = threading.Event()
    found: list[Reply] = []

    def load(stream: bool) -> None:
        while not done.is_set():
            found.append(ask(server, stream=stream))

    clients = [threading.Thread(target=load, args=(bool(n % 2),)) for n in range(2)]
    for client in clients:
        client.start()
    try:
        for path in (folder, other):
            made = deploy(server, path, canary={"prompt": "Hi"})
            assert (made.status, made.json["state"]) == (200, "ready"), made.text
        until(lambda: len({version(reply) for reply in list(found)}) >= 3)  # the last one has answered, too
    finally:
        done.set()
        for client in clients:
            client.join()
    assert list(overview(server)["versions"]) == [made.json["id"] + f"@{made.json['version']}"]
    texts["other"] = text_of(ask(server).body)
    assert texts["first"] != texts["other"]
    by_version: dict[str, set[str]] = {}
    for reply in found:
        by_version.setdefault(version(reply), set()).add(text_of(reply.body))
    assert all(len(each) == 1 and each < set(texts.values()) for each in by_version.values()), by_version
    assert (
        server.request("POST", "/admin/models/back", {"name": "chat"}, ADMIN).status == 409
    )  # it was not kept


def test_a_client_that_leaves_while_a_version_is_loaded_changes_nothing(server: Process, other: Path) -> None:
    before, engines = overview(server), children(server.process.pid)
    sock = socket.create_connection(("127.0.0.1", server.port))
    head = f"authorization: {ADMIN['authorization']}\r\n"
    sock.sendall(request_bytes("/admin/models", {"name": "chat", "path": str(other)}, headers=head))
    until(lambda: len(children(server.process.pid)) > len(engines))
    sock.close()
    until(lambda: children(server.process.pid) == engines)
    until(lambda: overview(server) == before)
    assert version(ask(server)) in before["versions"]


def test_a_kept_version_is_an_instant_way_back(server: Process, folder: Path) -> None:
    blue = version(ask(server))
    green = deploy(server, folder, keep=True).json["version"]
    assert version(ask(server)) == f"chat@{green}"
    assert version(ask(server, blue)) == blue
    assert server.request("POST", "/admin/models/back", {"name": "chat"}, ADMIN).status == 200
    assert version(ask(server)) == blue
    assert server.request("DELETE", f"/admin/models/{blue}", headers=ADMIN).status == 409
    assert server.request("DELETE", f"/admin/models/chat@{green}", headers=ADMIN).status == 200
    assert ask(server, f"chat@{green}").status == 404


def test_the_command_line_lists_deploys_and_stops(
    server: Process, other: Path, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("for-administrators\n")
    reach = ["--url", f"http://127.0.0.1:{server.port}", "--admin-api-key-file", str(tmp_path / "key")]
    assert main(["deploy", "chat", str(folder), "--canary", "Hi", "--keep", *reach]) == 0
    green = version(ask(server))
    assert capsys.readouterr().out == f"{green}: ready\n"
    assert main(["ps", *reach]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(green))
    assert line.split() == [green, "ready", "400.00", "MiB", str(folder), "current"]
    assert [main(["stop", green, *reach]) for _ in range(2)] == [0, 0]
    assert overview(server)["versions"][green]["state"] == "unloaded"
    assert version(ask(server)) == green
    assert main(["deploy", "chat", "--back", *reach]) == 0
    assert server.request("DELETE", f"/admin/models/{green}", headers=ADMIN).status == 200
    capsys.readouterr()
    for words, status, said in (
        (["stop", "nobody", *reach], 1, "404: model: 'nobody' is not served here"),
        (
            ["deploy", "chat", str(other), "--sha256", "config.json=00", *reach],
            1,
            "422: sha256: config.json has",
        ),
        (["deploy", "chat", *reach], 2, "path:"),
        (["ps", *reach[:2]], 2, "QUIRE_ADMIN_API_KEY"),
        (["ps", "--url", "http://127.0.0.1:9", *reach[2:]], 1, "refused"),
    ):
        assert (main(words), said in (told := capsys.readouterr().err)) == (status, True), told


def test_splits_shadows_and_fallbacks(server: Process, folder: Path, other: Path) -> None:
    assert deploy(server, other).status == 200
    old = version(ask(server))
    new = f"chat@{deploy(server, folder, switch=False).json['version']}"
    assert version(ask(server)) == old
    assert rules(server, chat={"targets": {"nobody": 1}}).status == 400
    made = rules(server, chat={"targets": {old: 3, new: 1}}, shadowed={"targets": {old: 1}, "shadow": new})
    assert made.status == 200, made.text
    counted = Counter(version(ask(server, max_tokens=1)) for _ in range(40))
    assert 8 <= counted[new] <= 12
    assert len({version(ask(server, max_tokens=1, user="one")) for _ in range(6)}) == 1
    assert server.request("DELETE", f"/admin/models/{new}", headers=ADMIN).status == 409
    for stream in (False, True):
        assert version(ask(server, "shadowed", stream=stream)) == old
    until(lambda: overview(server)["shadows"].get(f"{old} {new}", {}).get("compared") == 2)
    report = overview(server)["shadows"][f"{old} {new}"]
    assert (report["equal"], len(report["different"]), report["failed"]) == (0, 2, 0)  # they answer otherwise
    assert report["shadow_seconds"] > 0 < report["characters"]
    fallback = {"targets": {new: 1}, "fallbacks": [{"target": old, "on": ["error"]}]}
    strict = {"targets": {new: 1}, "fallbacks": [{"target": old, "on": ["overload"]}]}
    assert rules(server, safe=fallback, strict=strict).status == 200
    assert version(ask(server, "safe")) == new
    assert server.request("POST", f"/sleep?level=2&model={new}", headers=ADMIN).status == 200
    assert version(ask(server, "safe")) == old
    assert ask(server, "strict").status == 503
    names = [each["id"] for each in server.request("GET", "/v1/models").json["data"]]
    assert names == ["chat", "safe", "strict"]
    assert rules(server).status == 200
    assert server.request("DELETE", f"/admin/models/{new}", headers=ADMIN).status == 200


def test_where_both_do_not_fit_requests_wait_for_the_swap(server: Process, folder: Path, other: Path) -> None:
    size = 1000 * 2**20
    refused = deploy(server, folder, memory=size)
    assert (refused.status, "swap: true" in refused.text) == (409, True), refused.text
    done = threading.Event()
    found: list[Reply] = []

    def load() -> None:
        while not done.is_set():
            found.append(ask(server))

    client = threading.Thread(target=load)
    client.start()
    try:
        refused = deploy(
            server, other, memory=size, swap=True, canary={"prompt": "Hi", "text": "no such answer"}
        )
        assert refused.status == 422
        made = deploy(server, folder, memory=size, swap=True)
    finally:
        done.set()
        client.join()
    assert made.status == 200, made.text
    assert made.json["memory"] == size
    assert len(Counter(map(version, found))) <= 2
    assert len(overview(server)["versions"]) == 1
