"""Files and batches over HTTP: with OpenAI's client, over a restart, for several keys, and with bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.process import running, until
from helpers.server import ENDLESS, PATIENT, LiveServer, Reply, serving
from quire.server.batches.batch_lines import answered, resume_output
from quire.server.batches.batch_states import BatchStates
from quire.server.batches.file_store import FilesDirError, FileStore
from quire.server.inner_request import InnerAnswer

KEYS = ("first-key", "second-key")
BOUNDARY = "b0und"


def request(custom_id: str, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    body = {"prompt": text, "max_tokens": 3, "ignore_eos": True, "temperature": 0} | fields
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def lines(*requests: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


def multipart(*parts: tuple[str, bytes], end: str = f"--{BOUNDARY}--\r\n") -> bytes:
    """A body; a part's name is what stands behind name= in its header."""
    written = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}\r\n\r\n'.encode() + data + b"\r\n"
        for name, data in parts
    ]
    return b"".join(written) + end.encode()


PURPOSE = ('purpose"', b"batch")


def send(
    server: LiveServer, body: bytes, key: str = KEYS[0], kind: str = "multipart/form-data; boundary=b0und"
) -> Reply:
    headers = {"content-type": kind, "authorization": f"Bearer {key}"}
    return server.request("POST", "/v1/files", body, headers)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = {"max_file_size": 100_000, "files_size": 150_000, "max_body_bytes": 20_000}
    where = str(tmp_path_factory.mktemp("files"))
    with serving(folder, ENDLESS, api_key=KEYS, files_dir=where, **limits, **PATIENT) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0])


def ended(server: LiveServer, client: openai.OpenAI, name: str) -> Any:
    """Wait for the end of a batch."""
    final = {"failed", "completed", "expired", "cancelled"}
    server.wait(lambda: client.batches.retrieve(name).status in final)
    return client.batches.retrieve(name)


def outputs(client: openai.OpenAI, name: str | None) -> dict[str, Any]:
    assert name is not None
    found = [json.loads(line) for line in client.files.content(name).text.splitlines()]
    return {line["custom_id"]: line for line in found}


