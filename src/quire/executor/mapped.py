"""The memory that processes share, as an array."""

from __future__ import annotations

import ctypes

import numpy as np

from quire import _native
from quire.executor.base import U8


def shared_bytes(ranks: _native.SharedRanks, nbytes: int) -> U8:
    """The memory that ranks share."""
    mapped = (ctypes.c_uint8 * nbytes).from_address(ranks.address)
    mapped.owner = ranks  # type: ignore[attr-defined]  # mapped for as long as an array is in it
    return np.ctypeslib.as_array(mapped)
