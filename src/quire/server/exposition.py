"""The counts of ServerMetrics in Prometheus' text format."""

from __future__ import annotations

import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire import __version__
from quire.answers import CALL_OUTCOMES
from quire.engine.api import STEP_TOKEN_BOUNDS, EngineState, EngineStats
from quire.server.adapter_metrics import adapter_families
from quire.server.histogram import Histogram
from quire.server.metrics import COMPILE, FINE, HOOK_OUTCOMES, ServerMetrics
from quire.server.tenant_metrics import tenant_families
from quire.structured.ask import KINDS
from quire.types import FinishReason

DRAFT_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
CACHE_SECONDS = 0.25  # frequent scrapes cost four renderings a second at most


class Exposition(Collector):
    """The current value of every metric family."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # process_*: of this process, which serves HTTP
        self._rendered: tuple[float, bytes] = (-1.0, b"")

    def render(self) -> bytes:
        """The text, at most CACHE_SECONDS old."""
        now = time.monotonic()
        if self._rendered[0] < 0 or now - self._rendered[0] > CACHE_SECONDS:
            self._rendered = (now, generate_latest(self._registry))
        return self._rendered[1]

    def describe(self) -> Iterator[Metric]:
        return iter(())  # collects nothing at registration: the engine may not have started

    def collect(self) -> Iterator[Metric]:
        """The current value of every metric family."""
        ready = self._metrics.engine.state not in {EngineState.STARTING, EngineState.FAILED}
        labels = {"model_name": self._metrics.engine.card.name if ready else "", "engine": "0"}
        stats = self._metrics.engine.stats
        for named in self._metrics.histograms.values():
            names = (named.quire, named.vllm, (named.older, named.vllm[1]))
            for name, bounds in (pair for pair in names if pair[0]):
                family = HistogramMetricFamily(name, named.text, labels=list(labels))
                family.add_metric(
                    list(labels.values()), named.histogram.buckets(bounds), named.histogram.total
                )
                yield family
        yield from self._tgi_families(stats, labels)
        acceptance = self._metrics.engine.card.acceptance if labels["model_name"] else "same"
        yield from _engine_families(stats, labels, acceptance)
        yield from adapter_families(self._metrics, labels)
        if self._metrics.tenants is not None:
            yield from tenant_families(self._metrics, labels)
        yield _startup_family(self._metrics.engine.startup)
        yield from self._token_families(labels)
        yield from self._grammar_families(labels)
        yield self._hook_family(labels)
        yield from self._tool_server_families(labels)
        yield from self._simulator_families(labels)
        yield from self._replica_families(stats, labels)
        yield from self._http_families()
        yield _family(GaugeMetricFamily, "quire_build_info", "version of Quire, and the platform it runs on",
                      {"version": __version__, "python": platform.python_version(), "machine": platform.machine()},
                      1)  # fmt: skip
        yield _family(GaugeMetricFamily, "quire_engine_state", "1 for the current state of the engine",
                      {"state": str(self._metrics.engine.state)}, 1)  # fmt: skip

    def _replica_families(self, stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
        """Without a value for a model that has one replica."""
        running = GaugeMetricFamily(
            "quire_replica_requests", "requests that a replica has not answered", labels=[*labels, "replica"]
        )
        ready = GaugeMetricFamily(
            "quire_replica_ready", "1 while a replica takes requests", labels=[*labels, "replica"]
        )
        for number, requests in enumerate(stats.replica_requests):
            running.add_metric([*labels.values(), str(number)], max(0, requests))
            ready.add_metric([*labels.values(), str(number)], requests >= 0)
        yield from (running, ready)

    def _simulator_families(self, labels: dict[str, str]) -> Iterator[Metric]:
        """Without a value before a check, and while the record is too short for one."""
        check, values = self._metrics.simulator, list(labels.values())
        errors = GaugeMetricFamily(
            "quire_simulator_error_ratio", "error of the simulator on the latest load, by the figure",
            labels=[*labels, "figure"],
        )  # fmt: skip
        requests = GaugeMetricFamily(
            "quire_simulator_checked_requests", "requests of that load", labels=list(labels)
        )
        when = GaugeMetricFamily(
            "quire_simulator_check_time_seconds", "Unix time of the check", labels=list(labels)
        )
        if check is not None:
            for figure, error in check.errors.items():
                errors.add_metric([*values, figure], error)
            requests.add_metric(values, check.requests)
            when.add_metric(values, check.at)
        yield from (errors, requests, when)

    def _tgi_families(self, stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
        """TGI's names. Its counters have no suffix, so they are of no type here."""
        named, values = self._metrics.histograms, list(labels.values())
        of_tokens = self._metrics.mean_per_token
        found = [(name, named[key].text, named[key].histogram, named[key].quire[1]) for name, key in _TGI]
        text = "first step to last token, by the generated tokens"
        found.append(("tgi_request_mean_time_per_token_duration", text, of_tokens, FINE))
        text = "body received to the prompt tokenized"
        found.append(("tgi_request_validation_duration", text, self._metrics.validation, FINE))
        for name, text, histogram, bounds in found:
            family = HistogramMetricFamily(name, text, labels=list(labels))
            family.add_metric(values, histogram.buckets(bounds), histogram.total)
            yield family
        for name, text, key in (
            ("tgi_request_count", "requests that have ended", "n"),
            ("tgi_request_success", "requests with a complete answer", "e2e"),
        ):
            yield _family(UnknownMetricFamily, name, text, labels, sum(named[key].histogram.counts))
        failed = UnknownMetricFamily(
            "tgi_request_failure", "requests for text that were refused or failed", labels=[*labels, "err"]
        )
        errors = dict.fromkeys(("validation", "overloaded", "generation"), 0)
        for (handler, method, status), count in self._metrics.http.items():
            failure = status >= "400" and status != "499"  # 499: the client left
            if failure and method == "POST" and handler in GENERATING:
                errors[_tgi_error(status)] += count
        for kind, count in errors.items():
            failed.add_metric([*values, kind], count)
        yield failed
        yield _family(GaugeMetricFamily, "tgi_queue_size", "waiting requests", labels, stats.waiting)
        yield _family(GaugeMetricFamily, "tgi_batch_current_size", "running sequences", labels, stats.running)

    def _token_families(self, labels: dict[str, str]) -> Iterator[Metric]:
        for prefix in ("quire_", "vllm:"):
            family = CounterMetricFamily(
                f"{prefix}request_success",
                "ended samples by finish reason",
                labels=[*labels, "finished_reason"],
            )
            for reason in FinishReason:
                family.add_metric([*labels.values(), str(reason)], self._metrics.finished[str(reason)])
            yield family
            for kind in ("prompt", "generation"):
                yield _family(CounterMetricFamily, f"{prefix}{kind}_tokens", f"{kind} tokens of ended requests",
                              labels, self._metrics.tokens[kind])  # fmt: skip
        yield _family(CounterMetricFamily, "quire_cached_prompt_tokens", "prompt tokens found in the prefix cache",
                      labels, self._metrics.tokens["cached"])  # fmt: skip
        yield _family(CounterMetricFamily, "quire_reasoning_tokens", "generated tokens that are reasoning",
                      labels, self._metrics.tokens["reasoning"])  # fmt: skip
        yield _family(CounterMetricFamily, "quire_refused_tickets", "tickets that were not of their request",
                      labels, self._metrics.refused_tickets)  # fmt: skip

    def _grammar_families(self, labels: dict[str, str]) -> Iterator[Metric]:
        counts = self._metrics.grammars
        for name, text, by_kind in (
            ("requests", "requests with structured output", counts.requests),
            ("refused", "requests whose structured output was refused", counts.refused),
        ):
            family = CounterMetricFamily(f"quire_structured_{name}", text, labels=[*labels, "kind"])
            for kind in KINDS:
                family.add_metric([*labels.values(), kind], by_kind[kind])
            yield family
        yield _family(CounterMetricFamily, "quire_grammar_cache_hits", "grammars that were compiled before", labels,
                      counts.hits)  # fmt: skip
        seconds = HistogramMetricFamily(
            "quire_grammar_compile_seconds",
            "compiling a grammar, and waiting for others",
            labels=list(labels),
        )
        seconds.add_metric(list(labels.values()), counts.seconds.buckets(COMPILE), counts.seconds.total)
        yield seconds
        yield self._calls_family(labels)

    def _calls_family(self, labels: dict[str, str]) -> Metric:
        engine = self._metrics.engine
        named = engine.card.answers.get("tool_calls", {}).get("format") if labels["model_name"] else None
        family = CounterMetricFamily(
            "quire_tool_calls",
            "calls of functions by format and by what became of them; malformed ones are text",
            labels=[*labels, "format", "outcome"],
        )
        for outcome in CALL_OUTCOMES:
            family.add_metric(
                [*labels.values(), named or "none", outcome], engine.stats.calls.get(outcome, 0)
            )
        return family

    def _hook_family(self, labels: dict[str, str]) -> Metric:
        family = CounterMetricFamily(
            "quire_output_hook_chunks", "chunks of answers by what the output hook made of them",
            labels=[*labels, "outcome"],
        )  # fmt: skip
        for outcome in HOOK_OUTCOMES:
            family.add_metric([*labels.values(), outcome], self._metrics.hooked[outcome])
        return family

    def _tool_server_families(self, labels: dict[str, str]) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "quire_tool_server_requests", "requests to tool servers by kind and by what became of them",
            labels=[*labels, "server", "kind", "outcome"],
        )  # fmt: skip
        for key, count in self._metrics.tools.requests.items():
            requests.add_metric([*labels.values(), *key], count)
        yield requests
        seconds = HistogramMetricFamily(
            "quire_tool_server_seconds", "time of a request to a tool server, with waiting for a place",
            labels=[*labels, "server"],
        )  # fmt: skip
        for server, histogram in self._metrics.tools.seconds.items():
            seconds.add_metric([*labels.values(), server], histogram.buckets(FINE), histogram.total)
        yield seconds

    def _http_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "requests by route, method and status", labels=["handler", "method", "status"]
        )
        for key, count in self._metrics.http.items():
            requests.add_metric(list(key), count)
        yield requests
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "headers received to response sent", labels=["handler", "method"]
        )
        for route, histogram in self._metrics.http_seconds.items():
            seconds.add_metric(list(route), histogram.buckets(FINE), histogram.total)
        yield seconds
        for direction in ("request", "response"):
            family = CounterMetricFamily(
                f"http_{direction}_size_bytes", f"bytes of {direction} bodies", labels=["handler"]
            )
            for (handler, way), size in self._metrics.http_bytes.items():
                if way == direction:
                    family.add_metric([handler], size)
            yield family


