"""Metrics of tenants: what each has used, by tag, what it has of the KV cache, and what its limits refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quire.engine.usage_ledger import Used
from quire.server.metrics import ServerMetrics

_USED: tuple[tuple[str, str, Callable[[Used], float]], ...] = (
    ("prompt_tokens", "prompt tokens of requests that started", lambda used: used.prompt),
    ("cached_tokens", "prompt tokens found in the prefix cache", lambda used: used.cached),
    ("generation_tokens", "generated tokens", lambda used: used.generated),
    ("compute_seconds", "time of steps, split by the cost model among their rows", lambda used: used.seconds),
    ("kv_byte_seconds", "bytes of the KV cache in use, times seconds", lambda used: used.byte_seconds),
)


def tenant_families(metrics: ServerMetrics, labels: dict[str, str]) -> Iterator[Metric]:
    """The families. Without tenants, they have the sums of all requests."""
    tenants, values = metrics.tenants, list(labels.values())
    assert tenants is not None
    used = metrics.engine.ledger.total
    for name, text, value in _USED:
        family = CounterMetricFamily(f"quire_tenant_{name}", text, labels=[*labels, "tenant", "tag"])
        for (account, tag), line in used.items():
            family.add_metric([*values, tenants.label(account), tag], value(line))
        yield family
    stats = metrics.engine.stats
    for name, text, blocks in (
        ("cache_blocks", "KV blocks that a tenant holds and has cached", stats.tenant_blocks),
        ("cache_floor_blocks", "KV blocks below which a tenant loses none to another", stats.floors),
    ):
        gauge = GaugeMetricFamily(f"quire_tenant_{name}", text, labels=[*labels, "tenant"])
        for account, count in blocks.items():
            gauge.add_metric([*values, tenants.label(account)], count)
        yield gauge
    refused = CounterMetricFamily(
        "quire_rate_limited_requests", "requests that a limit of their tenant refused",
        labels=[*labels, "tenant", "limit"],
    )  # fmt: skip
    for (account, limit), count in tenants.refused.items():
        refused.add_metric([*values, tenants.label(account), limit], count)
    yield refused
