"""The file of a calibrated cache that codes of keys and values go by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.cache_kinds import NUQ_KV
from quire.config.schema import (
    ResolvedConfig,
)
from quire.engine.build.opening import Model
from quire.loader.kv_codes import read_codes_file
from quire.program.formats import HeadCodes
from quire.spec import Attention, LatentAttention

if TYPE_CHECKING:
    pass


def kv_codes(model: Model, config: ResolvedConfig) -> dict[int, HeadCodes]:
    """What codes of a kvquant3 cache stand for. Raises CheckpointError, and ValueError if no file was named."""
    if config.kv not in NUQ_KV or config.asked.loading.load_format == "random":
        return {}
    mixers = [layer.mixer for layer in model.facts.spec.layers]
    if any(isinstance(mixer, LatentAttention) for mixer in mixers):
        return {}  # lowering refuses it by name
    if not config.asked.formats.kv_cache_scales:
        raise ValueError(
            "kv_cache_dtype: kvquant3 needs kv_cache_scales, a file that `quire calibrate MODEL --kv-cache-dtype "
            "kvquant3 --out FILE` writes"
        )
    heads = {
        i: (each.kv_heads, each.head_dim) for i, each in enumerate(mixers) if isinstance(each, Attention)
    }
    return read_codes_file(Path(config.asked.formats.kv_cache_scales), heads)
