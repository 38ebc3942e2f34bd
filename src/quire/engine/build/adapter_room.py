"""Room for the adapters that an engine begins with: their ranks, and what they change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quire.config.schema import EngineConfig
from quire.config.shipped import shipped_adapters
from quire.spec import ModelSpec

if TYPE_CHECKING:
    from quire.lora.adapter import Adapter


def with_room_for(config: EngineConfig, adapters: Iterable[str | Adapter], spec: ModelSpec) -> EngineConfig:
    """Options with the rank and the modules of these adapters (paths, names or numbers) of a model, where they are not
    given.

    Raises CheckpointError or UnsupportedModelError for a file whose header cannot be read or is of another base.
    """
    asked = config.adapters
    if not asked.enable_lora or (asked.max_lora_rank is not None and asked.lora_target_modules):
        return config
    shipped = shipped_adapters()  # they need no more than every engine with adapters has
    given = [each for each in adapters if not (isinstance(each, str) and each in shipped)]
    if not given:
        return config
    from quire.lora.read import room_of

    rank, targets = room_of(given, spec)
    return config.replace(
        max_lora_rank=asked.max_lora_rank or max(asked.rank, rank),
        lora_target_modules=asked.lora_target_modules or targets,
    )
