"""All latencies of one request from the times of its tokens, as the load generator computes them."""

from quire.bench.request_metrics import compute_metrics


def main() -> None:
    tokens, first, last = 50, 200.0, 2200.0
    gap = (last - first) / (tokens - 1)  # 50 tokens have 49 gaps
    times = [first + i * gap for i in range(tokens)]
    for name, value in compute_metrics(first, times).items():
        print(f"{name}: {value}")
