"""The configuration of a running server: read, changed as a whole, tried out, and written down."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import ENDLESS, GUARD, PATIENT, LiveServer, Reply, serving
from quire.config.schema import POLICIES
from quire.config.serving import ServingConfig
from quire.config.tenants import key_digest

ADMIN = {"authorization": "Bearer root-key"}
# Each with a value and another one; all are valid together.
CHANGES: dict[str, tuple[Any, Any]] = {
    "max_num_seqs": (3, 4),
    "max_num_batched_tokens": (64, 128),
    "max_draft_tokens": (0, 4),
    "max_num_queued_reqs": (100, 200),
    "max_num_queued_tokens": (10_000, 20_000),
    "scheduling_policy": ("fair+sjf", "priority+lpm"),
    "overtake_ms": (5000.0, 10_000.0),
    "slo": (["chat:ttft=600000ms,tpot=600000ms", "batch:"], []),
    "admission": ("queue", "predict"),
    "log_level": ("warning", "info"),
    "cache_shares": ({"a": 0.1}, {"a": 0.2}),
}
# Those that the report of an engine has.
SHOWN: dict[str, Callable[[dict[str, Any], Any], bool]] = {
    "max_num_seqs": lambda stats, value: stats["step_slots"] == value,
    "max_num_batched_tokens": lambda stats, value: stats["step_budget"] == value,
    "cache_shares": lambda stats, value: stats["floors"] == {"a": int(value["a"] * stats["blocks"])},
}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    tenants = tmp_path_factory.mktemp("live") / "tenants.toml"
    digest = key_digest("a-key-that-is-long-enough-to-be-one").hex()
    tenants.write_text(f"[tenants.a]\nkeys = ['sha256:{digest}']\n")
    engine = ENDLESS | {"max_num_seqs": 4, "max_num_batched_tokens": 128, "speculate": "ngram"}
    options = {"tenants": str(tenants), "admin_api_key": ("root-key",), "api_key": ("client-key",)}
    with serving(folder, engine, **options, **PATIENT) as live:
        live.headers = {"authorization": "Bearer client-key"}
        yield live


def patch(server: LiveServer, changes: Any, query: str = "") -> Reply:
    return server.request("PATCH", f"/admin/config{query}", changes, ADMIN)


def config(server: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/admin/config", ADMIN).json["config"]
    return found


def test_every_change_takes_effect_and_is_written_down(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    first = config(server)
    assert first.keys() == CHANGES.keys()
    for name, values in CHANGES.items():
        for value in values:
            logging.getLogger("quire").setLevel(logging.INFO)
            with caplog.at_level(logging.INFO, "quire.server"):
                reply = patch(server, {name: value})
            assert reply.status == 200, reply.text
            assert config(server)[name] == value
        if name != "log_level":
            assert f"administrator 1 changed the configuration: {name}=" in caplog.text
    change = server.get("/admin/config", ADMIN).json["changes"][-1]
    assert change["by"] == "administrator 1"
    assert change["time"].endswith("Z")
    assert server.complete("Hello", max_tokens=3).status == 200


def test_the_engine_obeys_in_its_next_steps(server: LiveServer) -> None:
    patch(server, {"max_num_seqs": 4, "scheduling_policy": "fcfs", "slo": []})
    with server.busy(4, "authorization: Bearer client-key\r\n"):
        server.wait(lambda: server.engine.stats.running == 4)
        assert patch(server, {"max_num_seqs": 2}).status == 200
        server.wait(lambda: server.engine.stats.step_slots == 2)
        assert server.engine.stats.running == 4  # what runs goes on
    server.wait(server.idle)
    with server.busy(2, "authorization: Bearer client-key\r\n"):
        server.wait(lambda: server.engine.stats.running == 2)
        thread = threading.Thread(target=server.complete, kwargs={"max_tokens": 2})
        thread.start()
        server.wait(lambda: server.engine.stats.waiting == 1)
        assert patch(server, {"max_num_seqs": 4}).status == 200
        thread.join(GUARD)
    patch(server, {"max_num_queued_tokens": 1, "cache_shares": {"a": 0.5}})
    server.wait(lambda: server.engine.stats.floors == {"a": server.engine.stats.blocks // 2})
    patch(server, {"max_num_queued_tokens": 10_000, "cache_shares": {"a": 0.0}})
    server.wait(lambda: server.engine.stats.floors == {})


def test_the_next_request_finds_what_was_changed(server: LiveServer) -> None:
    """Every other field: the policy, classes, admission, bounds of the queue, the size of steps, drafts, the log."""
    client, stats = "authorization: Bearer client-key\r\n", lambda: server.engine.stats
    usual = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "scheduling_policy": "fcfs", "slo": []}
    assert patch(server, usual | {"admission": "predict"}).status == 200
    server.complete(max_tokens=1, priority=1).error(400, "invalid_value", "priority")
    patch(server, {"scheduling_policy": "priority"})
    assert server.complete(max_tokens=80, ignore_eos=True, priority=1).status == 200
    server.complete(service_tier="batch").error(400, "unsupported_parameter", "service_tier")
    patch(server, {"slo": ["never:ttft=0.001ms", "batch:"]})
    assert server.complete(max_tokens=1, service_tier="batch").status == 200
    server.wait(lambda: server.metric("quire_steps_total") >= 64)
    with server.busy(1, client, service_tier="batch"):
        server.wait(lambda: stats().running == 1)
        server.complete(max_tokens=1).error(429, "would_be_late")
        patch(server, {"admission": "queue"})
        assert server.complete(max_tokens=1).status == 200
    server.wait(server.idle)
    patch(server, {"slo": [], "max_num_seqs": 1, "max_num_queued_reqs": 1})
    with server.busy(2, client):
        server.wait(lambda: (stats().running, stats().waiting) == (1, 1))
        assert "1 requests are waiting (limit 1)" in server.complete(max_tokens=1).error(429)
        patch(server, {"max_num_queued_reqs": 200, "max_num_queued_tokens": 1})
        assert "prompt tokens are waiting" in server.complete(max_tokens=1).error(429)
        for budget in (16, 64):
            patch(server, {"max_num_batched_tokens": budget})
            server.wait(lambda budget=budget: stats().step_budget == budget)  # type: ignore[misc]
    server.wait(server.idle)
    patch(server, usual | {"max_num_queued_tokens": 10_000, "max_draft_tokens": 0, "log_level": "warning"})
    assert logging.getLogger("quire").level == logging.WARNING
    drafted = stats().drafted_tokens
    assert server.complete([7, 8, 9] * 20, max_tokens=60, temperature=0, ignore_eos=True).status == 200
    server.wait(server.idle)
    assert stats().drafted_tokens == drafted
    patch(server, {"max_draft_tokens": 4, "log_level": "info"})
    assert logging.getLogger("quire").level == logging.INFO


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_num_seqs": 5}, "max_num_seqs: 5 is not in [1, 4], which the engine was started with"),
        ({"max_num_seqs": "4"}, "max_num_seqs: must be an integer of at least 1"),
        ({"max_draft_tokens": 10_000}, "max_draft_tokens: 10000 is not in [0, "),
        ({"scheduling_policy": "random"}, "scheduling_policy: must be one of fcfs"),
        ({"slo": ["chat"]}, "slo: 'chat' does not have the form"),
        ({"scheduling_policy": "edf,gold=sjf"}, "scheduling_policy: 'gold' is not a class of slo: none"),
        ({"scheduling_policy": "edf,gold=sjf", "slo": ["chat:"]}, "'gold' is not a class of slo: chat"),
        ({"overtake_ms": -1}, "overtake_ms: must be a number above 0"),
        ({"cache_shares": {"b": 0.1}}, "cache_shares: 'b' is not a tenant of the file"),
        ({"cache_shares": {"a": 1.1}}, "cache_shares: a: must be a number in [0, 1]"),
        ({"log_level": "loud"}, "log_level: must be one of debug"),
        ({"memory": 1}, "memory: cannot be changed while the server runs"),
        ([1], "the body is not a JSON object of options"),
    ],
)
def test_a_bad_change_changes_nothing(server: LiveServer, wrong: Any, named: str) -> None:
    """Also what is right in it; with `dry_run` the answer is the same."""
    patch(server, {"scheduling_policy": "fcfs", "slo": []})
    before = server.get("/admin/config", ADMIN).json
    if isinstance(wrong, dict):
        wrong = {"max_num_queued_reqs": 77} | wrong
    for query in ("", "?dry_run=true"):
        assert named in patch(server, wrong, query).error(400, "invalid_value")
    assert server.get("/admin/config", ADMIN).json == before


def test_a_class_that_a_policy_names_stays(server: LiveServer) -> None:
    """What is valid alone is refused if it contradicts what is in force, also in a dry run."""
    both = {"slo": ["chat:", "batch:"], "scheduling_policy": "edf,batch=sjf"}
    assert patch(server, both).status == 200
    before = config(server)
    for query in ("", "?dry_run=true"):
        message = patch(server, {"slo": ["chat:"]}, query).error(400, "invalid_value")
        assert message == "scheduling_policy: 'batch' is not a class of slo: chat"
    assert config(server) == before
    assert patch(server, {"slo": [], "scheduling_policy": "fcfs"}).status == 200


def test_a_dry_run_predicts_and_changes_nothing(server: LiveServer) -> None:
    server.complete("Hello", max_tokens=80, ignore_eos=True)
    server.wait(lambda: server.metric("quire_steps_total") >= 64)
    patch(server, {"max_num_batched_tokens": 128})
    before = config(server)
    reply = patch(server, {"max_num_batched_tokens": 16}, "?dry_run=1").json
    assert reply["dry_run"] is True
    assert reply["changed"] == {"max_num_batched_tokens": 16}
    assert reply["config"] == before | {"max_num_batched_tokens": 16}
    effect = reply["effect"]
    assert effect["after"]["largest_step_seconds"] <= effect["before"]["largest_step_seconds"]
    assert effect["after"]["ttft_seconds"] > 0
    assert config(server) == before
    patch(server, {}, "?dry_run=maybe").error(400, "invalid_value", "dry_run")


def test_only_administrators(server: LiveServer) -> None:
    server.get("/admin/config").error(401, "invalid_api_key")
    server.request("PATCH", "/admin/config", {"max_num_seqs": 1}).error(401, "invalid_api_key")


def reported(server: LiveServer) -> dict[str, Any]:
    """The latest report of the engine."""
    found: dict[str, Any] = server.get("/server_info", ADMIN).json["internal_states"][0]
    return found


def changes_under_load(server: LiveServer, times: int) -> None:
    """Each change so many times while clients stream; every answer is the one that it always is, and the engine's next
    report has what was changed."""
    rng, stop, wrong = random.Random(times), threading.Event(), []
    body = {"prompt": [7] * 40, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    expected = server.post("/v1/completions", body).json["choices"]

    def load() -> None:
        while not stop.is_set():
            reply = server.post("/v1/completions", body)
            if reply.status != 200 or reply.json["choices"] != expected:
                wrong.append(reply.text)

    clients = [threading.Thread(target=load) for _ in range(3)]
    for client in clients:
        client.start()
    policies = [name for name in POLICIES if name not in CHANGES["scheduling_policy"]]
    try:
        for number in range(times):
            for name, values in CHANGES.items():
                value = (
                    values[number % 2] if name != "scheduling_policy" else rng.choice([*policies, *values])
                )
                reply = patch(server, {name: value})
                assert reply.status == 200, reply.text
                assert reply.json["config"][name] == value
                if (shown := SHOWN.get(name)) is not None:
                    server.wait(lambda shown=shown, value=value: shown(reported(server), value))  # type: ignore[misc]
    finally:
        stop.set()
        for client in clients:
            client.join(GUARD)
    assert not wrong
    assert server.engine.stats.restarts == 0


def test_changes_under_load(server: LiveServer) -> None:
    changes_under_load(server, 3)


@pytest.mark.scheduling
def test_each_change_a_thousand_times_under_load(server: LiveServer) -> None:
    changes_under_load(server, 1000)


def test_an_address_for_administrators(folder: Path) -> None:
    with serving(folder, admin_api_key=("root-key",), admin_host="127.0.0.2", admin_port=0) as live:
        assert "address for administrators" in live.get("/admin/config", ADMIN).error(404, "not_found")
        assert "address for administrators" in live.get("/server_info", ADMIN).error(404, "not_found")
        assert live.complete(max_tokens=1).status == live.get("/metrics").status == 200
        live.host, live.address = "127.0.0.2", ("127.0.0.2", live.admin_port)
        assert live.get("/admin/config", ADMIN).status == live.get("/server_info", ADMIN).status == 200
        assert live.get("/health").status == live.get("/metrics").status == 200
        assert "address for clients" in live.complete(max_tokens=1).error(404, "not_found")
    with pytest.raises(ValueError, match="admin_host: needs admin_port"):
        ServingConfig(admin_host="127.0.0.1")
