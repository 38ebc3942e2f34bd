"""Users that a budget for caches holds, in 16 and in 8 bits."""

from quire.planner.formulas import kv_cache_bytes, users_within


def main() -> None:
    for name, width in (("FP16", 2), ("FP8", 1)):
        each = kv_cache_bytes(80, 8, 128, 4096, width) / 1e9
        print(f"{name} users from KV budget:", users_within(80, each))
