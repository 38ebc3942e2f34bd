"""The shipped dashboard and rules ask for what a server has: names, and labels of them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

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


@pytest.fixture(scope="module")
def prometheus(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has the shipped files, and has looked at the server a few times."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "quire-rules.yml").write_text((FOLDER / "quire-rules.yml").read_text())
    text = (FOLDER / "prometheus.yml").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    text = re.sub(r"(scrape|evaluation)_interval: \w+", r"\1_interval: 1s", text)
    (folder / "key").write_text(KEY)
    text = re.sub(
        r"# authorization:\n *# *credentials_file: .*", "authorization: {credentials_file: key}", text
    )
    assert "authorization: {" in text
    (folder / "prometheus.yml").write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        "prometheus",
        "--config.file=prometheus.yml",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with subprocess.Popen(command, cwd=folder) as running:
        try:
            server.wait(lambda: running.poll() is None and _scrapes(address) >= 4)
            yield address
        finally:
            running.terminate()


def ask(address: str, path: str, **query: str) -> Any:
    url = f"http://{address}/api/v1/{path}?{urlencode(query)}"
    with urllib.request.urlopen(url, timeout=60) as reply:
        return json.load(reply)["data"]


def _scrapes(address: str) -> int:
    try:
        found = ask(address, "query", query="count_over_time(vllm:num_requests_running[1m])")["result"]
    except OSError:
        return 0
    return int(found[0]["value"][1]) if found else 0


NEEDS = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus"),
]


def _apply(*queries: str) -> list[Any]:
    return [pytest.param(query, marks=NEEDS) for query in queries]


@pytest.mark.parametrize("query", _apply(*VLLM))
def test_prometheus_finds_data_for_the_dashboard_of_vllm(
    query: str, prometheus: str, server: LiveServer
) -> None:
    name = server.get("/v1/models").json["data"][0]["id"]
    asked = query.replace("$model_name", name).replace("$__rate_interval", "1m")
    assert ask(prometheus, "query", query=asked)["result"]


@pytest.mark.parametrize("query", _apply(*grafana_dashboard.queries()))
def test_prometheus_reads_the_dashboard(query: str, prometheus: str) -> None:
    asked = query.replace("$model", ".*").replace("$__rate_interval", "1m")
    assert ask(prometheus, "query", query=asked)["resultType"] == "vector"


@pytest.mark.clients
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
def test_prometheus_loads_the_rules(prometheus: str, server: LiveServer) -> None:
    def evaluated() -> bool:
        rules = [rule for one in ask(prometheus, "rules")["groups"] for rule in one["rules"]]
        assert not any(rule["health"] == "err" for rule in rules), rules
        return len(rules) >= 8 and all(rule["health"] == "ok" for rule in rules)

    server.wait(evaluated)
