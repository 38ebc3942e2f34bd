"""Counters and their exposition: quire_* names, and vLLM's names for the dashboards and gateways that know those.

Definitions (docs/server.md): times of a request count from the arrival of its headers; an inter-token gap is the
time between two reads of one sample's tokens by this process. Label sets are fixed: routes, methods of HTTP, status
codes, finish reasons.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.engine.api import STEP_TOKEN_BOUNDS, AsyncEngine, EngineState, EngineStats, GenerateAsk
from quire.server.exchange import Exchange
from quire.server.histogram import Histogram
from quire.types import FinishReason, RequestOutput

CACHE_SECONDS = 0.25  # a storm of scrapes costs four renderings a second

_FINE = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1,
         0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)  # fmt: skip
_VLLM_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
              80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_VLLM_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
             80.0)  # fmt: skip
_VLLM_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
                 960.0, 1920.0, 7680.0)  # fmt: skip
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
_METHODS = frozenset(("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"))


def _decades(top: int = 10**6) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `top`."""
    return tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5) if m * 10**e <= top)


@dataclass(frozen=True, slots=True)
class _Named:
    """One histogram under its two names, each with buckets of its own."""

    histogram: Histogram
    quire: tuple[str, Sequence[float]]
    vllm: tuple[str, Sequence[float]]
    text: str


def _named(quire: str, vllm: str, fine: Sequence[float], coarse: Sequence[float], text: str) -> _Named:
    return _Named(Histogram(sorted({*fine, *coarse})), (quire, fine), (vllm, coarse), text)


class ServerMetrics:
    """Everything /metrics tells. Observations cost well under a microsecond; sums are made when scraped."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        named = self._histograms = _request_histograms()
        self.first_token = named["ttft"].histogram
        self.inter_token = named["itl"].histogram
        self.finished: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, str]] = Counter()
        self._http_seconds: dict[tuple[str, str], Histogram] = {}
        self._http_bytes: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(_Exposition(self))
        self._rendered: tuple[float, bytes] = (-1.0, b"")

    def count(
        self, exchange: Exchange, asks: Sequence[GenerateAsk], outputs: Sequence[RequestOutput]
    ) -> None:
        """Count the generation of a request that has ended, however it ended."""
        for ask, output in zip(asks, outputs, strict=False):
            for sample in output.outputs:
                self.finished[str(sample.finish_reason or FinishReason.ABORT)] += 1
            self.tokens["prompt"] += output.usage.prompt_tokens
            self.tokens["cached"] += output.usage.cached_tokens
            self.tokens["generation"] += output.usage.completion_tokens
            self._observe_request(exchange, ask, output)

    def _observe_request(self, exchange: Exchange, ask: GenerateAsk, output: RequestOutput) -> None:
        seen: dict[str, float] = {
            "prompt_tokens": output.usage.prompt_tokens,
            "generation_tokens": output.usage.completion_tokens,
            "max_generation_tokens": max((len(s.token_ids) for s in output.outputs), default=0),
            "n": ask.params.n,
        }
        if ask.params.max_tokens is not None:
            seen["max_tokens"] = ask.params.max_tokens
        times = output.timings
        if output.finished and times.first_token and times.finished:
            decoded = output.usage.completion_tokens - len(output.outputs)
            decode = times.finished - times.first_token
            seen |= {
                "e2e": times.finished - exchange.arrival,
                "queue": times.scheduled - times.arrival,
                "prefill": times.first_token - times.scheduled,
                "decode": decode,
                "inference": times.finished - times.scheduled,
            }
            if decoded > 0:
                seen["tpot"] = decode * len(output.outputs) / decoded
        for name, value in seen.items():
            self._histograms[name].histogram.observe(max(0.0, value))

    def count_http(self, exchange: Exchange) -> None:
        """Count a request that has been answered, or whose client left (status 499)."""
        method = exchange.method if exchange.method in _METHODS else "OTHER"
        handler = exchange.handler or "none"
        self.http[handler, method, str(exchange.status or 499)] += 1
        if (handler, method) not in self._http_seconds:
            self._http_seconds[handler, method] = Histogram(_FINE)
        self._http_seconds[handler, method].observe(time.monotonic() - exchange.arrival)
        self._http_bytes[handler, "request"] += exchange.bytes_in
        self._http_bytes[handler, "response"] += exchange.bytes_out

    def render(self) -> bytes:
        """The exposition in Prometheus' text format, at most CACHE_SECONDS old."""
        now = time.monotonic()
        if self._rendered[0] < 0 or now - self._rendered[0] > CACHE_SECONDS:
            self._rendered = (now, generate_latest(self._registry))
        return self._rendered[1]

    def families(self) -> Iterator[Metric]:
        """Every family as of now."""
        ready = self._engine.state not in {EngineState.STARTING, EngineState.FAILED}
        labels = {"model_name": self._engine.card.name if ready else "", "engine": "0"}
        stats = self._engine.stats
        for named in self._histograms.values():
            for name, bounds in (named.quire, named.vllm):
                family = HistogramMetricFamily(name, named.text, labels=list(labels))
                family.add_metric(
                    list(labels.values()), named.histogram.buckets(bounds), named.histogram.total
                )
                yield family
        yield from _engine_families(stats, labels)
        yield _startup_family(self._engine.startup)
        yield from self._token_families(labels)
        yield from self._http_families()
        yield _family(GaugeMetricFamily, "quire_engine_state", "1 for the state that the engine is in",
                      {"state": str(self._engine.state)}, 1)  # fmt: skip

    def _token_families(self, labels: dict[str, str]) -> Iterator[Metric]:
        for prefix in ("quire_", "vllm:"):
            family = CounterMetricFamily(
                f"{prefix}request_success",
                "samples that have ended, by reason",
                labels=[*labels, "finished_reason"],
            )
            for reason in FinishReason:
                family.add_metric([*labels.values(), str(reason)], self.finished[str(reason)])
            yield family
            for kind in ("prompt", "generation"):
                yield _family(CounterMetricFamily, f"{prefix}{kind}_tokens", f"{kind} tokens of ended requests",
                              labels, self.tokens[kind])  # fmt: skip
        yield _family(CounterMetricFamily, "quire_cached_prompt_tokens", "prompt tokens that the prefix cache saved",
                      labels, self.tokens["cached"])  # fmt: skip

    def _http_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "requests by route, method and status", labels=["handler", "method", "status"]
        )
        for key, count in self.http.items():
            requests.add_metric(list(key), count)
        yield requests
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "headers in to response out", labels=["handler", "method"]
        )
        for route, histogram in self._http_seconds.items():
            seconds.add_metric(list(route), histogram.buckets(_FINE), histogram.total)
        yield seconds
        for direction in ("request", "response"):
            family = CounterMetricFamily(
                f"http_{direction}_size_bytes", f"bytes of {direction} bodies", labels=["handler"]
            )
            for (handler, way), size in self._http_bytes.items():
                if way == direction:
                    family.add_metric([handler], size)
            yield family


