"""The environment variables Quire reads, all of them."""

from __future__ import annotations

import os
from pathlib import Path

# name -> what it does
VARIABLES = {
    "QUIRE_ISA": "force an instruction set of the kernels: baseline, avx2 or avx512",
    "QUIRE_CACHE_DIR": "folder for what can be made again: packed weights (default: XDG_CACHE_HOME/quire)",
}


def isa() -> str:
    """The forced instruction set, or "" for the best of the machine."""
    return os.environ.get("QUIRE_ISA", "")


def cache_folder() -> Path | None:
    """Where to keep what can be made again: QUIRE_CACHE_DIR, or quire/ in the user's cache folder (XDG).

    None when the environment names neither and the user has no home.
    """
    chosen = os.environ.get("QUIRE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification: relative ones are to be ignored
        base = os.path.expanduser("~/.cache")
    return Path(base, "quire") if os.path.isabs(base) else None
