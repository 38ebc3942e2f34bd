"""What /metrics says about adapters, by the names that are loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quire.server.metrics import ServerMetrics


def adapter_families(metrics: ServerMetrics, labels: Mapping[str, str]) -> Iterator[Metric]:
    """The families of a server with adapters. Counts of names that are not loaded any more are dropped."""
    engine, stats = metrics.engine, metrics.engine.stats
    if not stats.max_loras:
        return
    running, waiting = _requests(metrics)
    info = GaugeMetricFamily(
        "vllm:lora_requests_info", "adapters of running and of waiting requests, at this time",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )  # fmt: skip
    info.add_metric([str(stats.max_loras), ",".join(sorted(running)), ",".join(sorted(waiting))], time.time())
    yield info
    for kind, size in zip(("used", "size"), stats.adapter_bytes, strict=True):
        text = "bytes of the pool of adapters" + (", of those that are in it" if kind == "used" else "")
        gauge = GaugeMetricFamily(f"quire_adapter_pool_{kind}_bytes", text, labels=list(labels))
        gauge.add_metric(list(labels.values()), size)
        yield gauge
    names = list(engine.adapters)
    for gone in {name for name, _ in metrics.adapter_tokens} - {*names}:
        for kind in ("prompt", "generation"):
            metrics.adapter_tokens.pop((gone, kind), None)
    tokens = metrics.adapter_tokens
    for family, text, counts in (
        ("quire_adapter_requests_running", "running requests by adapter", running),
        ("quire_adapter_requests_waiting", "waiting requests by adapter", waiting),
        ("quire_adapter_loads", "how often an adapter was put into the pool", _by_name(metrics, stats.adapter_loads)),
        ("quire_adapter_evictions", "how often an adapter made room for others",
         _by_name(metrics, stats.adapter_evictions)),
        ("quire_adapter_prompt_tokens", "prompt tokens of ended requests by adapter",
         Counter({name: tokens[name, "prompt"] for name in names})),
        ("quire_adapter_generation_tokens", "generated tokens of ended requests by adapter",
         Counter({name: tokens[name, "generation"] for name in names})),
    ):  # fmt: skip
        made = GaugeMetricFamily if "requests" in family else CounterMetricFamily
        found = made(family, text, labels=[*labels, "adapter"])
        for name in names:
            found.add_metric([*labels.values(), name], counts[name])
        yield found


def _requests(metrics: ServerMetrics) -> tuple[Counter[str], Counter[str]]:
    """Running and waiting requests, by the name of their adapter."""
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for request, output in metrics.engine.requests():
        if request.adapter:
            found = running if output.timings.scheduled else waiting
            found[metrics.engine.adapter_name(request.adapter)] += 1
    return running, waiting


def _by_name(metrics: ServerMetrics, counts: Mapping[str, int]) -> Counter[str]:
    """Counts of versions as counts of the names that they have now."""
    found: Counter[str] = Counter()
    for digest, count in counts.items():
        found[metrics.engine.adapter_name(digest)] += count
    return found
