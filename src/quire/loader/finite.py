"""Find NaN, infinity and numbers outside of a format in raw weights, at memory speed."""

from __future__ import annotations

import numpy as np

from quire.loader.source import Array

_CHUNK_BYTES = 2**18  # two passes over each chunk; the second finds it in the cache

# A float is NaN or infinite if its exponent bits are all ones, that is, if its magnitude bits as an integer reach this
# bound.
_EXPONENT: dict[str, int] = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
FLOAT_FORMATS = frozenset(_EXPONENT)
# The same for numbers beyond float16: 65520 and more are rounded to infinity.
_BEYOND_HALF = {"F32": 0x477FF000, "F16": 0x7C00, "BF16": 0x4780}


def first_nonfinite(data: Array, dtype: str, kept: str = "") -> int | None:
    """Return the flat index of the first NaN or infinity of a C-contiguous array in "F32", "F16" or "BF16", or None.

    `kept` "f16": also of the first number that becomes infinite in float16.

    Two integer maxima suffice, without a temporary: as signed integers only positive floats can reach the bound, and as
    unsigned ones every negative float lies above every positive one.
    """
    bound = (_BEYOND_HALF if kept == "f16" else _EXPONENT)[dtype]
    width = data.dtype.itemsize
    sign = 1 << (8 * width - 1)
    signed, unsigned = np.dtype(f"<i{width}"), np.dtype(f"<u{width}")
    flat = data.reshape(-1)
    step = _CHUNK_BYTES // width
    for start in range(0, flat.size, step):
        bits = flat[start : start + step].view(unsigned)
        if bits.view(signed).max() >= bound or bits.max() >= bound | sign:
            return start + int(np.argmax(bits & (sign - 1) >= bound))
    return None
