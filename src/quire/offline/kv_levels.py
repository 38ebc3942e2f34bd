"""Levels, middles and scales of a kvquant3 cache from a sample of a layer's keys and values (arXiv 2401.18079)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.executor.base import F32
from quire.program.formats import KV_LEVELS, HeadCodes
from quire.program.memory import kv_head_elems, kv_outliers
from quire.program.ops.attention import HeadShape
from quire.spec import Rope
from quire.spec.rope import cos_sin

MOST_TOKENS = 1024  # of a sample: a head of 128 dimensions then has 131,072 numbers
OUTLIERS = 0.01  # of a dimension's numbers that its range leaves out, half on either side
LEAST = np.float32(2.0**-40)  # of a scale: a dimension may be the same all over the text
_ROUNDS = 60  # of k-means; levels no longer move long before

F64 = npt.NDArray[np.float64]


class LayerSample:
    """Keys before their rotation, values and mean squares of queries of a layer, of tokens spread over a text."""

    def __init__(self, shape: HeadShape, rope: Rope | None, length: int, tokens: int) -> None:
        self._shape, self._rope = shape, rope
        self._tables = None if rope is None else cos_sin(rope, length)
        self._every, self._seen = -(-tokens // MOST_TOKENS), 0
        self._keys: list[F32] = []
        self._values: list[F32] = []
        self._squares = np.zeros((shape.kv_heads, shape.head_dim), np.float64)

    def take(self, rows: F32, first: int) -> None:
        """The rows of tokens at positions from `first` on: heads of queries, keys and values, rotated."""
        shape = self._shape
        heads = rows.reshape(len(rows), -1, shape.head_dim)
        q = heads[:, : shape.heads].reshape(len(rows), shape.kv_heads, -1, shape.head_dim)
        self._squares += np.square(q.astype(np.float64)).sum((0, 2))
        chosen = (self._seen + np.arange(len(rows))) % self._every == 0
        self._seen += len(rows)
        keys, values = (
            heads[chosen, shape.heads :].reshape(-1, 2, shape.kv_heads, shape.head_dim).swapaxes(0, 1)
        )
        self._keys.append(self._turned_back(keys, first + np.flatnonzero(chosen)))
        self._values.append(values.copy())

    def _turned_back(self, keys: F32, positions: npt.NDArray[np.int64]) -> F32:
        """Keys [n, heads, dim] as they were before the rotation."""
        if self._rope is None or self._tables is None:
            return keys.copy()
        low, high = _pairs(self._rope)
        cos, sin = (table[positions][:, None] for table in self._tables)
        squared = np.float32(self._rope.attention_factor) ** 2
        found = keys.copy()
        found[..., low] = (keys[..., low] * cos + keys[..., high] * sin) / squared
        found[..., high] = (keys[..., high] * cos - keys[..., low] * sin) / squared
        return found

    def codes(self) -> HeadCodes:
        """What codes stand for."""
        keys, values = np.concatenate(self._keys), np.concatenate(self._values)
        count = kv_outliers(kv_head_elems(self._shape.head_dim))
        least, most = np.quantile(keys, (OUTLIERS / 2, 1 - OUTLIERS / 2), axis=0).astype(np.float32)
        middles, scales = (most + least) / 2, np.maximum((most - least) / 2, LEAST)
        y = (keys - middles) / scales
        weights = np.broadcast_to(self._sensitivity() * np.square(scales, dtype=np.float64), y.shape)
        of_keys = _levels(y, np.where(_largest(np.abs(y), count), 0, weights))
        out = _largest(np.abs(values), count)
        most, least = (
            np.where(out, far, values).max(-1, keepdims=True, initial=-np.inf) if far < 0
            else np.where(out, far, values).min(-1, keepdims=True, initial=np.inf)
            for far in (-np.inf, np.inf)
        )  # fmt: skip
        wide = np.maximum((most - least) / 2, LEAST)
        weights = np.broadcast_to(np.square(wide, dtype=np.float64), values.shape)
        of_values = _levels((values - (most + least) / 2) / wide, np.where(out, 0, weights))
        return HeadCodes(
            *(tuple(tuple(map(float, row)) for row in x) for x in (of_keys, of_values, middles, scales))
        )

    def _sensitivity(self) -> F64:
        """What an error of a dimension of a key counts, [heads, dim]: the mean square of queries over both dimensions
        of a pair, which every rotation mixes."""
        found = self._squares / max(self._seen, 1)
        if self._rope is not None:
            low, high = _pairs(self._rope)
            found[:, low] = found[:, high] = (found[:, low] + found[:, high]) / 2
        return found


def _pairs(rope: Rope) -> tuple[slice, slice]:
    """The dimensions that are rotated together."""
    half = rope.dim // 2
    return (
        (slice(0, rope.dim, 2), slice(1, rope.dim, 2))
        if rope.interleaved
        else (slice(0, half), slice(half, rope.dim))
    )


def _largest(size: F32, count: int) -> npt.NDArray[np.bool_]:
    """Which of the last axis are its `count` largest."""
    found = np.zeros(size.shape, np.bool_)
    np.put_along_axis(found, np.argsort(-size, axis=-1, kind="stable")[..., :count], True, -1)
    return found


def _levels(y: F32, weights: F64) -> F32:
    """Eight levels of each head for y [n, heads, dim], rising, float32 [heads, 8]."""
    return np.stack([weighted_levels(y[:, h].ravel(), weights[:, h].ravel()) for h in range(y.shape[1])])


def weighted_levels(y: F32, weights: F64) -> F32:
    """Eight rising levels with the least weighted sum of squared distances from y to the nearest one: Lloyd's k-means
    from quantiles, over sorted numbers, whose sums between borders are differences of running sums.
    """
    order = np.argsort(y, kind="stable")
    x, w = y[order].astype(np.float64), weights[order]
    mass, moment = (np.concatenate(([0.0], np.cumsum(each))) for each in (w, w * x))
    if not mass[-1] > 0:
        return np.linspace(-1, 1, KV_LEVELS, dtype=np.float32)
    places = np.searchsorted(mass[1:], (np.arange(KV_LEVELS) + 0.5) / KV_LEVELS * mass[-1])
    levels = x[places]
    for _ in range(_ROUNDS):
        borders = np.searchsorted(x, (levels[1:] + levels[:-1]) / 2, "right")
        cuts = np.concatenate(([0], borders, [len(x)]))
        own = np.diff(mass[cuts])
        levels = np.where(own > 0, np.diff(moment[cuts]) / np.where(own > 0, own, 1), levels)
    return np.maximum.accumulate(levels).astype(np.float32)
