"""The Prometheus page of a server during a measurement, read once per second.

The names of Quire, vLLM, SGLang and llama-server are known. A server without the page, or with other names, can be
measured too, with less to show.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from quire.bench.metrics_page import read_page
from quire.util.http_client import Client, ClientError

EVERY = 1.0  # seconds between two readings
SETTLE = 0.6  # wait before the first and the last reading: servers collect figures and cache them for part of a second

# figure -> its names on servers, the first found counts; _sum and _count give a mean
_GAUGES = {
    "running": ("quire_num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs",
                "llamacpp:requests_processing"),
    "waiting": ("quire_num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs",
                "llamacpp:requests_deferred"),
    "kv_usage": ("quire_kv_cache_usage_perc", "vllm:kv_cache_usage_perc", "sglang:token_usage"),
}  # fmt: skip
_COUNTERS = {
    "prefill_tokens": ("quire_step_prefill_tokens_total", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total",
                       "llamacpp:prompt_tokens_total"),
    "decode_tokens": ("quire_step_decode_tokens_total", "vllm:generation_tokens_total",
                      "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total"),
    "steps": ("quire_steps_total", "vllm:iteration_tokens_total_count", "llamacpp:n_decode_total"),
    "step_seconds": ("quire_step_seconds_total",),
    "prefix_queries": ("quire_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
    "prefix_hits": ("quire_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
    "preemptions": ("quire_num_preemptions_total", "vllm:num_preemptions_total"),
    "drafted": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted": ("vllm:spec_decode_num_accepted_tokens_total",),
}  # fmt: skip
_MEANS = {
    "ttft": ("quire_time_to_first_token_seconds", "vllm:time_to_first_token_seconds",
             "sglang:time_to_first_token_seconds"),
    "itl": ("quire_inter_token_latency_seconds", "vllm:inter_token_latency_seconds",
            "sglang:inter_token_latency_seconds"),
    "tpot": ("quire_request_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds",
             "sglang:time_per_output_token_seconds"),
    "e2el": ("quire_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds",
             "sglang:e2e_request_latency_seconds"),
    "queue": ("quire_request_queue_time_seconds", "vllm:request_queue_time_seconds"),
    "prefill": ("quire_request_prefill_time_seconds", "vllm:request_prefill_time_seconds"),
    "decode": ("quire_request_decode_time_seconds", "vllm:request_decode_time_seconds"),
}  # fmt: skip


def parse_exposition(text: str) -> dict[str, float]:
    """Parse values by name, summed over labels; buckets and values that are not numbers are skipped."""
    found: dict[str, float] = {}
    for name, samples in read_page(text).items():
        values = [value for _, value in samples if math.isfinite(value)]
        if values and not name.endswith("_bucket"):
            found[name] = sum(values)
    return found


class ServerWatch:
    """Readings of a server's metrics from `start` to `stop`; empty if the server has no such page."""

    def __init__(self, client: Client, now: Callable[[], float]) -> None:
        self.samples: list[dict[str, float]] = []
        self._client, self._now = client, now
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take the first reading, and continue if it succeeds."""
        if await self._read():
            await asyncio.sleep(SETTLE)
            self._first = self._last = await self._read()
            self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Take the last reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.sleep(SETTLE)
            self._last = await self._read() or self._last

    def means(self) -> dict[str, float]:
        """Means of the server's latencies during the run, in seconds."""
        found = {}
        for name, names in _MEANS.items():
            for known in names:
                count = self._grown(f"{known}_count")
                if count:
                    found[name] = self._grown(f"{known}_sum") / count
                    break
        return found

    def counters(self) -> dict[str, float]:
        """Increases of the server's counters."""
        names = ((name, known) for name, all_names in _COUNTERS.items() for known in all_names)
        found: dict[str, float] = {}
        for name, known in names:
            if known in self._last and name not in found:
                found[name] = self._grown(known)
        return found

    def _grown(self, name: str) -> float:
        return self._last.get(name, 0.0) - self._first.get(name, 0.0)

    async def _watch(self) -> None:
        before = self._first
        while True:
            await asyncio.sleep(EVERY)
            reading = await self._read()
            if not reading:
                return
            sample = {"at": round(self._now(), 3)}
            for name, names in (*_GAUGES.items(), *_COUNTERS.items()):
                known = next((one for one in names if one in reading), None)
                if known is not None:
                    value = reading[known] - (before.get(known, 0.0) if name in _COUNTERS else 0.0)
                    sample[name] = value
            self.samples.append(sample)
            before = reading

    async def _read(self) -> dict[str, float]:
        try:
            status, body = await self._client.get("/metrics")
        except ClientError:
            return {}
        return parse_exposition(body.decode("utf-8", "replace")) if status == 200 else {}
