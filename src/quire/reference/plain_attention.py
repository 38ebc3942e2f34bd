"""Attention: by its definition, in tiles with a softmax that runs, and its gradient from what is computed again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]


def attention(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    """softmax(Q·Kᵀ / √d)·V of one head: q [n, d], k and v [m, d]. The n × m scores are written and read as a whole.

    `causal`: the queries are the last n positions, and each sees the keys up to its own.
    """
    scores = _scores(q, k, causal, 0, len(q), 0, len(k))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out: Array = (weights / weights.sum(-1, keepdims=True)) @ v
    return out


def online_softmax(values: Array) -> tuple[float, float]:
    """The maximum of some numbers and the sum of exp(value − maximum), in one pass (1805.02867)."""
    top, total = -np.inf, 0.0
    for value in values:
        higher = max(top, value)
        if higher > -np.inf:  # exp(−∞ − −∞) is no number
            total = total * np.exp(top - higher) + np.exp(value - higher)
        top = higher
    return float(top), float(total)


class Tiled(NamedTuple):
    """Output [n, d], the logarithm of each row's sum of exponentials [n], and numbers moved to and from memory."""

    out: Array
    log_sums: Array
    moved: int


def tiled_attention(q: Array, k: Array, v: Array, *, causal: bool, rows: int, columns: int) -> Tiled:
    """The same output from tiles of rows × columns scores, none of which reaches memory (2205.14135, algorithm 1).

    `moved` counts what a device would read and write: queries and outputs once, keys and values once for each tile of
    rows.
    """
    out, log_sums, moved = np.zeros_like(q), np.full(len(q), -np.inf, q.dtype), 0
    for at in range(0, len(q), rows):
        part = q[at : at + rows]
        top, total = np.full((len(part), 1), -np.inf, q.dtype), np.zeros((len(part), 1), q.dtype)
        summed = np.zeros_like(part)
        moved += 2 * part.size
        for by in range(0, len(k), columns):
            end = min(by + columns, len(k))
            scores = _scores(q, k, causal, at, at + len(part), by, end)
            higher = np.maximum(top, scores.max(-1, keepdims=True))
            safe = np.where(np.isneginf(higher), 0, higher)  # rows that have seen no key yet
            weights, faded = np.exp(scores - safe), np.exp(top - safe)
            total = total * faded + weights.sum(-1, keepdims=True)
            summed = summed * faded + weights @ v[by:end]
            top = higher
            moved += k[by:end].size + v[by:end].size
        out[at : at + rows] = summed / total
        log_sums[at : at + rows] = (top + np.log(total))[:, 0]
    return Tiled(out, log_sums, moved)


def naive_traffic(n: int, d: int) -> int:
    """Numbers that `attention` of n positions moves: Q, K, V, output, and the scores, written once and read twice."""
    return 4 * n * d + 3 * n * n


def attention_gradient(
    q: Array, k: Array, v: Array, tiled: Tiled, d_out: Array, *, causal: bool, columns: int
) -> tuple[Array, Array, Array]:
    """Gradients of q, k, v. The weights are computed again, tile by tile, from `log_sums` (2205.14135, algorithm 4)."""
    scale = 1 / np.sqrt(q.shape[1])
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    mean = (d_out * tiled.out).sum(-1, keepdims=True)
    for by in range(0, len(k), columns):
        part = slice(by, min(by + columns, len(k)))
        weights = np.exp(_scores(q, k, causal, 0, len(q), by, part.stop) - tiled.log_sums[:, None])
        d_v[part] += weights.T @ d_out
        d_scores = weights * (d_out @ v[part].T - mean) * scale
        d_q += d_scores @ k[part]
        d_k[part] += d_scores.T @ q
    return d_q, d_k, d_v


def _scores(q: Array, k: Array, causal: bool, at: int, end: int, by: int, to: int) -> Array:
    """Scores of queries at … end and keys by … to; −∞ where a query may not look."""
    scores = q[at:end] @ k[by:to].T / np.sqrt(q.shape[1]).astype(q.dtype)
    if causal:
        positions = np.arange(at, end)[:, None] + len(k) - len(q)
        scores = np.where(np.arange(by, to) <= positions, scores, -np.inf)
    return np.asarray(scores)