def test_the_flow_of_openais_client(server: LiveServer, client: openai.OpenAI) -> None:
    data = lines(request("a"), request("b", temperature=-1), request("c", "Other"))
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        len(data),
        "in.jsonl",
        "batch",
        "processed",
    )
    assert client.files.content(file.id).read() == data
    assert client.files.retrieve(file.id) == file
    assert file.id in [found.id for found in client.files.list(purpose="batch")]
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"k": "v"}
    )
    assert (made.status, made.metadata, made.expires_at) == (
        "validating",
        {"k": "v"},
        made.created_at + 86400,
    )
    batch = ended(server, client, made.id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    good, bad = outputs(client, batch.output_file_id), outputs(client, batch.error_file_id)
    assert set(good) == {"a", "c"}
    direct = server.post("/v1/completions", request("a")["body"], {"authorization": f"Bearer {KEYS[0]}"}).json
    answer = good["a"]["response"]
    assert answer["status_code"] == 200
    assert good["a"]["error"] is None
    assert answer["body"]["choices"] == direct["choices"]
    assert bad["b"]["response"]["status_code"] == 400
    assert "temperature" in bad["b"]["response"]["body"]["error"]["message"]
    assert client.batches.list(limit=1).data[0].id == batch.id
    deleted = client.files.delete(file.id)
    assert deleted.deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_what_belongs_to_one_key_is_not_there_for_another(server: LiveServer, client: openai.OpenAI) -> None:
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[1])
    file = client.files.create(file=("in.jsonl", lines(request("a"))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    for call in (
        lambda: other.files.retrieve(file.id),
        lambda: other.files.content(file.id),
        lambda: other.files.delete(file.id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            call()  # type: ignore[no-untyped-call]
    assert not other.files.list().data
    assert not other.batches.list().data
    assert server.get("/v1/files/" + file.id).status == 401
    assert ended(server, client, batch.id).status == "completed"


BAD_LINES = [
    (b"no json\n", "invalid_json_line"),
    (b'{"custom_id": "x", "method": "POST", "url": "/v1/completions"}\n', "missing_required_parameter"),
    (lines(request("x") | {"method": "GET"}), "invalid_method"),
    (lines(request("x") | {"url": "/v1/chat/completions"}), "invalid_url"),
    (lines(request("x", stream=True)), "invalid_request"),
    (lines(request("x") | {"body": [1]}), "invalid_request"),
    (lines(request("ok")), "duplicate_custom_id"),
    (lines(request("")), "invalid_custom_id"),
    (lines(request("x", "y" * 20_000)), "line_too_long"),
]


def test_a_batch_with_bad_lines_fails_and_names_them(server: LiveServer, client: openai.OpenAI) -> None:
    data = lines(request("ok")) + b"".join(line for line, _ in BAD_LINES)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = ended(server, client, batch.id)
    assert batch.status == "failed"
    assert batch.output_file_id is None
    found = [(error.line, error.code) for error in batch.errors.data]
    assert found == [(number, code) for number, (_, code) in enumerate(BAD_LINES, 2)]
    client.files.delete(file.id)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (multipart(PURPOSE), 400, "file: missing"),
        (multipart(('file"; filename="a"', b"x")), 400, "purpose: missing"),
        (multipart(('purpose"', b"vision"), ('file"; filename="a"', b"x")), 400, "'vision' is not supported"),
        (multipart(PURPOSE, PURPOSE, ('file"; filename="a"', b"x")), 400, "purpose: sent more than once"),
        (multipart(PURPOSE, ('file"', b"x"), ('file"', b"y")), 400, "file: sent more than once"),
        (multipart(PURPOSE, ('other"', b"x"), ('file"', b"y")), 400, "other: not a field"),
        (multipart(PURPOSE, ('expires_after[seconds]"', b"9"), ('file"', b"y")), 400, "expires_after.seconds"),
        (multipart(PURPOSE, ('file"', b"x"), end=""), 400, "ends before its last boundary"),
        (multipart(*[(f'f{i}"', b"x") for i in range(20)]), 400, "more than 16 parts"),
        (multipart(('f"; ' + "x" * 5000, b"x")), 400, "Maximum header size exceeded"),
        (multipart(('purpose"', b"x" * 2000)), 400, "purpose: is over 1024 bytes"),
        (b"nonsense", 400, "not multipart/form-data"),
        (multipart(PURPOSE, ('file"', b"x" * 100_001)), 413, "over the limit of 100000 bytes"),
        (multipart(PURPOSE, ('file"', b"x" * 400_000)), 400, "--files-size"),
    ],
)  # fmt: skip
def test_a_bad_upload_is_refused_and_leaves_nothing(
    server: LiveServer, body: bytes, status: int, told: str
) -> None:
    assert told in send(server, body, KEYS[1]).error(status)
    assert server.get("/v1/files", {"authorization": f"Bearer {KEYS[1]}"}).json["data"] == []
    assert not list(Path(str(server.config.files_dir)).rglob("*.part"))


def test_other_bad_requests_are_refused(server: LiveServer, client: openai.OpenAI) -> None:
    key = {"authorization": f"Bearer {KEYS[0]}"}
    send(server, b"{}", kind="application/json").error(415)
    server.get("/v1/files?limit=0", key).error(400, param="limit")
    server.get("/v1/files?order=up", key).error(400, param="order")
    server.get("/v1/files?no=1", key).error(400, param="no")
    server.get("/v1/batches?after=x", key).error(400, param="after")
    server.get("/v1/files/x/other", key).error(404)
    server.get("/v1/batches/../../x", key).error(404)
    file = client.files.create(file=("in.jsonl", lines(request("a"))), purpose="batch").id
    ask = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    for name, value in (("endpoint", "/metrics"), ("completion_window", "24"), ("completion_window", "99d")):
        server.post("/v1/batches", ask | {name: value}, key).error(400, param=name)
    server.post("/v1/batches", ask | {"metadata": {"k": "v" * 513}}, key).error(400)
    server.post("/v1/batches", ask | {"input_file_id": "file-x"}, key).error(404)
    server.post("/v1/batches/x/stop", {}, key).error(404)
    client.files.delete(file)


def test_a_batch_yields_to_clients_and_can_be_cancelled(folder: Path, tmp_path: Path) -> None:
    """It takes every slot; a client's request gets one at once, under any policy."""
    with serving(folder, ENDLESS | {"max_num_seqs": 2}, files_dir=str(tmp_path), **PATIENT) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        requests = [request(f"r{i}", max_tokens=60_000) for i in range(4)]
        file = client.files.create(file=("in.jsonl", lines(*requests)), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        server.wait(lambda: server.engine.stats.running == 2)
        assert server.complete("Quick", max_tokens=4).status == 200
        with pytest.raises(openai.ConflictError):
            client.files.delete(file.id)
        assert client.batches.cancel(made.id).status in {"cancelling", "cancelled"}
        batch = ended(server, client, made.id)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)
        server.wait(server.idle)
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(made.id)


def test_a_batch_survives_the_death_of_its_server(folder: Path, tmp_path: Path) -> None:
    """Killed with -9 amid a batch, and started again: every line is answered once."""
    where = ["--files-dir", str(tmp_path), "--max-num-seqs", "2"]
    requests = [request(f"r{i}", f"Number {i}", max_tokens=20 if i < 3 else 3000) for i in range(8)]
    with running(folder, *where) as first:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{first.port}/v1", api_key="none")
        file = client.files.create(file=("in.jsonl", lines(*requests)), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        until(lambda: client.batches.retrieve(made.id).request_counts.completed > 0)  # type: ignore[union-attr]
        first.process.kill()
    (output,) = tmp_path.rglob("*.output")
    before = output.read_bytes()
    with output.open("ab") as half:
        half.write(b'{"id": "batch_req_')  # a line that the kill cut off
    with running(folder, *where) as second:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{second.port}/v1", api_key="none")
        until(lambda: client.batches.retrieve(made.id).status == "completed")
        batch = client.batches.retrieve(made.id)
        content = client.files.content(str(batch.output_file_id)).read()
    assert content.startswith(before)
    assert sorted(json.loads(line)["custom_id"] for line in content.splitlines()) == [
        f"r{i}" for i in range(8)
    ]
    assert batch.request_counts.completed == 8  # type: ignore[union-attr]


def test_when_the_window_is_over_the_rest_expires(folder: Path, tmp_path: Path) -> None:
    """A server that was down for the rest of a day."""
    files = FileStore(tmp_path, 10**6, 10**6)
    part = files.folder("shared") / "in.part"
    part.write_bytes(lines(request("a"), request("b")))
    states = BatchStates(files)
    source = files.add("shared", files.new_id(), part, "in.jsonl", "batch").id
    late = states.create("shared", "/v1/completions", source, ("24h", -1.0), None, 3600.0)
    late.status = "in_progress"
    states.save("shared", late.id)
    answer = InnerAnswer(200, "id", "application/json", b"{}")
    states.path("shared", late.id, "output").write_bytes(answered(1, "a", answer))
    files.close()
    with serving(folder, files_dir=str(tmp_path)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        batch = ended(server, client, late.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
            "expired",
            1,
            1,
        )
        assert set(outputs(client, batch.output_file_id)) == {"a"}
        assert outputs(client, batch.error_file_id)["b"]["error"]["code"] == "batch_expired"
        made = client.files.retrieve(batch.output_file_id)
        assert made.expires_at == made.created_at + 3600
        with pytest.raises(FilesDirError, match="another server uses it"):
            FileStore(tmp_path, 10**6, 10**6)


def test_an_answer_is_on_disk_whole_or_not_at_all(tmp_path: Path) -> None:
    """Cut at any byte, an output goes on after its last whole line."""
    answer = InnerAnswer(200, "id", "application/json", b'{"text": "a\\nb"}')
    whole = b"".join(answered(number, f"r{number}", answer) for number in (1, 2, 3))
    path = tmp_path / "out"
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        kept = whole[:size].count(b"\n")
        assert resume_output(path) == {number: f"r{number}" for number in range(1, kept + 1)}
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:kept])


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """What a crash cut off goes at the next start, and no file of the store with it."""
    store = FileStore(tmp_path, 10**6, 10**6)
    part = store.folder("shared") / "upload.part"
    part.write_bytes(b"line")
    store.add("shared", "file-1", part, "in.jsonl", "batch")
    names = {path.name for path in (tmp_path / "shared").iterdir()}
    assert names == {"file-1.json", "file-1.data"}
    store.close()
    for name in (
        "file-2.part",
        "file-2.data",
        ".file-1.json.99999999.unfinished",
        ".batch_3.json.1.unfinished",
    ):
        (tmp_path / "shared" / name).write_bytes(b"{")
    store = FileStore(tmp_path, 10**6, 10**6)
    assert {path.name for path in (tmp_path / "shared").iterdir()} == names
    assert [body.id for body in store.all("shared")] == ["file-1"]
    store.close()


def test_without_a_folder_there_are_no_files(folder: Path) -> None:
    with serving(folder) as server:
        message = server.get("/v1/files").error(404, "files_disabled")
    assert "--files-dir" in message