def _tgi_error(status: str) -> str:
    if status == "429":
        return "overloaded"
    return "generation" if status == "424" or status >= "500" else "validation"


# The routes that make text.
GENERATING = frozenset((
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate",
    "/completion", "/completions", "/infill", "/generate", "/generate_stream", "/",
))  # fmt: skip
# TGI's histograms -> ours
_TGI = (
    ("tgi_request_duration", "e2e"), ("tgi_request_queue_duration", "queue"),
    ("tgi_request_inference_duration", "inference"), ("tgi_request_input_length", "prompt_tokens"),
    ("tgi_request_generated_tokens", "generation_tokens"), ("tgi_request_max_new_tokens", "max_tokens"),
)  # fmt: skip
# name under both prefixes, family, text, value
_SHARED: tuple[tuple[str, type[Metric], str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", GaugeMetricFamily, "running sequences", lambda s: s.running),
    ("num_requests_waiting", GaugeMetricFamily, "waiting requests", lambda s: s.waiting),
    ("kv_cache_usage_perc", GaugeMetricFamily, "share of KV blocks in use, 0 to 1",
     lambda s: s.blocks_used / s.blocks if s.blocks else 0.0),
    ("prefix_cache_queries", CounterMetricFamily, "prompt tokens looked up", lambda s: s.prefix_queried_tokens),
    ("prefix_cache_hits", CounterMetricFamily, "prompt tokens found", lambda s: s.prefix_hit_tokens),
    ("num_preemptions", CounterMetricFamily, "sequences returned to the queue", lambda s: s.preemptions),
    ("spec_decode_num_drafts", CounterMetricFamily, "rows of steps that had drafts", lambda s: s.draft_rows),
    ("spec_decode_num_draft_tokens", CounterMetricFamily, "drafts run", lambda s: s.drafted_tokens),
    ("spec_decode_num_accepted_tokens", CounterMetricFamily, "drafts that were right", lambda s: s.accepted_tokens),
)  # fmt: skip
# Their former names in vLLM.
_OLDER = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}
_OWN: tuple[tuple[str, type[Metric], str, Callable[[EngineStats], float]], ...] = (
    ("quire_waiting_tokens", GaugeMetricFamily, "prompt tokens of waiting requests", lambda s: s.waiting_tokens),
    ("quire_kv_blocks", GaugeMetricFamily, "KV blocks in total", lambda s: s.blocks),
    ("quire_kv_blocks_used", GaugeMetricFamily, "KV blocks held by sequences", lambda s: s.blocks_used),
    ("quire_kv_blocks_cached", GaugeMetricFamily, "KV blocks that hold reusable prefixes", lambda s: s.blocks_cached),
    ("quire_kv_blocks_pinned", GaugeMetricFamily, "KV blocks that requests asked to keep", lambda s: s.blocks_pinned),
    ("quire_kv_copied_tokens", CounterMetricFamily, "prompt tokens copied from a part of a cached block",
     lambda s: s.prefix_copied_tokens),
    ("quire_kv_waste_tokens", GaugeMetricFamily, "allocated but unused token slots", lambda s: s.kv_waste_tokens),
    ("quire_weight_bytes", GaugeMetricFamily, "bytes of the weights, of which weight_memory bounds those in memory",
     lambda s: s.weight_paging.get("total", 0)),
    ("quire_weight_resident_bytes", GaugeMetricFamily, "bytes of these weights that are in memory: the working set",
     lambda s: s.weight_paging.get("resident", 0)),
    ("quire_weight_paged_bytes", CounterMetricFamily, "bytes of weights that came into memory since the start",
     lambda s: s.weight_paging.get("paged_in", 0)),
    ("quire_weight_paging_seconds", CounterMetricFamily, "time that steps have waited for weights",
     lambda s: s.weight_paging.get("seconds", 0.0)),
    ("quire_swap_blocks", GaugeMetricFamily, "KV blocks in the swap space", lambda s: s.swap_blocks),
    ("quire_swapped_out_blocks", CounterMetricFamily, "KV blocks copied to the swap space", lambda s: s.swapped_out),
    ("quire_swapped_in_blocks", CounterMetricFamily, "KV blocks copied back", lambda s: s.swapped_in),
    ("quire_disk_tier_blocks", GaugeMetricFamily, "KV blocks in the file of kv_tiers",
     lambda s: s.disk_tier.get("blocks", 0)),
    ("quire_disk_tier_saved_blocks", CounterMetricFamily, "KV blocks written to that file",
     lambda s: s.disk_tier.get("saved", 0)),
    ("quire_disk_tier_loaded_blocks", CounterMetricFamily, "KV blocks read from such a file in place of computing them",
     lambda s: s.disk_tier.get("loaded", 0)),
    ("quire_disk_tier_refused_blocks", CounterMetricFamily, "KV blocks that came faster than the disk takes them",
     lambda s: s.disk_tier.get("refused", 0)),
    ("quire_disk_tier_damaged_blocks", CounterMetricFamily, "KV blocks with a wrong check sum, which are not served",
     lambda s: s.disk_tier.get("damaged", 0)),
    ("quire_disk_tier_failed", GaugeMetricFamily, "engines whose disk tier an error of the disk has ended",
     lambda s: s.disk_tier.get("failed", 0)),
    ("quire_remote_tier_blocks", GaugeMetricFamily, "KV blocks that are known to be on the server of kv_tiers",
     lambda s: s.remote_tier.get("blocks", 0)),
    ("quire_remote_tier_saved_blocks", CounterMetricFamily, "KV blocks sent to that server",
     lambda s: s.remote_tier.get("saved", 0)),
    ("quire_remote_tier_loaded_blocks", CounterMetricFamily, "KV blocks that came from it in place of computing them",
     lambda s: s.remote_tier.get("loaded", 0)),
    ("quire_remote_tier_refused_blocks", CounterMetricFamily, "KV blocks that came faster than the server takes them",
     lambda s: s.remote_tier.get("refused", 0)),
    ("quire_remote_tier_damaged_blocks", CounterMetricFamily, "KV blocks of the server with a wrong check sum",
     lambda s: s.remote_tier.get("damaged", 0)),
    ("quire_remote_tier_failed", GaugeMetricFamily, "engines that cannot use the server of kv_tiers now",
     lambda s: s.remote_tier.get("failed", 0)),
    ("quire_remote_tier_loaded_bytes", CounterMetricFamily, "bytes of the KV blocks that came from it",
     lambda s: s.remote_tier.get("loaded_bytes", 0)),
    ("quire_transferred_prompts", CounterMetricFamily, "prompts of which another server computed all that was said",
     lambda s: s.remote_tier.get("came", 0)),
    ("quire_late_transfers", CounterMetricFamily, "prompts whose blocks did not all come in time, which were computed",
     lambda s: s.remote_tier.get("late", 0)),
    ("quire_transfer_wait_seconds", CounterMetricFamily, "time for which prompts waited for blocks of other servers",
     lambda s: s.remote_tier.get("wait_seconds", 0)),
    ("quire_borrowed_bytes", GaugeMetricFamily, "memory of other models that holds KV blocks of this one",
     lambda s: s.borrowed_bytes),
    ("quire_lent_bytes", GaugeMetricFamily, "memory of this model that other models have", lambda s: s.lent_bytes),
    ("quire_steps", CounterMetricFamily, "engine steps", lambda s: s.steps),
    ("quire_step_seconds", CounterMetricFamily, "time spent in steps", lambda s: s.step_seconds),
    ("quire_step_prefill_tokens", CounterMetricFamily, "prompt tokens computed", lambda s: s.prefill_tokens),
    ("quire_step_decode_tokens", CounterMetricFamily, "tokens decoded", lambda s: s.decode_tokens),
    ("quire_prompt_text_words", CounterMetricFamily, "words of prompts that came as texts", lambda s: s.words[0]),
    ("quire_prompt_text_tokens", CounterMetricFamily, "tokens of the same prompts", lambda s: s.words[1]),
    ("quire_step_moved_bytes", CounterMetricFamily, "bytes of weights, keys and values that steps read and write",
     lambda s: s.moved_bytes),
    ("quire_expert_moves", CounterMetricFamily, "experts that were exchanged or copied", lambda s: s.expert_moves),
    ("quire_head_of_line_seconds", CounterMetricFamily, "time that requests waited while longer prompts were computed",
     lambda s: s.head_of_line_seconds),
    ("quire_step_plans", GaugeMetricFamily, "step sizes prepared ahead", lambda s: s.step_plans),
    ("quire_step_plan_hits", CounterMetricFamily, "steps of a prepared size", lambda s: s.step_plan_hits),
    ("quire_step_plan_fallbacks", CounterMetricFamily, "steps of no prepared size", lambda s: s.step_plan_fallbacks),
    ("quire_step_plan_padding", CounterMetricFamily, "rows computed to fill a prepared size",
     lambda s: s.step_plan_padding),
    ("quire_forced_tokens", CounterMetricFamily, "tokens that grammars forced, added without sampling",
     lambda s: s.forced_tokens),
    ("quire_late_rows", CounterMetricFamily, "rows that sat a step out for the mask of their grammar",
     lambda s: s.late_rows),
    ("quire_draft_faults", CounterMetricFamily, "sequences that go on without drafts after a failure",
     lambda s: s.draft_faults),
    ("quire_speculation_seconds_won", GaugeMetricFamily, "time that steps with drafts have won, estimated",
     lambda s: s.speculation_seconds_won),
    ("quire_step_cost_error_ratio", GaugeMetricFamily, "median error of the predicted time of recent steps",
     lambda s: s.step_cost_error),
    ("quire_step_cost_error_p90_ratio", GaugeMetricFamily, "the same at the 90th percentile",
     lambda s: s.step_cost_spread),
    ("quire_output_length_error_ratio", GaugeMetricFamily, "mean error of the predicted length of recent outputs",
     lambda s: s.length_error),
    ("quire_wasted_tokens", CounterMetricFamily, "computed tokens that were not used", lambda s: s.wasted_tokens),
    ("quire_engine_restarts", CounterMetricFamily, "engine restarts", lambda s: s.restarts),
    ("quire_engine_resident_bytes", GaugeMetricFamily, "resident bytes of the engine", lambda s: s.resident_bytes),
)  # fmt: skip


