"""Configuration: asked for (schema), decided once (resolve), frozen afterwards."""

from quire.config.schema import EngineConfig, ResolvedConfig

__all__ = ["EngineConfig", "ResolvedConfig"]
