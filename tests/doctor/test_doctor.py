"""The doctor names every injected cause, alone and with others, and finds nothing where nothing is wrong."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from helpers.server import LiveServer, served_folder, serving
from quire.bench.doctor.live_rules import RULES, diagnose, where_to_look
from quire.bench.doctor.machine_rules import MachineState, examine
from quire.bench.doctor.metrics_window import Window
from quire.bench.metrics_page import read_page
from quire.bench.results import Noise
from quire.cli.main import main

SECONDS = 10.0
# A server that is well: 100 answers in ten seconds, eight at a time, 40 ms to the first token, 10 ms a token.
WELL: dict[str, float] = {
    "quire_build_info": 1, "quire_num_requests_running": 8, "quire_num_requests_waiting": 0,
    "quire_kv_cache_usage_perc": 0.4, "quire_num_preemptions_total": 0, "quire_engine_restarts_total": 0,
    'quire_request_success_total{finished_reason="stop"}': 95,
    'quire_request_success_total{finished_reason="length"}': 5,
    "quire_time_to_first_token_seconds_sum": 4, "quire_time_to_first_token_seconds_count": 100,
    "quire_request_queue_time_seconds_sum": 0.1, "quire_request_queue_time_seconds_count": 100,
    "quire_request_prefill_time_seconds_sum": 3, "quire_request_prefill_time_seconds_count": 100,
    "quire_request_prompt_tokens_sum": 30000, "quire_request_prompt_tokens_count": 100,
    "quire_request_params_max_tokens_sum": 25600, "quire_request_params_max_tokens_count": 100,
    "quire_inter_token_latency_seconds_sum": 100, "quire_inter_token_latency_seconds_count": 10000,
    'quire_inter_token_latency_seconds_bucket{le="0.01"}': 9000,
    'quire_inter_token_latency_seconds_bucket{le="0.025"}': 10000,
    'quire_inter_token_latency_seconds_bucket{le="0.5"}': 10000,
    'quire_inter_token_latency_seconds_bucket{le="+Inf"}': 10000,
    "quire_e2e_request_latency_seconds_sum": 104, "quire_e2e_request_latency_seconds_count": 100,
    'http_request_duration_seconds_sum{handler="/v1/chat/completions"}': 105,
    'http_request_duration_seconds_count{handler="/v1/chat/completions"}': 100,
    'http_requests_total{status="200"}': 100, 'http_requests_total{status="400"}': 1,
    'http_requests_total{status="429"}': 0, 'http_requests_total{status="500"}': 0,
    "quire_prefix_cache_queries_total": 30000, "quire_prefix_cache_hits_total": 20000,
    "quire_step_seconds_total": 9.5, "quire_step_prefill_tokens_total": 10000,
    "quire_step_decode_tokens_total": 10000, "quire_spec_decode_num_draft_tokens_total": 1000,
    "quire_spec_decode_num_accepted_tokens_total": 700, "quire_draft_faults_total": 0,
    "quire_late_rows_total": 1, "quire_grammar_compile_seconds_sum": 0.1, "quire_grammar_compile_seconds_count": 10,
    "quire_adapter_evictions_total": 1, 'quire_replica_wait_seconds_total{replica="0"}': 0.2,
    'quire_replica_wait_seconds_total{replica="1"}': 0.4,
}  # fmt: skip
GAUGES = ("_running", "_waiting", "_perc", "_info")
# cause -> what is different about the server
CAUSES: dict[str, Mapping[str, float]] = {
    "queue for a place": {
        "quire_num_requests_waiting": 30, "quire_time_to_first_token_seconds_sum": 300,
        "quire_request_queue_time_seconds_sum": 260,
    },
    "prefill": {
        "quire_time_to_first_token_seconds_sum": 200, "quire_request_prefill_time_seconds_sum": 180,
    },
    "prompts stall streams": {
        'quire_inter_token_latency_seconds_bucket{le="0.025"}': 9100,
    },
    "decode": {"quire_inter_token_latency_seconds_sum": 1200},
    "thrash": {"quire_num_preemptions_total": 20},
    "cache misses": {"quire_prefix_cache_hits_total": 100},
    "answers run to max_tokens": {
        'quire_request_success_total{finished_reason="stop"}': 2,
        'quire_request_success_total{finished_reason="length"}': 98,
    },
    "wrong chat template": {
        'quire_request_success_total{finished_reason="stop"}': 2,
        'quire_request_success_total{finished_reason="length"}': 98,
        'http_request_duration_seconds_count{handler="/v1/chat/completions"}': 2,
        'http_request_duration_seconds_count{handler="/v1/completions"}': 98,
    },
    "one request at a time": {"quire_num_requests_running": 1, "quire_step_seconds_total": 3},
    "slow readers": {'http_request_duration_seconds_sum{handler="/v1/chat/completions"}': 300},
    "drafts are wrong": {"quire_spec_decode_num_accepted_tokens_total": 20},
    "drafts fail": {"quire_draft_faults_total": 3},
    "grammars": {"quire_grammar_compile_seconds_sum": 9},
    "adapters": {"quire_adapter_evictions_total": 60},
    "replicas wait": {'quire_replica_wait_seconds_total{replica="1"}': 4},
    "server errors": {'http_requests_total{status="500"}': 4},
    "refused for load": {'http_requests_total{status="429"}': 40},
    "client errors": {'http_requests_total{status="400"}': 90},
    "engine restarts": {"quire_engine_restarts_total": 1},
    "memory fails under load": {"quire_engine_restarts_total": 1, "quire_kv_cache_usage_perc": 0.96},
}  # fmt: skip
EXCLUDE = [
    {"one request at a time", "decode"},
    {"queue for a place", "one request at a time"},
    {"queue for a place", "prefill"},
    {"queue for a place", "memory fails under load"},
    {"engine restarts", "memory fails under load"},
    {"answers run to max_tokens", "wrong chat template"},
]  # fmt: skip  of which one changes what the other means


def page(values: Mapping[str, float], share: float = 1.0) -> str:
    """A Prometheus page; counters have `share` of their values, and `share` 0 is the reading before."""
    return "".join(
        f"{name} {value if name.endswith(GAUGES) else value * share}\n" for name, value in values.items()
    )


def window(different: Mapping[str, float]) -> Window:
    values = WELL | different
    return Window(read_page(page(values, 0)), read_page(page(values)), SECONDS)


def names(different: Mapping[str, float]) -> set[str]:
    return {finding.name for finding in diagnose(window(different))}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert names({}) == set()


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_named_and_no_other(cause: str) -> None:
    assert names(CAUSES[cause]) == {cause}


def test_causes_that_come_together_are_all_named() -> None:
    for pair in combinations(CAUSES, 2):
        if not any(excluded <= set(pair) for excluded in EXCLUDE):
            assert names({**CAUSES[pair[0]], **CAUSES[pair[1]]}) == set(pair), pair
    assert names({k: v for cause in ("thrash", "cache misses", "grammars") for k, v in CAUSES[cause].items()}) == {
        "thrash", "cache misses", "grammars",
    }  # fmt: skip


def test_the_queue_is_for_memory_when_blocks_are_in_use() -> None:
    full = {**CAUSES["queue for a place"], "quire_kv_cache_usage_perc": 0.95}
    assert names(full) == {"queue for memory"}
    assert names({"quire_kv_cache_usage_perc": 0.98}) == {"no headroom"}


def test_a_restart_of_long_ago_is_no_failure_under_load() -> None:
    full = WELL | {"quire_kv_cache_usage_perc": 0.95}
    before = read_page(page({name: value for name, value in full.items() if "restarts" not in name}, 0)
                       + page({"quire_engine_restarts_total": 1}))  # fmt: skip
    (found,) = diagnose(Window(before, read_page(page(full | {"quire_engine_restarts_total": 1})), SECONDS))
    assert found.name == "engine restarts"
    assert found.evidence == {"restarts": 1, "in_window": 0}


def test_another_server_that_began_anew_is_seen_by_its_process() -> None:
    """Its counters may have no name for it."""
    values = {name: value for name, value in WELL.items() if "restarts" not in name}
    full = {"quire_kv_cache_usage_perc": 0.95}
    before, after = ({"process_start_time_seconds": at} for at in (100.0, 200.0))
    pages = read_page(page(values | full, 0) + page(before)), read_page(page(values) + page(after))
    assert {one.name for one in diagnose(Window(*pages, SECONDS))} == {"memory fails under load"}
    pages = read_page(page(values, 0) + page(before)), read_page(page(values) + page(after))
    assert {one.name for one in diagnose(Window(*pages, SECONDS))} == {"engine restarts"}
    pages = read_page(page(values, 0) + page(after)), read_page(page(values) + page(after))
    assert not diagnose(Window(*pages, SECONDS))


def test_an_idle_server_is_called_idle() -> None:
    idle = dict.fromkeys(WELL, 0.0) | {"quire_build_info": 1}
    assert names(idle) == {"idle"}


def test_another_server_is_diagnosed_by_its_own_names() -> None:
    """vLLM's page has the same meanings under its prefix; that its answers depend on load is said, too."""
    values = {name.replace("quire_", "vllm:"): value for name, value in (WELL | CAUSES["thrash"]).items()}
    del values["vllm:build_info"]
    found = diagnose(Window(read_page(page(values, 0)), read_page(page(values)), SECONDS))
    assert {finding.name for finding in found} == {"thrash", "answers may depend on load"}


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    before, after = (
        read_page("quire_num_preemptions_total 50\n"),
        read_page("quire_num_preemptions_total 7\n"),
    )
    assert Window(before, after, 1.0).grown("quire_num_preemptions_total") == 7


