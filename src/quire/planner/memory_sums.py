"""Calculators of bytes: weights, caches, and how many devices, users and tokens they leave room for."""

from __future__ import annotations

from quire.planner import formulas
from quire.planner.devices import devices as known_devices
from quire.planner.devices import links
from quire.planner.figure import Figure, Figures, at_least
from quire.routing.transfer import layout, transfer_seconds


def weights(*, params_b: float, bits: float = 16) -> Figures:
    """Memory of the weights: parameters × bits / 8."""
    yield Figure("weights", params_b * bits / 8, "GB")
    for name, width in (("float32", 32), ("bfloat16", 16), ("int8", 8), ("int4", 4), ("int2", 2)):
        yield Figure(name, params_b * width / 8, "GB")


def kv_cache(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int = 4096,
    batch: int = 1,
    kv_bits: float = 16,
    kv_values: int = 0,
) -> Figures:
    """Memory of keys and values: 2 × layers × KV heads × head size × tokens, for each sequence."""
    token = kv_token_bytes(layers, kv_heads, head_dim, kv_bits, kv_values)
    yield Figure("of a token", token / 1024, "KiB")
    yield Figure("of a sequence", token * tokens / 2**30, "GiB", f"{token * tokens / 1e9:.4g} GB")
    yield Figure("of all", token * tokens * batch / 2**30, "GiB", f"{token * tokens * batch / 1e9:.4g} GB")


def memory(
    *,
    params_b: float,
    layers: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    bits: float = 16,
    tokens: int = 4096,
    batch: int = 1,
    kv_bits: float = 16,
    kv_values: int = 0,
) -> Figures:
    """Weights, KV cache and activations, and how many of each device hold them.

    Activations are a rough estimate, of all tokens in one step.
    """
    kv = kv_token_bytes(layers, kv_heads, head_dim, kv_bits, kv_values) * tokens * batch / 1e9
    activations = formulas.activation_bytes(hidden, tokens * batch) / 1e9
    total = params_b * bits / 8 + kv + activations
    yield Figure("weights", params_b * bits / 8, "GB")
    yield Figure("KV cache", kv, "GB")
    yield Figure("activations", activations, "GB", "rough")
    yield Figure("all", total, "GB")
    for device in known_devices().values():
        if not device.on_chip:
            yield Figure(device.name, at_least(total / device.memory_gb), "× " + device.title)


def context(
    *,
    memory_gb: float,
    params_b: float,
    layers: int,
    kv_heads: int,
    head_dim: int,
    bits: float = 16,
    devices: int = 1,
    users: int = 1,
    reserve_gb: float = 0.0,
    tokens: int = 4096,
    kv_bits: float = 16,
    kv_values: int = 0,
) -> Figures:
    """The longest context that so many users can have at a time, and the users that a context leaves room for."""
    token = kv_token_bytes(layers, kv_heads, head_dim, kv_bits, kv_values)
    whole, model, reserve = memory_gb * devices, params_b * bits / 8, reserve_gb * devices
    room = max(0.0, whole - model - reserve)
    yield Figure("fits", model + reserve <= whole)
    yield Figure("for KV caches", room, "GB")
    yield Figure("context of a user", formulas.max_context(whole, model, reserve, token, users), "tokens")
    yield Figure("users at the context", formulas.users_within(room, token * tokens / 1e9))
    yield Figure("context where KV equals the weights", int(model * 1e9 / token), "tokens")


def batch_within(
    *,
    params_b: float,
    layers: int,
    kv_heads: int,
    head_dim: int,
    memory_gb: float,
    bandwidth_gb_s: float,
    tpot_ms: float,
    bits: float = 16,
    tokens: int = 4096,
    devices: int = 1,
    reserve_gb: float = 0.0,
    kv_bits: float = 16,
    kv_values: int = 0,
) -> Figures:
    """The largest batch that memory holds, and the largest whose step keeps TPOT; the smaller one is the answer."""
    sequence = kv_token_bytes(layers, kv_heads, head_dim, kv_bits, kv_values) * tokens / 1e9
    model, bandwidth = params_b * bits / 8, bandwidth_gb_s * devices
    by_memory = formulas.users_within((memory_gb - reserve_gb) * devices - model, sequence)
    by_time = formulas.users_within(tpot_ms / 1000 * bandwidth - model, sequence)
    yield Figure("by memory", by_memory, "sequences")
    yield Figure("by bandwidth", by_time, "sequences", "a step reads the weights and every KV cache")
    yield Figure(
        "batch", min(by_memory, by_time), "sequences", "memory" if by_memory <= by_time else "bandwidth"
    )
    yield Figure("weights alone", 1000 * model / bandwidth, "ms")


def transfer(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int = 2048,
    kv_bits: float = 16,
    interference_ms: float = 50.0,
    kv_values: int = 0,
) -> Figures:
    """Moving the KV cache of a prompt from a prefill to a decode device, over each kind of link."""
    size = kv_token_bytes(layers, kv_heads, head_dim, kv_bits, kv_values) * tokens
    yield Figure("KV cache", size / 2**20, "MiB")
    for name, rate in links().items():
        ms = 1e3 * transfer_seconds(size, rate)
        yield Figure(name, ms, "ms", layout(interference_ms, ms))


def paging(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    longest: int = 2048,
    output: int = 50,
    block_size: int = 16,
    kv_bits: float = 16,
    kv_values: int = 0,
) -> Figures:
    """A contiguous cache for the longest answer, beside blocks for the tokens that there are."""
    token = kv_token_bytes(layers, kv_heads, head_dim, kv_bits, kv_values)
    paged = -(-output // block_size) * block_size
    yield Figure("of a token", token / 1e3, "kB")
    yield Figure("contiguous", token * longest / 1e9, "GB")
    yield Figure("used", token * output / 1e6, "MB")
    yield Figure("wasted, contiguous", 100 * (1 - output / longest), "%")
    yield Figure("wasted, in blocks", 100 * (1 - output / paged), "%", f"at most {block_size - 1} tokens")
    yield Figure("sequences in the same memory", longest / output, "×", "without the rest of the last block")


def prefix_cache(
    *, prefix: int = 2000, new: int = 80, ms_per_token: float = 0.5, requests: int = 1
) -> Figures:
    """What a cached prefix saves: its tokens are not computed again."""
    yield Figure("without", (prefix + new) * ms_per_token, "ms")
    yield Figure("with", new * ms_per_token, "ms")
    yield Figure("saved", 100 * prefix / (prefix + new), "%")
    yield Figure(
        "tokens computed without", float(prefix * requests), "tokens", "of the prefix, by all requests"
    )
    yield Figure("tokens computed with", float(prefix), "tokens", "of the prefix, by all requests")


def kv_token_bytes(layers: int, kv_heads: int, head_dim: int, kv_bits: float, kv_values: int) -> float:
    """Bytes that a token adds to the cache. `kv_values`: its numbers, where layers are not all alike."""
    return (kv_values or 2 * layers * kv_heads * head_dim) * kv_bits / 8
