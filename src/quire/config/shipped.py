"""The models bundled with Quire as package data, including the default model."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = "quire-mini"
_FOLDER = Path(__file__).parent.parent / "models"
_ADAPTERS = "-adapters"  # a model's adapters are in the folder beside it


def shipped_models() -> dict[str, Path]:
    """Name -> checkpoint folder of every bundled model."""
    return {config.parent.name: config.parent for config in sorted(_FOLDER.glob("*/config.json"))}


def shipped_adapters() -> dict[str, Path]:
    """Name, as quire-mini:pirate, -> folder in PEFT's format of every LoRA adapter of a bundled model."""
    found = sorted(_FOLDER.glob(f"*{_ADAPTERS}/*/adapter_config.json"))
    folders = [config.parent for config in found]
    return {f"{path.parent.name.removesuffix(_ADAPTERS)}:{path.name}": path for path in folders}
