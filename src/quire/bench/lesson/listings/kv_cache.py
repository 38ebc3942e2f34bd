"""The KV cache of released models: bytes by context, and by the number of KV heads."""

from quire.planner.formulas import kv_cache_bytes


def show(name: str, layers: int, kv_heads: int, head_dim: int, tokens: int) -> None:
    size = kv_cache_bytes(layers, kv_heads, head_dim, tokens)
    print(f"{name}: {size / 2**30:.2f} GiB, {size / 1e9:.2f} GB")


def main() -> None:
    show("8B, 4,096 tokens", 32, 8, 128, 4096)
    show("70B, 4,096 tokens", 80, 8, 128, 4096)
    show("70B, 131,072 tokens", 80, 8, 128, 131072)
    show("70B with 64 KV heads, 4,096 tokens", 80, 64, 128, 4096)
    show("120 layers of 128 heads, 8,192 tokens", 120, 128, 128, 8192)