def _engine_families(stats: EngineStats, labels: dict[str, str], acceptance: str) -> Iterator[Metric]:
    for name, kind, text, value in _SHARED:
        yield _family(kind, f"quire_{name}", text, labels, value(stats))
        yield _family(kind, f"vllm:{name}", text, labels, value(stats))
        if name in _OLDER:
            yield _family(kind, f"vllm:{_OLDER[name]}", text, labels, value(stats))
    for name, kind, text, value in _OWN:
        yield _family(kind, name, text, labels, value(stats))
    yield _drafts_family(stats, labels)
    buckets = _step_buckets(stats.step_tokens)
    for prefix in ("quire_", "vllm:"):
        steps = HistogramMetricFamily(
            f"{prefix}iteration_tokens_total", "tokens per step", labels=list(labels)
        )
        steps.add_metric(list(labels.values()), buckets, stats.prefill_tokens + stats.decode_tokens)
        yield steps
        accepted = CounterMetricFamily(
            f"{prefix}spec_decode_num_accepted_tokens_per_pos",
            "drafts that were right, by position in their row",
            labels=[*labels, "position"],
        )
        for position, count in enumerate(stats.accepted_by_position):
            accepted.add_metric([*labels.values(), str(position)], count)
        yield accepted
    how = labels | {"acceptance": acceptance}
    yield _family(GaugeMetricFamily, "quire_spec_decode_info", "which drafts are right", how, 1)
    config = labels | {"block_size": str(stats.block_size), "num_gpu_blocks": str(stats.blocks)}
    yield _family(GaugeMetricFamily, "vllm:cache_config_info", "sizes of the KV cache", config, 1)
    yield _by_part(CounterMetricFamily, "quire_service_level_kept", "service_class", stats.level_kept.items())
    yield _by_part(
        CounterMetricFamily, "quire_service_level_missed", "service_class", stats.level_missed.items()
    )
    yield _by_part(
        GaugeMetricFamily, "quire_goodput_requests_per_second", "service_class", stats.goodput.items()
    )
    yield _by_part(GaugeMetricFamily, "quire_degrade_step", "step", stats.degrade_steps.items())
    yield _by_part(CounterMetricFamily, "quire_degraded_requests", "step", stats.degraded.items())
    yield _by_part(CounterMetricFamily, "quire_step_phase_seconds", "phase", stats.step_phase_seconds.items())
    for name, seconds in (("work", stats.rank_seconds), ("wait", stats.rank_wait_seconds)):
        ranks = [(str(rank), spent) for rank, spent in enumerate(seconds)]
        yield _by_part(CounterMetricFamily, f"quire_rank_{name}_seconds", "rank", ranks)
    waits = [(str(replica), spent) for replica, spent in enumerate(stats.replica_wait_seconds)]
    yield _by_part(CounterMetricFamily, "quire_replica_wait_seconds", "replica", waits)
    pairs = [(str(rank), count) for rank, count in enumerate(stats.expert_pairs)]
    yield _by_part(CounterMetricFamily, "quire_expert_pairs", "rank", pairs)
    yield _by_part(GaugeMetricFamily, "quire_expert_load_ratio", "of", stats.expert_load.items())
    yield _by_part(CounterMetricFamily, "quire_step_flops", "format", stats.flops.items())
    for limit, share in (("compute", stats.compute_share), ("bandwidth", stats.bandwidth_share)):
        text = f"share of the machine's {limit} in recent steps, where it was measured"
        family = GaugeMetricFamily(f"quire_{limit}_share", text, labels=list(labels))
        if share is not None:
            family.add_metric(list(labels.values()), share)
        yield family
    yield _by_part(GaugeMetricFamily, "quire_kv_bytes", "state", _kv_bytes(stats).items())
    yield _by_part(GaugeMetricFamily, "quire_memory_bytes", "part", stats.memory_parts.items())


