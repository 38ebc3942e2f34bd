"""What /metrics tells, and that health answers while everything is busy."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.server import ENDLESS, PATIENT, LiveServer, serving
from quire import __version__
from quire.server import app, exposition
from quire.server.exposition import GENERATING
from quire.server.histogram import Histogram
from quire.server.routes import Post

VLLM = {
    "vllm:num_requests_running": "gauge", "vllm:num_requests_waiting": "gauge", "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter", "vllm:prefix_cache_hits": "counter", "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter", "vllm:generation_tokens": "counter", "vllm:request_success": "counter",
    "vllm:request_prompt_tokens": "histogram", "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram", "vllm:request_params_max_tokens": "histogram",
    "vllm:request_params_n": "histogram", "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram", "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram", "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram", "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram", "vllm:cache_config_info": "gauge",
    "vllm:iteration_tokens_total": "histogram",
}  # fmt: skip
VLLM_OLDER = {
    "vllm:time_per_output_token_seconds": "histogram", "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:gpu_prefix_cache_queries": "counter", "vllm:gpu_prefix_cache_hits": "counter",
}  # fmt: skip

TGI = {
    "tgi_request_count": "unknown", "tgi_request_success": "unknown", "tgi_queue_size": "gauge",
    "tgi_batch_current_size": "gauge", "tgi_request_duration": "histogram", "tgi_request_queue_duration": "histogram",
    "tgi_request_inference_duration": "histogram", "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_input_length": "histogram", "tgi_request_generated_tokens": "histogram",
    "tgi_request_max_new_tokens": "histogram", "tgi_request_validation_duration": "histogram",
    "tgi_request_failure": "unknown",
}  # fmt: skip


def families(server: LiveServer) -> dict[str, str]:
    return {
        family.name: family.type for family in text_string_to_metric_families(server.get("/metrics").text)
    }


def test_names_and_types(server: LiveServer) -> None:
    server.chat(max_tokens=5)
    found = families(server)
    assert {name: found.get(name) for name in VLLM} == VLLM
    for name, kind in VLLM.items():
        if name != "vllm:cache_config_info":
            assert found.get(name.replace("vllm:", "quire_")) == kind, name
    for name in ("http_requests", "quire_step_plans", "quire_step_plan_padding", "quire_kv_waste_tokens",
                 "quire_wasted_tokens", "quire_step_phase_seconds", "quire_forced_tokens", "quire_late_rows",
                 "quire_tool_calls", "quire_reasoning_tokens",
                 "quire_memory_bytes", "quire_engine_resident_bytes", "http_request_duration_seconds",
                 "quire_startup_seconds", "quire_engine_restarts", "quire_build_info", "process_resident_memory_bytes",
                 "process_cpu_seconds", "process_open_fds", "process_start_time_seconds"):  # fmt: skip
        assert name in found
    assert {name: found.get(name) for name in VLLM_OLDER} == VLLM_OLDER
    assert {name: found.get(name) for name in TGI} == TGI
    assert f'version="{__version__}"' in server.get("/metrics").text


def test_counts(server: LiveServer) -> None:
    names = ("tgi_request_count", "tgi_request_mean_time_per_token_duration_count", "tgi_request_generated_tokens_sum",
             "quire_generation_tokens_total", "quire_inter_token_latency_seconds_count", "quire_prompt_tokens_total",
             "vllm:time_to_first_token_seconds_count", "vllm:request_success_total")  # fmt: skip
    before = {name: server.metric(name) for name in names}
    prompt = server.chat("count me", max_tokens=80, ignore_eos=True, n=2).json["usage"]["prompt_tokens"]
    after = {name: server.metric(name) for name in names}
    assert after["quire_generation_tokens_total"] - before["quire_generation_tokens_total"] == 160
    assert after["quire_prompt_tokens_total"] - before["quire_prompt_tokens_total"] == prompt
    assert (
        after["vllm:time_to_first_token_seconds_count"] - before["vllm:time_to_first_token_seconds_count"]
        == 1
    )
    assert [after[name] - before[name] for name in names[:3]] == [1, 1, 160]
    assert after["vllm:request_success_total"] - before["vllm:request_success_total"] == 2
    gaps = (
        after["quire_inter_token_latency_seconds_count"] - before["quire_inter_token_latency_seconds_count"]
    )
    assert 0 <= gaps <= 158  # tokens that are read at once count once
    assert server.metric("quire_request_success_total", finished_reason="length") >= 2


def test_failures_by_tgis_kinds(server: LiveServer) -> None:
    """Of the routes that make text, and of no others."""
    kinds = ("validation", "overloaded", "generation")
    before = [server.metric("tgi_request_failure", err=kind) for kind in kinds]
    checked = server.metric("tgi_request_validation_duration_count")
    assert server.post("/generate", {"inputs": "a", "parameters": {"temperature": -1}}).status == 422
    assert server.post("/v1/completions", {"prompt": "a", "deadline_ms": 0}).status >= 400
    server.chat("x", temperature=-1).error(400)
    server.post("/tokenize", {"prompt": 3}).error(400)
    server.chat("x", max_tokens=1)
    after = [server.metric("tgi_request_failure", err=kind) for kind in kinds]
    assert sum(after) - sum(before) == 3
    assert after[0] - before[0] >= 2
    assert server.metric("tgi_request_validation_duration_count") - checked == 1
    generating = {route.path for route in app.ROUTES if isinstance(route, Post) and route.chunk is not None}
    assert generating == GENERATING


def test_tokens_of_steps(server: LiveServer) -> None:
    """A prompt of one step, then one token a step, for which the executor has a plan."""
    server.wait(server.idle)
    names = ("vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum", "quire_step_plan_hits_total",
             "quire_step_plan_fallbacks_total")  # fmt: skip
    before = {name: server.metric(name) for name in names}
    ones = server.metric("vllm:iteration_tokens_total_bucket", le="1.0")
    prompt = server.complete("0123456789", max_tokens=21, ignore_eos=True, cache_salt="steps").json["usage"]
    assert prompt["prompt_tokens"] == 10
    server.wait(server.idle)
    server.wait(lambda: server.metric(names[0]) > before[names[0]])  # counters come a few times a second
    after = {name: server.metric(name) for name in names}
    assert after[names[0]] - before[names[0]] == 21
    assert after[names[1]] - before[names[1]] == 30
    assert [after[name] - before[name] for name in names[2:]] == [20, 1]
    assert server.metric("quire_step_plans") > 0
    assert server.metric("vllm:iteration_tokens_total_bucket", le="1.0") - ones == 20
    assert server.metric("quire_iteration_tokens_total_bucket", le="+Inf") == after[names[0]]


def test_labels_are_bounded(server: LiveServer) -> None:
    for i in range(20):
        server.get(f"/made-up/{i}")
        server.get(f"/v1/models/m{i}")
        server.chat(model=f"made-up-{i}")
        server.request(f"MADEUP{i}" if i else "BREW", "/health")
    assert server.metric("http_requests_total", handler="none") >= 20
    text = server.get("/metrics").text
    assert "made-up" not in text
    assert "MADEUP" not in text


def test_a_storm_of_scrapes_is_rendered_a_few_times(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rendering is for all that come within a time; every scrape is counted, so that no two are alike."""
    monkeypatch.setattr(exposition, "CACHE_SECONDS", 3600.0)
    first = server.get("/metrics").text
    assert [server.get("/metrics").text == first for _ in range(3)] == [True] * 3
    monkeypatch.setattr(exposition, "CACHE_SECONDS", -1.0)
    assert server.get("/metrics").text != first


def test_histogram_buckets() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 7.0):
        histogram.observe(value)
    assert histogram.buckets((1.0, 5.0)) == [("1.0", 2), ("5.0", 4), ("+Inf", 5)]
    assert histogram.total == 15.0


def test_health_answers_while_everything_is_busy(folder: Path) -> None:
    """The times are printed, not judged: what matters is that health never waits for the work to end."""
    with serving(folder, ENDLESS, **PATIENT) as live, live.busy(12, n=4):
        times = []
        for _ in range(100):
            start = time.perf_counter()
            assert live.get("/health/ready").status == 200
            times.append(time.perf_counter() - start)
        assert live.engine.stats.running > 8
        print(f"health: p50 {statistics.median(times) * 1e3:.1f} ms, p99 {sorted(times)[98] * 1e3:.1f} ms")
