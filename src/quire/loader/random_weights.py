"""Weights for `--load-format random`: seeded, cheap, and independent of the reading order.

Method. Element e of a tensor takes 16-bit word e, u, of the Philox stream (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) whose key is SHA-256(seed, tensor name). Its value is
0.02 · Φ⁻¹((u + ½) / 2^16) rounded to bfloat16, taken from a table of 2^16 entries: a normal distribution of
deviation 0.02, cut at 4.3 deviations, with one look-up per element. A counter-based stream can start at any element, so
a row block does not need the blocks before it. Norms multiply by 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quire.loader.source import Array, TensorInfo
from quire.program.tensors import Param

STANDARD_DEVIATION = 0.02
_WORDS_PER_COUNT = 16  # a Philox counter step gives four 64-bit words, sixteen values of 16 bits
_CHUNK_COUNTS = 2**13  # counter steps at a time: a quarter MiB of random bits, which stays in the cache
_ONE = 0x3F80  # 1.0 in bfloat16


class RandomWeights:
    """The tensors of a program's params, in BF16, without files. Implements Source."""

    def __init__(self, params: Sequence[Param], seed: int = 0) -> None:
        self._infos: dict[str, TensorInfo] = {}
        self._norms: dict[str, int] = {}
        self._seed = seed
        self._table = _normal_table()
        for param in params:
            for part in param.parts:
                self._infos[part.tensor] = TensorInfo(part.tensor, "BF16", part.shape)
                if param.kind == "vector" and not part.tensor.endswith(("bias", "sinks")):
                    self._norms[part.tensor] = _ONE if part.added == 0 else 0

    def names(self) -> Iterable[str]:
        return self._infos.keys()

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows [start, stop) as bfloat16 bits; equal to the same rows of the whole tensor."""
        info = self._infos[name]
        start, stop = info.rows(start, stop)
        shape = (stop - start, *info.shape[1:])
        if name in self._norms:
            return np.full(shape, self._norms[name], np.uint16)
        cols = int(np.prod(info.shape[1:], dtype=np.int64))
        return self._values(name, start * cols, stop * cols).reshape(shape)

    def release(self, name: str) -> None:
        """Does nothing: there is no memory to release."""

    def _values(self, name: str, begin: int, end: int) -> npt.NDArray[np.uint16]:
        """Elements [begin, end) of a tensor's stream."""
        digest = hashlib.sha256(f"{self._seed}\0{name}".encode()).digest()
        count, skip = divmod(begin, _WORDS_PER_COUNT)
        stream = np.random.Philox(counter=count, key=int.from_bytes(digest[:16], "little"))
        out = np.empty(end - begin, np.uint16)
        done = -skip
        while done < out.size:
            left = -(-(out.size - done) // _WORDS_PER_COUNT)
            words = stream.random_raw(4 * min(left, _CHUNK_COUNTS)).astype("<u8", copy=False).view("<u2")
            first = max(-done, 0)
            last = min(words.size, out.size - done)
            out[done + first : done + last] = self._table[words[first:last]]
            done += words.size
        return out


def _normal_table() -> npt.NDArray[np.uint16]:
    """bfloat16 bits (rounded to nearest even) of the normal quantiles at (u + ½)/2^16, u = 0 … 65535."""
    from statistics import NormalDist  # imports fractions and decimals, and is rarely needed

    quantile = NormalDist(0.0, STANDARD_DEVIATION).inv_cdf
    upper = np.array([quantile((u + 0.5) / 2**16) for u in range(2**15, 2**16)], np.float32)
    bits = upper.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.concatenate([rounded[::-1] | 0x8000, rounded])  # symmetric by construction