def test_a_page_of_rubbish_is_read_without_an_error() -> None:
    rubbish = 'a{b="c\\"d"} 1\n{} 3\nx nan\ny{le="+Inf"} +Inf\nz 1e999\n\x00\nw{ 2\n'
    assert read_page(rubbish)["a"] == [({"b": 'c\\"d'}, 1.0)]
    assert diagnose(Window(read_page(rubbish), read_page(rubbish), 1.0))


HEALTHY = MachineState(
    cores=8, usable_cores=8, siblings=2, threads=0, isas=("baseline", "avx2"), memory=64 << 30, available=50 << 30,
    swap_used=0, open_files=65536, governor="performance", cache_free=100 << 30, noise=Noise(0.1, 0.0, 1.0),
    bandwidth=50e9,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({}, None),
        ({"noise": Noise(0.1, 1.0, 1.0)}, "stolen CPU time"),
        ({"noise": Noise(4.0, 0.0, 1.0)}, "other work"),
        ({"threads": 16}, "wrong thread count"),
        ({"threads": 1}, "wrong thread count"),
        ({"usable_cores": 4}, "fewer cores"),
        ({"isas": ("baseline",)}, "no vector instructions"),
        ({"governor": "powersave"}, "powersave"),
        ({"available": 1 << 30}, "little memory"),
        ({"swap_used": 4 << 30}, "swap"),
        ({"bandwidth": 3e9}, "slow memory"),
        ({"open_files": 1024}, "few open files"),
        ({"cache_free": 1 << 30}, "little disk"),
    ],
    ids=str,
)
def test_machines(changed: Mapping[str, object], cause: str | None) -> None:
    found = [finding.name for finding in examine(replace(HEALTHY, **changed))]
    assert found == ([] if cause is None else [cause])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(
        served_folder(tmp_path_factory.mktemp("served") / "model"), served_model_name=("tiny",)
    ) as live:
        yield live


