"""The models bundled with Quire as package data, including the default model."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = "quire-mini"
_FOLDER = Path(__file__).parent.parent / "models"


def shipped_models() -> dict[str, Path]:
    """Name -> checkpoint folder of every bundled model."""
    return {config.parent.name: config.parent for config in sorted(_FOLDER.glob("*/config.json"))}


def shipped_adapters(model: str = DEFAULT_MODEL) -> dict[str, Path]:
    """Name -> folder, in PEFT's format, of every LoRA adapter of a bundled model."""
    found = sorted((_FOLDER / f"{model}-adapters").glob("*/adapter_config.json"))
    return {config.parent.name: config.parent for config in found}
