"""Degrading in steps on a real server: in headers, metrics and answers, and taken back by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.process import running
from helpers.server import ENDLESS, PATIENT, serving

STEPS = ("max_tokens=3", "shed")


def test_a_saturated_server_gives_less_and_says_so_until_it_is_not_saturated(folder: Path) -> None:
    options = ENDLESS | {
        "slo": ("chat:ttft=200ms", "batch:"), "admission": "queue", "max_num_seqs": 2, "degrade": STEPS,
        "degrade_after_ms": 50.0, "scheduling_policy": "fcfs,batch=sjf",
    }  # fmt: skip
    with serving(folder, engine=options, **PATIENT) as server:
        plain = server.complete("Hello", max_tokens=6, ignore_eos=True, temperature=0)
        assert "x-quire-degraded" not in plain.headers
        assert [server.metric("quire_degrade_step", step=step) for step in STEPS] == [0, 0]
        with server.busy(6):
            server.wait(lambda: server.metric("quire_degrade_step", step="shed") == 1)
            reply = server.complete("Hello", max_tokens=2, service_tier="batch")
            assert "takes no requests of the lowest class" in reply.error(429, "shed")
            assert reply.headers["x-quire-degraded"] == "max_tokens=3, shed"
            assert server.metric("quire_degraded_requests_total", step="shed") == 1
        server.wait(lambda: server.metric("quire_degrade_step", step="shed") == 0)

        def degraded() -> bool:
            reply = server.complete("Hi", max_tokens=6, ignore_eos=True)
            found = "x-quire-degraded" in reply.headers
            assert reply.json["usage"]["completion_tokens"] == (3 if found else 6)
            return found

        server.wait(lambda: not degraded())
        server.wait(lambda: server.metric("quire_degrade_step", step="max_tokens=3") == 0)
        again = server.complete("Hello", max_tokens=6, ignore_eos=True, temperature=0)
        assert again.json["choices"] == plain.json["choices"]
        assert "x-quire-degraded" not in again.headers


def test_classes_that_are_changed_live_are_those_that_are_degraded(folder: Path) -> None:
    """The server starts without classes; one that is added is shed, and gets fewer drafts before."""
    options = ENDLESS | {
        "admission": "queue", "max_num_seqs": 2, "speculate": "ngram", "degrade": ("speculation=0", "shed"),
        "degrade_after_ms": 50.0,
    }  # fmt: skip
    with serving(folder, engine=options, admin_api_key=("root",), api_key=("client",), **PATIENT) as server:
        server.headers = {"authorization": "Bearer client"}
        admin = {"authorization": "Bearer root"}
        repeated = {"prompt": [7, 8, 9] * 20, "temperature": 0, "ignore_eos": True}
        plain = server.complete(max_tokens=200, **repeated)
        change = {"slo": ["chat:ttft=200ms", "batch:"]}
        assert server.request("PATCH", "/admin/config", change, admin).status == 200
        with server.busy(6, "authorization: Bearer client\r\n"):
            server.wait(lambda: server.metric("quire_degrade_step", step="shed") == 1)
            reply = server.complete("Hello", max_tokens=2, service_tier="batch")
            assert "takes no requests of the lowest class" in reply.error(429, "shed")
            assert reply.headers["x-quire-degraded"] == "speculation=0, shed"
            found = server.get("/server_info", admin).json["internal_states"][0]
            assert found["degraded"]["shed"] == 1
            assert found["level_missed"].keys() == {"chat", "batch"}
        server.wait(server.idle)

        def degraded() -> bool:
            reply = server.complete(max_tokens=200, **repeated)
            assert reply.json["choices"] == plain.json["choices"]
            return "x-quire-degraded" in reply.headers

        server.wait(lambda: not degraded())
        server.wait(lambda: server.metric("quire_degrade_step", step="speculation=0") == 0)
        assert server.metric("quire_degraded_requests_total", step="speculation=0") > 0


@pytest.mark.scheduling
def test_another_model_answers_for_a_saturated_one(folder: Path, tmp_path: Path) -> None:
    sections = tmp_path / "models.toml"
    sections.write_text(f'[small]\npath = "{folder}"\nmax-model-len = 4096\n')
    options = [
        "--memory",
        "1500MiB",
        "--models",
        str(sections),
        "--degrade",
        "model=small",
        "--max-num-seqs",
        "1",
    ]
    body = {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    with running(folder, *options, "--degrade-after-ms", "50") as server:
        assert "x-quire-degraded" not in server.request("POST", "/v1/completions", body).headers
        long = [server.ask(60_000, ignore_eos=True) for _ in range(3)]
        found = ""
        while found != "model=small":
            headers = server.request("POST", "/v1/completions", body).headers
            found = headers.get("x-quire-degraded", "")
        assert headers["x-quire-deployment"] == "small@1"
        for each in long:
            each.close()
        while "x-quire-degraded" in server.request("POST", "/v1/completions", body).headers:
            pass
