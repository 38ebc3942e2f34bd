"""The longest context that 50 users can have at a time on four cards."""

from quire.planner.formulas import kv_cache_bytes, max_context


def main() -> None:
    token = kv_cache_bytes(80, 8, 128, 1)
    most = max_context(memory_gb=320, model_gb=140, reserve_gb=40, bytes_per_token=token, users=50)
    print(f"max context per user: {most:,} tokens")
