"""The cost model of a model on this machine, kept beside its packed weights from one run to the next."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from hashlib import blake2b
from pathlib import Path

from quire.config.schema import ResolvedConfig
from quire.core.cost_model import StepCostModel
from quire.engine.build.opening import kept_files
from quire.util.kept import DamagedError, KeptFiles

_MOST_BYTES = 4096
_ENOUGH = 512  # steps of a run that are worth keeping


def load_costs(model: Path, config: ResolvedConfig) -> StepCostModel:
    """The costs that the last run learned, or those of a guess."""
    place = _place(model, config)
    if place is None:
        return StepCostModel()
    kept, path = place
    try:
        with kept.opened(path) as file:
            if file is None:
                return StepCostModel()
            try:
                stored = json.loads(file.read(_MOST_BYTES))
                return StepCostModel.load(stored if isinstance(stored, dict) else {})
            except (ValueError, RecursionError):
                raise DamagedError("it has no costs") from None
    except DamagedError:
        return StepCostModel()


def keep_costs(costs: StepCostModel, model: Path, config: ResolvedConfig) -> None:
    """Write what this run has learned. A folder that cannot be written only costs the next run some steps."""
    place = _place(model, config) if costs.steps >= _ENOUGH else None
    if place is not None:
        kept, path = place
        data = json.dumps(costs.dump()).encode()
        with contextlib.suppress(OSError):
            kept.write(path, len(data), lambda fd: _write(fd, data)).join()


def _write(fd: int, data: bytes) -> None:
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)


def _place(model: Path, config: ResolvedConfig) -> tuple[KeptFiles, Path] | None:
    """Where costs are kept: by model, number formats, threads and machine."""
    asked = config.asked
    kept = kept_files(asked)
    if kept is None or asked.loading.load_format == "random":
        return None
    what = [str(model.resolve()), repr(asked.formats), str(config.threads), platform.node(), processor()]
    return kept, kept.folder / f"{blake2b(json.dumps(what).encode(), digest_size=16).hexdigest()}.costs"


def processor() -> str:
    """The name of the processor."""
    with (
        contextlib.suppress(OSError),
        Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines,
    ):
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
