"""The recorder of an engine, as its options ask for."""

from __future__ import annotations

import os
from pathlib import Path

from quire.config.schema import EngineConfig
from quire.core.cost_model import StepCostModel
from quire.core.scheduler_config import SchedulerConfig
from quire.steplog.log_files import LogFile
from quire.steplog.recorder import FILE_MEMORY_BYTES, MEMORY_BYTES, Recorder
from quire.util.platform import usable_cores


def make_recorder(
    scheduler: SchedulerConfig, asked: EngineConfig, costs: StepCostModel, model: str
) -> Recorder:
    """The recorder of an engine that begins with these costs. Raises LogError for a file that cannot be written."""
    options = asked.recording
    file = None if options.record is None else LogFile(Path(options.record), options.record_size)
    return Recorder(
        scheduler,
        file=file,
        prompts=options.record_prompts,
        classes=" ".join(asked.scheduler.slo),
        model=model,
        batching=asked.scheduler.batching,
        swap=asked.cache.swap_space is not None or asked.cache.kv_tiers is not None,
        costs=costs.weights,
        cpus=_shared_cpus(asked),
    )


def _shared_cpus(asked: EngineConfig) -> int:
    """The processors that this process shares with all others. 0 where the CPU times of a step do not tell of an
    engine: its ranks have processes of their own, or it may not use all processors, whose time is counted together."""
    cores = usable_cores()
    return cores if asked.parallel.ranks == 1 and cores == os.cpu_count() else 0


def recorder_bytes(asked: EngineConfig) -> int:
    """What a recorder may hold."""
    return MEMORY_BYTES + (FILE_MEMORY_BYTES if asked.recording.record is not None else 0)
