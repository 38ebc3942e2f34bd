"""All environment variables that Quire reads."""

from __future__ import annotations

import os
import re
from pathlib import Path

# name -> meaning
VARIABLES = {
    "QUIRE_ISA": "force an instruction set of the kernels: baseline, avx2 or avx512",
    "QUIRE_CACHE_DIR": "cache folder for packed weights and tokenizers (default: XDG_CACHE_HOME/quire)",
    "QUIRE_STORE": "folder of pulled models (default: XDG_DATA_HOME/quire/models)",
    "QUIRE_RANK_SECRET": "what ranks that a launcher has started have to know: 16 bytes or more",
    "QUIRE_STORE_LIMIT": "most bytes of that folder, such as 50GiB, where --store-limit is not given",
}
# The others are options of commands: QUIRE_MAX_MODEL_LEN is --max-model-len.
OPTION_PREFIX = "QUIRE_"
# Variables that Kubernetes sets in every pod for a service named quire (QUIRE_PORT=tcp://10.0.0.7:8000).
_SERVICE_LINK = re.compile(r"QUIRE_(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*)")


def isa() -> str:
    """The forced instruction set, or "" for the best of the machine."""
    return os.environ.get("QUIRE_ISA", "")


def option_variables() -> dict[str, str]:
    """The variables that are set and may be options of a command."""
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(OPTION_PREFIX)
        and name not in VARIABLES
        and not _SERVICE_LINK.fullmatch(name)
        and not (name == "QUIRE_PORT" and "://" in text)
    }


def cache_folder() -> Path | None:
    """The cache folder: QUIRE_CACHE_DIR, or quire/ in the user's cache folder (XDG).

    None if neither is set and the user has no home.
    """
    chosen = os.environ.get("QUIRE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = _base_folder("XDG_CACHE_HOME", "~/.cache")
    return base and base / "quire"


def store_folder() -> Path | None:
    """The folder of pulled models: QUIRE_STORE, or quire/models/ in the user's data folder (XDG).

    None if neither is set and the user has no home.
    """
    chosen = os.environ.get("QUIRE_STORE")
    if chosen:
        return Path(chosen).absolute()
    base = _base_folder("XDG_DATA_HOME", "~/.local/share")
    return base and base / "quire" / "models"


def state_folder(name: str) -> Path | None:
    """A folder of what a command keeps while it runs: quire/NAME in the user's folder for state (XDG), or None."""
    base = _base_folder("XDG_STATE_HOME", "~/.local/state")
    return base and base / "quire" / name


def _base_folder(variable: str, usual: str) -> Path | None:
    base = os.environ.get(variable, "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.path.expanduser(usual)
    return Path(base) if os.path.isabs(base) else None
