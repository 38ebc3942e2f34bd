"""The models that ship with Quire as package data: what runs when no model is named."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = "quire-mini"
_FOLDER = Path(__file__).parent.parent / "models"


def shipped_models() -> dict[str, Path]:
    """Name -> checkpoint folder of every model in the package."""
    return {config.parent.name: config.parent for config in sorted(_FOLDER.glob("*/config.json"))}


def shipped_adapters(model: str = DEFAULT_MODEL) -> dict[str, Path]:
    """Name -> folder, in the form that PEFT reads, of every LoRA adapter of a shipped model."""
    found = sorted((_FOLDER / f"{model}-adapters").glob("*/adapter_config.json"))
    return {config.parent.name: config.parent for config in found}
