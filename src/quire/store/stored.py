"""Find a model that is on this machine by its name: in the store, or in Ollama's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.env import store_folder
from quire.store.references import ModelReference
from quire.types import CheckpointError

if TYPE_CHECKING:
    from quire.store.manifests import Manifest
    from quire.store.model_store import ModelStore
    from quire.store.ollama_store import OllamaStore


def stored_model(name: str, revision: str | None = None) -> Path | None:
    """The folder or GGUF file of a pulled model, or of one of Ollama's; None if there is none of this name.

    Raises CheckpointError if the model is there but incomplete or changed.
    """
    found = _find(name, revision)
    return found and found[1].path(found[0])


def stored_manifest(name: str) -> Manifest | None:
    """What is known of a model of the store, or of one of Ollama's. Raises CheckpointError if that is damaged."""
    found = _find(name, None)
    return found and found[0]


def _find(name: str, revision: str | None) -> tuple[Manifest, ModelStore | OllamaStore] | None:
    try:
        reference = ModelReference.parse(name)
    except CheckpointError:
        return None  # other names may be paths
    if revision and not reference.revision:
        reference = ModelReference.parse(f"{name}@{revision}")
    folder = store_folder()
    if folder is not None and (folder / "manifests").is_dir():
        from quire.store.model_store import ModelStore

        store = ModelStore(folder)
        manifest = store.find(reference)
        if manifest is not None:
            return manifest, store
    from quire.store.ollama_store import OllamaStore

    models = OllamaStore()
    manifest = models.find(reference) if models.folder is not None else None
    return (manifest, models) if manifest is not None else None