def _kv_bytes(stats: EngineStats) -> dict[str, float]:
    """Bytes of the KV cache by state. Held, cached and free ones are all; pinned are some of the cached, reserved some
    of the free or cached: what tenants have a right to and do not use.
    """
    each = stats.memory_parts.get("kv", 0) / stats.blocks if stats.blocks else 0.0
    unused = sum(max(0, floor - stats.tenant_blocks.get(name, 0)) for name, floor in stats.floors.items())
    counts = {
        "held": stats.blocks_used, "cached": stats.blocks_cached, "pinned": stats.blocks_pinned, "reserved": unused,
        "free": max(0, stats.blocks - stats.blocks_used - stats.blocks_cached),
    }  # fmt: skip
    return {state: each * count for state, count in counts.items()}


def _startup_family(spans: list[dict[str, Any]]) -> Metric:
    family = GaugeMetricFamily(
        "quire_startup_seconds",
        "begin and end of each part of the start-up, counted from the start of the server process",
        labels=["process", "phase", "edge"],
    )
    for span in spans:
        for edge in ("begin", "end"):
            family.add_metric([span["process"], span["phase"], edge], span[edge])
    return family


def _step_buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative buckets of steps by their tokens."""
    histogram = Histogram(STEP_TOKEN_BOUNDS)
    histogram.counts = list(counts) or histogram.counts
    return histogram.buckets(STEP_TOKEN_BOUNDS)


def _drafts_family(stats: EngineStats, labels: dict[str, str]) -> Metric:
    histogram = Histogram(DRAFT_BOUNDS)
    for drafts, rows in enumerate(stats.rows_by_drafts):
        histogram.counts[bisect_left(DRAFT_BOUNDS, drafts)] += rows
    family = HistogramMetricFamily(
        "quire_draft_tokens_per_row", "drafts of a row, where there are some", labels=list(labels)
    )
    family.add_metric(list(labels.values()), histogram.buckets(DRAFT_BOUNDS), stats.drafted_tokens)
    return family


def _family(kind: type[Metric], name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = kind(name, text, labels=list(labels))  # type: ignore[call-arg]
    family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
    return family


def _by_part(kind: type[Metric], name: str, label: str, parts: Iterable[tuple[str, float]]) -> Metric:
    family = kind(name, f"by {label}", labels=[label])  # type: ignore[call-arg]
    for part, value in parts:
        family.add_metric([part], value)  # type: ignore[attr-defined]
    return family