class _Exposition(Collector):
    """What the registry asks at a scrape."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing is collected when registering: the engine may not have started


def _request_histograms() -> dict[str, _Named]:
    decades = _decades()
    return {
        "ttft": _named("quire_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", _FINE, _VLLM_TTFT,
                       "headers in to a request's first token"),
        "itl": _named("quire_inter_token_latency_seconds", "vllm:inter_token_latency_seconds", _FINE, _VLLM_GAP,
                      "time between tokens of one sample"),
        "tpot": _named("quire_request_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds",
                       _FINE, _VLLM_GAP, "mean time of a request's tokens after the first"),
        "e2e": _named("quire_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds", _FINE, _VLLM_REQUEST,
                      "headers in to last token"),
        "queue": _named("quire_request_queue_time_seconds", "vllm:request_queue_time_seconds", _FINE, _VLLM_REQUEST,
                        "admission to first scheduled"),
        "prefill": _named("quire_request_prefill_time_seconds", "vllm:request_prefill_time_seconds", _FINE,
                          _VLLM_REQUEST, "first scheduled to first token"),
        "decode": _named("quire_request_decode_time_seconds", "vllm:request_decode_time_seconds", _FINE,
                         _VLLM_REQUEST, "first token to last"),
        "inference": _named("quire_request_inference_time_seconds", "vllm:request_inference_time_seconds", _FINE,
                            _VLLM_REQUEST, "first scheduled to last token"),
        "prompt_tokens": _named("quire_request_prompt_tokens", "vllm:request_prompt_tokens", decades, decades,
                                "prompt tokens of a request"),
        "generation_tokens": _named("quire_request_generation_tokens", "vllm:request_generation_tokens", decades,
                                    decades, "generated tokens of a request"),
        "max_generation_tokens": _named("quire_request_max_num_generation_tokens",
                                        "vllm:request_max_num_generation_tokens", decades, decades,
                                        "generated tokens of a request's longest sample"),
        "max_tokens": _named("quire_request_params_max_tokens", "vllm:request_params_max_tokens", decades, decades,
                             "max_tokens asked for"),
        "n": _named("quire_request_params_n", "vllm:request_params_n", _SAMPLES, _SAMPLES, "samples asked for"),
    }  # fmt: skip


# name under both prefixes, family, text, value
_SHARED: tuple[tuple[str, type[Metric], str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", GaugeMetricFamily, "sequences in the batch", lambda s: s.running),
    ("num_requests_waiting", GaugeMetricFamily, "requests that wait for a free place", lambda s: s.waiting),
    ("kv_cache_usage_perc", GaugeMetricFamily, "share of KV blocks in use, 0 to 1",
     lambda s: s.blocks_used / s.blocks if s.blocks else 0.0),
    ("prefix_cache_queries", CounterMetricFamily, "prompt tokens looked up", lambda s: s.prefix_queried_tokens),
    ("prefix_cache_hits", CounterMetricFamily, "prompt tokens found", lambda s: s.prefix_hit_tokens),
    ("num_preemptions", CounterMetricFamily, "sequences put back to the queue", lambda s: s.preemptions),
)  # fmt: skip
_OWN: tuple[tuple[str, type[Metric], str, Callable[[EngineStats], float]], ...] = (
    ("quire_waiting_tokens", GaugeMetricFamily, "prompt tokens that wait", lambda s: s.waiting_tokens),
    ("quire_kv_blocks", GaugeMetricFamily, "KV blocks there are", lambda s: s.blocks),
    ("quire_kv_blocks_used", GaugeMetricFamily, "KV blocks held by sequences", lambda s: s.blocks_used),
    ("quire_kv_blocks_cached", GaugeMetricFamily, "KV blocks that hold reusable prefixes", lambda s: s.blocks_cached),
    ("quire_kv_waste_tokens", GaugeMetricFamily, "tokens allocated and not used", lambda s: s.kv_waste_tokens),
    ("quire_steps", CounterMetricFamily, "engine steps", lambda s: s.steps),
    ("quire_step_seconds", CounterMetricFamily, "time in steps", lambda s: s.step_seconds),
    ("quire_step_prefill_tokens", CounterMetricFamily, "prompt tokens computed", lambda s: s.prefill_tokens),
    ("quire_step_decode_tokens", CounterMetricFamily, "tokens decoded", lambda s: s.decode_tokens),
    ("quire_wasted_tokens", CounterMetricFamily, "tokens computed for nobody", lambda s: s.wasted_tokens),
    ("quire_engine_resident_bytes", GaugeMetricFamily, "memory of the engine process", lambda s: s.resident_bytes),
)  # fmt: skip


def _engine_families(stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
    for name, kind, text, value in _SHARED:
        yield _family(kind, f"quire_{name}", text, labels, value(stats))
        yield _family(kind, f"vllm:{name}", text, labels, value(stats))
    for name, kind, text, value in _OWN:
        yield _family(kind, name, text, labels, value(stats))
    buckets = _step_buckets(stats.step_tokens)
    for prefix in ("quire_", "vllm:"):
        steps = HistogramMetricFamily(
            f"{prefix}iteration_tokens_total", "tokens of a step", labels=list(labels)
        )
        steps.add_metric(list(labels.values()), buckets, stats.prefill_tokens + stats.decode_tokens)
        yield steps
    config = labels | {"block_size": str(stats.block_size), "num_gpu_blocks": str(stats.blocks)}
    yield _family(GaugeMetricFamily, "vllm:cache_config_info", "sizes of the KV cache", config, 1)
    yield _by_part(CounterMetricFamily, "quire_step_phase_seconds", "phase", stats.step_phase_seconds.items())
    yield _by_part(GaugeMetricFamily, "quire_memory_bytes", "part", stats.memory_parts.items())


def _startup_family(spans: list[dict[str, Any]]) -> Metric:
    family = GaugeMetricFamily(
        "quire_startup_seconds",
        "when a part of the start-up began and ended, from the start of the server's process",
        labels=["process", "phase", "edge"],
    )
    for span in spans:
        for edge in ("begin", "end"):
            family.add_metric([span["process"], span["phase"], edge], span[edge])
    return family


def _step_buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Steps by their tokens, as cumulative buckets."""
    histogram = Histogram(STEP_TOKEN_BOUNDS)
    histogram.counts = list(counts) or histogram.counts
    return histogram.buckets(STEP_TOKEN_BOUNDS)


def _family(kind: type[Metric], name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = kind(name, text, labels=list(labels))  # type: ignore[call-arg]
    family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
    return family


def _by_part(kind: type[Metric], name: str, label: str, parts: Iterable[tuple[str, float]]) -> Metric:
    family = kind(name, f"by {label}", labels=[label])  # type: ignore[call-arg]
    for part, value in parts:
        family.add_metric([part], value)  # type: ignore[attr-defined]
    return family
