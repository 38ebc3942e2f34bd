"""The environment variables Quire reads, all of them."""

from __future__ import annotations

import os

# name -> what it does
VARIABLES = {
    "QUIRE_ISA": "force an instruction set of the kernels: baseline, avx2 or avx512",
}


def isa() -> str:
    """The forced instruction set, or "" for the best of the machine."""
    return os.environ.get("QUIRE_ISA", "")
