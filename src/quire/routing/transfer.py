"""Moving the KV cache of a prompt from one device to another, and whether that pays."""

from __future__ import annotations


def transfer_seconds(size: float, gb_s: float, latency: float = 0.0) -> float:
    """Seconds for `size` bytes over a link of `gb_s`, 1e9 bytes a second. Raises ValueError unless that is above 0."""
    if gb_s <= 0:
        raise ValueError(f"link_gb_s: {gb_s:g} must be above 0")
    return latency + size / gb_s / 1e9


def layout(interference_ms: float, transfer_ms: float) -> str:
    """Choose a layout: separate prefill and decode pay for moving the KV cache, joint ones for interference."""
    return "separate prefill and decode pools" if transfer_ms < interference_ms else "keep phases colocated"
