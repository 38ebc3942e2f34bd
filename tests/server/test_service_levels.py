"""Classes of service over HTTP: who is admitted, what is predicted, and what the metrics say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, serving

# A level that nothing can keep, and one that everything keeps: no test depends on the speed of the machine.
CLASSES = ("chat:ttft=600000ms,tpot=600000ms", "never:ttft=0.001ms", "batch:")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    options = {"slo": CLASSES, "scheduling_policy": "fair+edf", "max_num_seqs": 2}
    with serving(folder, engine=ENDLESS | options, **PATIENT) as live:
        for _ in range(3):  # the cost model has to see some steps before it may refuse anything
            live.complete("Hello", max_tokens=40, ignore_eos=True)
        live.wait(lambda: live.metric("quire_steps_total") >= 64)
        yield live


def test_the_time_to_the_first_token_is_predicted_on_request(server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 2}
    reply = server.post("/v1/completions", body, headers={"x-quire-predict": "1"})
    assert reply.status == 200
    assert 0 <= int(reply.headers["x-quire-predicted-ttft-ms"]) < 600_000
    assert "x-quire-predicted-ttft-ms" not in server.post("/v1/completions", body).headers


def test_what_cannot_be_kept_is_refused_with_the_numbers(server: LiveServer) -> None:
    missed = server.metric("quire_service_level_missed_total", service_class="never")
    with server.busy(2):
        reply = server.complete("Hello", max_tokens=2, service_tier="never")
        message = reply.error(429, "would_be_late")
        assert message.startswith("ttft of class never of ")
        assert "predicted; try again in" in message
        assert message.endswith("or with service_tier batch")
        assert int(reply.headers["retry-after"]) >= 1
        assert int(reply.headers["x-quire-predicted-ttft-ms"]) >= 0
        late = server.complete("Hello", max_tokens=200, deadline_ms=2000, max_queue_ms=0.5)
        assert late.status in {429, 504}
    assert server.metric("quire_service_level_missed_total", service_class="never") == missed + 1


def test_a_class_that_keeps_its_level_is_counted(server: LiveServer) -> None:
    name = "quire_service_level_kept_total"
    kept = server.metric(name, service_class="chat")
    assert server.complete("Hello", max_tokens=4, service_tier="auto").status == 200
    assert server.chat("Hello", max_tokens=4).status == 200
    server.counted(kept + 2, name, service_class="chat")
    assert server.metric("quire_goodput_requests_per_second", service_class="chat") > 0
    assert server.complete("Hello", max_tokens=4, service_tier="flex").status == 200
    server.counted(1, name, service_class="batch")


def test_a_priority_names_a_class_where_no_policy_has_priorities(server: LiveServer) -> None:
    """Counted from the usual class, and no further than the first and the last."""
    name = "quire_service_level_kept_total"
    for priority, service_class in ((-5, "chat"), (0, "chat"), (2, "batch"), (9, "batch")):
        kept = server.metric(name, service_class=service_class)
        assert server.complete("Hello", max_tokens=2, priority=priority).status == 200
        server.counted(kept + 1, name, service_class=service_class)
    message = server.complete("Hello", priority=1, service_tier="chat").error(
        400, "invalid_value", "priority"
    )
    assert "priorities need --scheduling-policy priority" in message


def test_an_unknown_class_is_refused_by_name(server: LiveServer) -> None:
    message = server.complete("Hello", service_tier="gold").error(
        400, "unsupported_parameter", "service_tier"
    )
    assert message == ("service_tier: 'gold' is not one of auto, default, priority, flex, chat, never, batch")


def test_the_cost_model_shows_its_error(server: LiveServer) -> None:
    assert (
        0 < server.metric("quire_step_cost_error_ratio") <= server.metric("quire_step_cost_error_p90_ratio")
    )
    records = server.get("/debug").json["steps"] if server.get("/debug").status == 200 else []
    assert all(record["predicted_seconds"] > 0 for record in records)
