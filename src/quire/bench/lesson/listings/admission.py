"""Admission by tokens: whether a new request fits beside those that run."""

from quire.planner.formulas import admits, kv_cache_bytes


def main() -> None:
    token, running = kv_cache_bytes(80, 8, 128, 1), [4096] * 40
    print("admit 16K request:", admits(running, 16_384, budget_gb=60, bytes_per_token=token))
    print("admit 64K request:", admits(running, 65_536, budget_gb=60, bytes_per_token=token))
