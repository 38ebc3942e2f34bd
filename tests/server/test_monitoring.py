"""The shipped dashboard and rules ask for what a server has: names, and labels of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import grafana_dashboard

import quire
from helpers.server import LiveServer, served_folder, serving

FOLDER = Path(quire.__file__).parents[2] / "examples/monitoring"
_SELECTOR = re.compile(r"\b((?:quire|vllm|http|process)[a-z0-9_:]*[a-z0-9])(?:\{([^}]*)\})?(?![a-z0-9_:(])")
KEY = "key-of-one-tenant"
_ADDED = {"job", "instance", "le"}  # by Prometheus; of buckets
# Queries of the dashboard that vLLM publishes, one for each metric that it names.
VLLM = """
rate(vllm:e2e_request_latency_seconds_bucket{model_name="$model_name"}[$__rate_interval])
rate(vllm:prompt_tokens_total{model_name="$model_name"}[$__rate_interval])
rate(vllm:generation_tokens_total{model_name="$model_name"}[$__rate_interval])
rate(vllm:time_per_output_token_seconds_bucket{model_name="$model_name"}[$__rate_interval])
rate(vllm:inter_token_latency_seconds_bucket{model_name="$model_name"}[$__rate_interval])
vllm:num_requests_running{model_name="$model_name"}
vllm:num_requests_waiting{model_name="$model_name"}
rate(vllm:time_to_first_token_seconds_bucket{model_name="$model_name"}[$__rate_interval])
vllm:kv_cache_usage_perc{model_name="$model_name"}
sum by(le) (increase(vllm:request_prompt_tokens_bucket{model_name="$model_name"}[$__rate_interval]))
sum by(le) (increase(vllm:request_generation_tokens_bucket{model_name="$model_name"}[$__rate_interval]))
sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[$__rate_interval]))
rate(vllm:request_queue_time_seconds_sum{model_name="$model_name"}[$__rate_interval])
rate(vllm:request_prefill_time_seconds_sum{model_name="$model_name"}[$__rate_interval])
rate(vllm:request_decode_time_seconds_sum{model_name="$model_name"}[$__rate_interval])
rate(vllm:request_max_num_generation_tokens_sum{model_name="$model_name"}[$__rate_interval])
""".strip().splitlines()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = served_folder(tmp_path_factory.mktemp("monitored") / "model")
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path = folder.parent / "tenants.toml"
    path.write_text(f'[tenants.one]\nkeys = ["sha256:{digest}"]\n')
    with serving(folder, {"slo": ("chat:ttft=600000",)}, tenants=str(path)) as live:
        live.headers = {"authorization": f"Bearer {KEY}"}
        assert live.complete(max_tokens=4).status == 200
        yield live


@pytest.fixture(scope="module")
def labels(server: LiveServer) -> dict[str, set[str]]:
    """The labels of each metric; of one without samples now: none, though it is there."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("# TYPE"):
            found[line.split()[2]] |= set()
        elif not line.startswith("#"):
            name, _, rest = line.partition(" ")[0].partition("{")
            found[name] |= set(re.findall(r'(\w+)="', rest))
    return found


def missing(query: str, labels: dict[str, set[str]]) -> list[str]:
    """Names of metrics and of labels in a query that the server does not have."""
    by = {word.strip() for words in re.findall(r"by ?\(([^)]*)\)", query) for word in words.split(",")}
    found = []
    for name, matchers in _SELECTOR.findall(re.sub(r"by ?\([^)]*\)", "", query)):
        if name not in labels:
            found.append(name)
        elif labels[name]:
            wanted = (by | set(re.findall(r"(\w+)[=!]", matchers))) - _ADDED
            found += [f"{name}: {label}" for label in sorted(wanted - labels[name])]
    return found


def test_the_dashboard_is_what_the_tool_writes() -> None:
    assert grafana_dashboard.FILE.read_text() == grafana_dashboard.text()
    panels = json.loads(grafana_dashboard.text())["panels"]
    assert len({one["id"] for one in panels}) == len(panels)


@pytest.mark.parametrize("query", grafana_dashboard.queries())
def test_the_dashboard_finds_its_metrics(query: str, labels: dict[str, set[str]]) -> None:
    assert _SELECTOR.search(query)
    assert missing(query, labels) == []


@pytest.mark.parametrize("query", VLLM)
def test_the_dashboard_of_vllm_finds_its_metrics(query: str, labels: dict[str, set[str]]) -> None:
    assert missing(query, labels) == []


def test_rules_find_their_metrics(labels: dict[str, set[str]]) -> None:
    text = (FOLDER / "quire-rules.yml").read_text()
    names = re.findall(r"- (?:record|alert): (\S+)", text)
    queries = re.findall(r"expr: (?:>-\n)?((?:.+\n)(?:          .+\n)*)", text)
    assert len(queries) == len(names) == len(set(names)) >= 8
    for query in queries:
        assert missing(query.removeprefix("up"), labels) == []


def test_a_wrong_name_and_a_wrong_label_are_seen(labels: dict[str, set[str]]) -> None:
    assert missing("rate(quire_step_total[1m])", labels) == ["quire_step_total"]
    assert missing("sum by (class) (quire_kv_blocks)", labels) == ["quire_kv_blocks: class"]
