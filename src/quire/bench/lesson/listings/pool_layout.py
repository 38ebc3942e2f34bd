"""Separate pools for prefill and decode pay if moving the cache takes less than prompts delay streams."""

from quire.routing.transfer import layout


def main() -> None:
    print("bursty workload:", layout(interference_ms=95, transfer_ms=20))
    print("small prompts:", layout(interference_ms=8, transfer_ms=20))
