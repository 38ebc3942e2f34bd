"""TTFT and the gaps between tokens, from the times at which tokens came."""

from quire.bench.request_metrics import compute_metrics
from quire.bench.timeline import gaps


def main() -> None:
    times_ms = [320, 355, 392, 428]
    found = compute_metrics(times_ms[0], times_ms)
    print("TTFT:", found["ttft_ms"], "ms")
    print("decode ITLs:", gaps(times_ms), "ms")
    print("decode TPS:", found["tokens_per_sec"])
