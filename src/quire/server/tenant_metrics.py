"""Metrics of tenants: what each has used, by tag, what it has of the KV cache, and what its limits refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quire.engine.usage_ledger import Used
from quire.server.metrics import ServerMetrics
from quire.server.tenant_access import TenantDirectory

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
    yield from limit_families(tenants, labels)


def limit_families(tenants: TenantDirectory, labels: dict[str, str]) -> Iterator[Metric]:
    """What limits have refused, and whether they are counted with others."""
    values = list(labels.values())
    refused = CounterMetricFamily(
        "quire_rate_limited_requests", "requests that a limit of their tenant refused",
        labels=[*labels, "tenant", "limit"],
    )  # fmt: skip
    for (account, limit), count in tenants.refused.items():
        refused.add_metric([*values, tenants.label(account), limit], count)
    yield refused
    if (shared := tenants.shared) is not None:
        up = GaugeMetricFamily(
            "quire_shared_limits_up",
            "1 while limits are counted with other processes; 0: Redis is away, and each counts its part alone",
            labels=[*labels],
        )
        up.add_metric(values, float(shared.up))
        alone = CounterMetricFamily(
            "quire_shared_limits_alone", "decisions about limits without Redis", labels=[*labels]
        )
        alone.add_metric(values, shared.alone)
        lost = CounterMetricFamily(
            "quire_shared_limits_lost", "changes of counts that Redis was never told of: too many waited for it",
            labels=[*labels],
        )  # fmt: skip
        lost.add_metric(values, shared.lost)
        yield from (up, alone, lost)