def ask_for_three_tokens(server: LiveServer) -> None:
    for _ in range(12):
        assert server.complete("a b", max_tokens=3, ignore_eos=True).status == 200
    server.wait(lambda: server.metric("quire_generation_tokens_total") >= 36)


def test_a_running_server_that_never_ends_its_answers(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every name of the rules is one that the server really has; the cause is found on the live page."""
    ask_for_three_tokens(server)
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        now = read_page(response.read().decode())
    found = {finding.name for finding in diagnose(Window({}, now, SECONDS))}
    assert "wrong chat template" in found  # nobody has asked for a chat
    source = Path(diagnose.__code__.co_filename).read_text()
    for name in ("quire_late_rows_total", "quire_draft_faults_total", "quire_step_seconds_total",
                 "quire_adapter_evictions_total", "http_requests_total", "quire_engine_restarts_total",
                 "quire_replica_wait_seconds_total"):  # fmt: skip
        assert name in source
        assert name in now or name.startswith(("quire_adapter", "quire_replica"))
    assert main(["doctor", server.url, "--seconds", "0.5", "--json"]) in {0, 1}
    report = json.loads(capsys.readouterr().out)
    assert {"environment", "facts", "machine", "server"} <= report.keys()
    assert any(finding["name"] == "idle" for finding in report["server"])
    assert report["look"] is None, "nobody has asked for anything meanwhile"


@pytest.mark.parametrize(
    ("ttft", "itl", "says"),
    [
        (1.1, 0.06, "inspect queueing and prefill"),
        (0.35, 0.16, "inspect decode scheduling and memory pressure"),
        (0.35, 0.06, "within example thresholds"),
    ],
)
def test_the_half_to_look_at_first_is_that_of_the_listing(ttft: float, itl: float, says: str) -> None:
    """The outputs of route-latency-investigation, from the histograms of a server, with the numbers."""
    buckets = {
        f'quire_{name}_seconds_bucket{{le="{bound:g}"}}': 100.0 if bound >= value else 20.0
        for name, value in (("time_to_first_token", ttft), ("inter_token_latency", itl))
        for bound in (0.01, 0.06, 0.16, 0.35, 1.1, 2.5)
    }
    found = where_to_look(Window(read_page(page(buckets, 0)), read_page(page(buckets)), SECONDS))
    assert found == {
        "ttft_p95_ms": pytest.approx(1e3 * ttft),
        "itl_p95_ms": pytest.approx(1e3 * itl),
        "says": says,
    }
    assert where_to_look(Window({}, {}, SECONDS)) is None


def test_a_server_with_keys_is_asked_with_one(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(served_folder(tmp_path_factory.mktemp("keys")), api_key=("a-key",)) as keyed:
        for command in (
            ["doctor", keyed.url, "--seconds", "0.5"],
            ["cost", "--url", keyed.url, "--seconds", "0.2"],
            ["advise", "llama-3-8b", "--hardware", "h100", "--url", keyed.url],
        ):
            monkeypatch.delenv("QUIRE_API_KEY", raising=False)
            assert main(command) == 1
            assert "401" in capsys.readouterr().err
            monkeypatch.setenv("QUIRE_API_KEY", "a-key")
            assert main(command) in {0, 1}
            assert "401" not in capsys.readouterr().err
        monkeypatch.delenv("QUIRE_API_KEY")
        (tmp_path / "key").write_text("a-key")
        assert (
            main(["cost", "--url", keyed.url, "--seconds", "0.2", "--api-key-file", str(tmp_path / "key")])
            == 0
        )


def test_what_a_running_server_costs_and_needs(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_for_three_tokens(server)
    assert (
        main(["cost", "--url", server.url, "--seconds", "0.2", "--watts", "50", "--price", "1", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 0
    assert found["joules_per_token"] is None
    assert main(["cost", "--url", server.url, "--seconds", "0.2"]) == 0
    assert "no tokens" in capsys.readouterr().out
    assert main(["advise", "llama-3-8b", "--hardware", "h100", "--url", server.url, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)["server"]
    assert seen["output_tokens"] == pytest.approx(3, abs=0.5)
    assert seen["requests_per_second"] > 0
    assert main(["cost", "--url", "http://127.0.0.1:9"]) == 1


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "http://127.0.0.1:9", "--seconds", "0.5"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert main(["doctor", "ftp://x"]) == 2
    assert main(["doctor", "--seconds", "0"]) == 2


def test_every_rule_has_a_cause_in_the_set() -> None:
    assert len(RULES) == 17
