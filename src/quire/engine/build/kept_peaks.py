"""The limits of this machine, as `quire bench limits` measured them, kept in the cache folder.

A server knows then what share of them its steps reach. Measuring takes seconds and a large arena, so no server does it
itself.
"""

from __future__ import annotations

import contextlib
import json
import platform
from hashlib import blake2b
from pathlib import Path

from quire.config import env
from quire.engine.build.kept_costs import processor
from quire.program.step_work import MachinePeaks
from quire.util.files import written_anew

_VERSION, _MOST_BYTES = 1, 4096


def load_peaks(isa: str, threads: int) -> MachinePeaks | None:
    """The limits for an instruction set and a number of threads; None if they were not measured."""
    path = _place(isa, threads)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            stored = json.loads(file.read(_MOST_BYTES))
        peaks = MachinePeaks(
            float(stored["bandwidth"]), {str(k): float(v) for k, v in stored["flops"].items()}
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    positive = all(0 < each < 1e18 for each in (peaks.bandwidth, *peaks.flops.values()))
    return peaks if positive and stored.get("version") == _VERSION else None


def keep_peaks(peaks: MachinePeaks, isa: str, threads: int) -> None:
    """Write them for servers that start from now on. A folder that cannot be written leaves them without."""
    path = _place(isa, threads)
    if path is None:
        return
    data = json.dumps({"version": _VERSION, "bandwidth": peaks.bandwidth, "flops": dict(peaks.flops)})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with written_anew(path) as file:
            file.write(data.encode())


def _place(isa: str, threads: int) -> Path | None:
    folder = env.cache_folder()
    what = json.dumps([platform.node(), processor(), isa, threads]).encode()
    return None if folder is None else folder / "limits" / f"{blake2b(what, digest_size=8).hexdigest()}.json"
