"""Configuration: requested (schema), decided once (resolve), then frozen."""

from quire.config.schema import EngineConfig, ResolvedConfig

__all__ = ["EngineConfig", "ResolvedConfig"]
