"""Worked examples: each function computes the figures of a page about LLM inference with this library.

`quire bench explain-metrics` shows them with their source, and so does docs/metrics.md. If the figure of such a page is
wrong, the example prints the right one and its note explains the error.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import textwrap
from collections.abc import Callable

from quire.bench.goodput import compute_goodput
from quire.bench.request_metrics import compute_metrics, mean_itl
from quire.bench.rules import chunked_schedule, investigate
from quire.bench.timeline import gaps
from quire.planner.formulas import (
    TOKENS_PER_WORD,
    admits,
    decode_bound,
    kv_cache_bytes,
    max_context,
    stream_bound,
    users_within,
)
from quire.records import dataclass
from quire.routing.transfer import layout

GQA_70B = kv_cache_bytes(80, 8, 128, 1)  # bytes per token: 80 layers, 8 KV heads of 128, 16 bit


def measure_prefill_and_decode() -> None:
    """TTFT and gaps of one request."""
    token_times_ms = [320, 355, 392, 428]
    itls = gaps(token_times_ms)
    print("TTFT:", token_times_ms[0], "ms")
    print("decode ITLs:", itls, "ms")
    print(f"decode TPS: {compute_metrics(320, token_times_ms)['tokens_per_sec']:.1f}")


def route_latency_investigation() -> None:
    """Which half of the request to investigate."""
    print("long initial pause:", investigate(ttft_p95_ms=1100, itl_p95_ms=60))
    print("choppy stream:", investigate(ttft_p95_ms=350, itl_p95_ms=160))


def estimate_sharded_bandwidth_bound() -> None:
    """The highest rate of one stream on four devices."""
    model_gb, device_gb = 140, 80
    print("fits on one H100-80GB:", model_gb <= device_gb)
    print(f"four-GPU ideal shard-read bound: {stream_bound(model_gb, 3350, devices=4):.1f} tokens/s")


def calculate_kv_cache_footprint() -> None:
    """KV cache of a 70B model at 4,096 tokens, with 8 KV heads and with 64."""
    gqa, mha = kv_cache_bytes(80, 8, 128, 4096), kv_cache_bytes(80, 64, 128, 4096)
    print(f"GQA cache: {gqa / 1e9:.2f} GB")
    print(f"MHA cache: {mha / 1e9:.2f} GB")
    print("MHA / GQA:", mha // gqa)


def check_capacity_with_runtime_headroom() -> None:
    """200 users of a 7B model at 2,048 tokens on 80 GB: the reserve decides."""
    raw = 14 + 200 * kv_cache_bytes(32, 8, 128, 2048) / 1e9
    print(f"raw weights plus KV: {raw:.2f} GB")
    for reserve in (8, 16):
        print(f"with {reserve} GB runtime reserve: {raw + reserve <= 80}")


def dynamic_token_budgeting() -> None:
    """Context per user: 50 users on four devices of 80 GB."""
    print(f"max context per user: {max_context(320, 140, 40, GQA_70B, users=50):,} tokens")


def admit_request_by_token_budget() -> None:
    """Forty requests of 4,096 tokens are running. Which prompt still fits into 60 GB?"""
    active = [4096] * 40
    print("admit 16K request:", admits(active, 16_384, 60, GQA_70B))
    print("admit 64K request:", admits(active, 65_536, 60, GQA_70B))


def interleave_prefill_with_active_decode() -> None:
    """A prompt of 6,144 tokens in chunks of 2,048, from the scheduler itself."""
    for action in chunked_schedule(prompt_tokens=6144, chunk_tokens=2048):
        print(action)


def compare_disaggregation_overhead() -> None:
    """Does moving the KV cache cost more than the interference?"""
    print("bursty workload:", layout(interference_ms=95, transfer_ms=20))
    print("small prompts:", layout(interference_ms=8, transfer_ms=20))


def estimate_kv_quantization_gain() -> None:
    """Users within 80 GB at 1.342 GB each, and at half of that."""
    print("FP16 users from KV budget:", users_within(80, 1.342))
    print("FP8 users from KV budget:", users_within(80, 1.342 / 2))
    print("runtime headroom still required:", True)


def estimate_throughput() -> None:
    """A 70B model in 16 bit at 2 TB/s."""
    rate = decode_bound(70, 2.0, 2000)
    print(f"Model memory: {70 * 2.0:.1f} GB")
    print(f"Time per token (batch=1): {1000 / rate:.1f} ms")
    print(f"Tokens/sec (batch=1): {rate:.1f}")
    print(f"Words/sec (approx): {rate / TOKENS_PER_WORD:.1f}")


def metrics_of_one_request() -> None:
    """50 tokens, the first after 200 ms, the last after 2,200 ms."""
    tpot = (2200 - 200) / (50 - 1)
    print(compute_metrics(200, [200 + i * tpot for i in range(50)]))


def tpot_by_hand() -> None:
    """n tokens have n − 1 gaps."""
    tpot = (2200 - 200) / (50 - 1)
    print(f"TPOT = 2000 / 49 = {tpot:.1f} ms/token, {1000 / tpot:.1f} tokens/sec")


def end_to_end_latency() -> None:
    """200 tokens, the first after 300 ms, with gaps of 40 ms."""
    last = 300 + 199 * 40
    print(f"E2EL = {last / 1000:.2f} s")


def mean_itl_over_requests() -> None:
    """10 tokens with gaps of 30 ms and 1,000 tokens with gaps of 50 ms."""
    print(f"mean TPOT: {(30 + 50) / 2:.0f} ms")
    print(f"mean ITL: {mean_itl([(10, 30), (1000, 50)]):.2f} ms")


def goodput_of_100_requests() -> None:
    """Ninety requests meet TTFT < 500 ms and TPOT < 100 ms."""
    fast, slow = {"ttft_ms": 200, "tpot_ms": 50}, {"ttft_ms": 900, "tpot_ms": 150}
    print(compute_goodput([fast] * 90 + [slow] * 10, slo_ttft_ms=500, slo_tpot_ms=100))


def goodput_and_throughput() -> None:
    """More throughput can be less goodput."""
    for rate, violated in ((1000, 0.4), (700, 0.0)):
        met = rate * (1 - violated)
        print(f"{rate} requests/s with {violated:.0%} violations: goodput {met:.0f} requests/s")


def kv_cache_sizes() -> None:
    """KV caches in GiB."""
    for name, layers, tokens in (("8B, 4K", 32, 4096), ("70B, 4K", 80, 4096), ("70B, 128K", 80, 131072)):
        print(f"{name}: {kv_cache_bytes(layers, 8, 128, tokens) / 2**30:.2f} GiB")


@dataclass(frozen=True, slots=True)
class Listing:
    """An example."""

    run: Callable[[], None]

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", "-")

    @property
    def note(self) -> str:
        """Explains differences from published figures."""
        return _NOTES.get(self.name, "")

    @property
    def about(self) -> str:
        return (self.run.__doc__ or "").strip()

    def source(self) -> str:
        """The statements of the function, without its name and docstring."""
        lines = inspect.getsource(self.run).splitlines()[2:]
        return textwrap.dedent("\n".join(lines))

    def output(self) -> str:
        """The printed output."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.run()
        return out.getvalue()


_NOTES = {
    "route-latency-investigation": "the thresholds are examples: choose those of your product",
    "dynamic-token-budgeting": "without the reserve of 40 GB it is 10,986, not 110,000 as sometimes published",
    "interleave-prefill-with-active-decode": "in Quire, chunk and decode share a step: neither waits for the other",
    "metrics-of-one-request": "a single token gives None for TPOT, not 0",
    "end-to-end-latency": "200 tokens have 199 gaps: 8.26 s; 200 × 40 ms would give 8.3",
    "mean-itl-over-requests": "n tokens have n − 1 gaps: (9 × 30 + 999 × 50) / 1008; with n it would be 49.80",
    "goodput-of-100-requests": "rates are per second: give `seconds` if the requests took longer than one",
    "kv-cache-sizes": "0.50, 1.25 and 40 GiB, not 0.25, 1.07 and 34.4 as sometimes published",
}
# Every function of this file is an example.
LISTINGS = tuple(
    Listing(run) for run in list(globals().values()) if inspect.isfunction(run) and run.__module__ == __name__
)
