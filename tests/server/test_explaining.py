"""A client sees where the time of its own requests went, and why its own prompts were not cached."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, serving
from quire.cli.main import main
from quire.program.cost import Machine
from quire.steplog.log_files import read_rows
from quire.steplog.log_rows import Missed

KEYS = ("key-of-a", "key-of-b")
A, B = ({"authorization": f"Bearer {key}"} for key in KEYS)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("log") / "a.qlog"
    keys = {"api_key": KEYS, "admin_api_key": ("boss",)}
    with serving(folder, engine=ENDLESS | {"record": str(path)}, **(PATIENT | keys)) as live:
        yield live


def asked(
    server: LiveServer, prompt: str, headers: dict[str, str] = A, **fields: object
) -> tuple[str, float]:
    """The id of an answer, and the milliseconds that the client waited."""
    began = time.monotonic()
    reply = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, **fields}, headers=headers)
    assert reply.status == 200
    return str(reply.json["id"]), 1e3 * (time.monotonic() - began)


def test_parts_sum_to_what_the_client_has_waited(server: LiveServer) -> None:
    name, waited = asked(server, "Where does the time go?")
    found = server.get(f"/v1/requests/{name}/explain?steps=1", headers=A).json
    assert found["finished"]
    assert abs(sum(part["ms"] for part in found["parts"]) - found["total_ms"]) < 1
    assert found["total_ms"] <= waited
    parts = {part["name"] for part in found["parts"]}
    assert {"parse", "tokenize", "handover", "prefill", "decode", "detokenize"} <= parts
    assert found["sentence"].startswith(name)
    assert found["text"].count("\n") > 10
    assert len(found["steps"]) == 8
    assert found["chunks"] == 1
    assert found["prompt_tokens"] > found["cached_tokens"]
    assert found["steps"][0]["rows"][0][0] + found["steps"][0]["rows"][0][1] > 1


def test_the_id_of_the_exchange_is_known_too(server: LiveServer) -> None:
    headers = A | {"x-request-id": "mine-1"}
    name, _ = asked(server, "Hello", headers)
    assert server.get("/v1/requests/mine-1/explain", headers=A).json["id"] == name


def test_requests_of_another_key_are_unknown(server: LiveServer) -> None:
    name, _ = asked(server, "A secret of A")
    theirs = server.get(f"/v1/requests/{name}/explain", headers=B)
    never = server.get("/v1/requests/cmpl-never/explain", headers=B)
    assert theirs.error(404, "not_found").replace(name, "") == never.error(404, "not_found").replace(
        "cmpl-never", ""
    )
    assert server.get(f"/v1/requests/{name}/explain").status == 401


def test_the_first_difference_is_shown_with_its_text(server: LiveServer) -> None:
    rules = (
        "Answer in short sentences. Today is 2026-11-{} and all is well. "
        + "Be kind to all who ask you. " * 12
    )
    asked(server, rules.format("20"))
    name, _ = asked(server, rules.format("31"))
    cache = server.get(f"/v1/requests/{name}/explain", headers=A).json["cache"]
    assert cache["kind"] == "differs"
    assert cache["changes"] == "a date or time", cache
    assert cache["lost_tokens"] >= 16
    before, ours = cache["ours"].split("><")
    assert before.endswith("2026-11-")
    assert ours.startswith("31")
    assert cache["theirs"].split("><")[1].startswith("20")
    found = server.get("/v1/cache/misses", headers=A).json
    assert "a date or time" in [one["changes"] for one in found["templates"]]
    # what another key has cached is neither found nor shown
    other, _ = asked(server, rules.format("31"), B)
    missed = server.get(f"/v1/requests/{other}/explain", headers=B).json["cache"]
    assert missed["kind"] == "never seen"
    assert missed["theirs"] == ""
    assert server.get("/v1/cache/misses", headers=B).json["templates"] == []


def test_the_commands_tell_a_client_the_same(
    server: LiveServer,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """`quire explain`, its steps with what each has computed and moved, and `quire cache`."""
    rules = "One. Two. Three. Four. Five. The time is 2026-01-{} noon. " + "Be kind to all who ask you. " * 9
    asked(server, rules.format("05"))
    name, _ = asked(server, rules.format("06"))
    monkeypatch.setenv("QUIRE_API_KEY", KEYS[0])
    url = ["--url", server.url]
    body = server.get(f"/v1/requests/{name}/explain?steps=1", headers=A).json
    assert main(["explain", name, *url]) == 0
    told = capsys.readouterr().out
    assert told.startswith(body["sentence"])
    assert "a date or time" in told
    assert main(["explain", name, *url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"] == body["parts"]

    limits = Machine(1e12, 1e10)
    monkeypatch.setattr("quire.cli.inspect.measure_machine", lambda *_: limits)
    assert main(["explain", name, *url, "--steps", "--model", str(folder)]) == 0
    steps = capsys.readouterr().out.split("limits of this machine: ")[1].splitlines()[2:]
    assert len(steps) == 8
    for line, step in zip(steps, body["steps"], strict=True):
        number, rows, tokens, _, flops, moved, intensity, bound = (float(word) for word in line.split()[:8])
        assert (number, rows) == (step["number"], 1)
        assert tokens == step["rows"][0][1]
        assert flops / moved == pytest.approx(intensity, rel=0.02)
        assert bound == pytest.approx(1e3 * max(flops / limits.flops, moved / limits.bandwidth), abs=0.006)
    assert float(steps[0].split()[4]) > float(steps[1].split()[4]), "the prompt is the first"

    assert main(["cache", "explain", name, *url]) == 0
    told = capsys.readouterr().out
    assert "differs" in told
    assert "put the date or time at the end of the prompt" in told
    assert main(["cache", "top", *url]) == 0
    assert "a date or time changes at token" in capsys.readouterr().out
    key = tmp_path / "key"
    key.write_text(KEYS[1])
    assert main(["explain", name, *url, "--api-key-file", str(key)]) == 1
    assert "404" in capsys.readouterr().err
    assert main(["cache", "explain", *url]) == 2


def test_an_administrator_asks_what_if(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log goes to administrators only, without the texts of clients."""
    assert server.get("/admin/log", headers=A).status == 401
    for _ in range(3):
        asked(server, "Tell me a story about a river. " * 10)
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "boss")
    assert main(["whatif", "--url", server.url, "--set", "max_num_seqs=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] >= 3
    assert {"ttft_mean", "tpot_p50", "output_token_rate"} <= found["figures"].keys()
    log = read_rows(server.get("/admin/log", headers={"authorization": "Bearer boss"}).body)
    server.get("/admin/log?replica=1", headers={"authorization": "Bearer boss"}).error(400, param="replica")
    missed = [row for row in log.rows if isinstance(row, Missed)]
    assert not log.damage
    assert missed
    assert not any(row.ours or row.theirs for row in missed)
