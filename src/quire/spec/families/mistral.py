"""Mistral and Ministral dense text models."""

from __future__ import annotations

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import Defaults, decoder, layer_count, window_size, windows_of_types
from quire.spec.model import ModelSpec

_DEFAULTS = Defaults(max_positions=4096 * 32, kv_heads=8)


def mistral(config: ConfigReader) -> ModelSpec:
    """`sliding_window` (missing: 4096, null: none) applies to every layer unless there are `layer_types`."""
    window = window_size(config, _DEFAULTS)
    windows = windows_of_types(config, window)
    return decoder(config, _DEFAULTS, windows or [window] * layer_count(config))
