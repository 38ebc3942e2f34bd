"""Attention in tiles beside attention with a whole matrix of scores: the same output, less memory traffic."""

import numpy as np

from quire.reference.plain_attention import attention, naive_traffic, tiled_attention


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1024, 128)) for _ in range(3))
    whole = attention(q, k, v, causal=True)
    tiled = tiled_attention(q, k, v, causal=True, rows=128, columns=128)
    print("shape:", tiled.out.shape)
    print("largest difference below 1e-12:", bool(np.abs(tiled.out - whole).max() < 1e-12))
    print(f"numbers moved: {naive_traffic(1024, 128):,} naive, {tiled.moved:,} in tiles")
