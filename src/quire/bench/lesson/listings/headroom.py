"""Whether 200 users fit a card depends on what is kept for activations, kernels and fragmentation."""

from quire.planner.formulas import kv_cache_bytes


def main() -> None:
    raw = 14 + 200 * kv_cache_bytes(32, 8, 128, 2048) / 1e9
    print(f"raw weights plus KV: {raw:.2f} GB")
    for reserve in (8, 16):
        print(f"with {reserve} GB runtime reserve:", raw + reserve <= 80)
