"""Ollama's models on this machine, read in place.

Its folder has manifests/HOST/NAMESPACE/MODEL/TAG, JSON with the layers of a model (an OCI image manifest), and
blobs/sha256-DIGEST (https://github.com/ollama/ollama/blob/main/docs/faq.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from quire.store.manifests import Manifest, StoredFile
from quire.store.references import ModelReference
from quire.types import CheckpointError
from quire.util.strict_json import JsonObject, read_json_object

_MAX_BYTES = 2**20
_MEDIA = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
# Layers that change what the model computes, and that the one GGUF file does not have.
_REFUSED = {"adapter": "a LoRA adapter", "tensor": "weights in safetensors"}
_USUAL = ("registry.ollama.ai/", "library/")


class OllamaStore:
    """The models in `folder`: that of OLLAMA_MODELS, of the user, or of the system's service."""

    def __init__(self, folder: Path | None = None) -> None:
        chosen = os.environ.get("OLLAMA_MODELS")
        usual = (Path("~/.ollama/models").expanduser(), Path("/usr/share/ollama/.ollama/models"))
        places = [folder] if folder else [Path(chosen)] if chosen else usual
        self.folder = next((place for place in places if os.access(place / "manifests", os.R_OK)), None)

    def all(self) -> Iterator[tuple[Manifest, str]]:
        """The models by name, each with what keeps Quire from running it, or ""."""
        for name, path in sorted(self._manifests().items()):
            try:
                yield self._read(name, path), ""
            except CheckpointError as error:
                yield Manifest(name, self._source, (), pulled=path.stat().st_mtime), str(error)

    def find(self, reference: ModelReference) -> Manifest | None:
        """A model by Ollama's name, or None. Raises CheckpointError for one that Quire cannot read."""
        name = f"{reference.name}:{reference.tag or 'latest'}".lower()
        known = {key.lower(): path for key, path in self._manifests().items()}
        if reference.revision or name not in known:
            return None
        return self._read(name, known[name])

    def path(self, manifest: Manifest) -> Path:
        """The GGUF file of a model: a blob, whose name has no ending."""
        assert self.folder is not None, "the manifest is of this folder"
        (file,) = manifest.files
        return self.folder / "blobs" / f"sha256-{file.sha256}"

    @property
    def _source(self) -> str:
        return f"ollama: {self.folder}"

    def _manifests(self) -> dict[str, Path]:
        return dict(self._walk()) if self.folder is not None else {}

    def _walk(self) -> Iterator[tuple[str, Path]]:
        assert self.folder is not None
        top = self.folder / "manifests"
        for path in sorted(top.glob("*/*/*/*")):
            if path.is_file() and not path.name.startswith("."):
                name = path.parent.relative_to(top).as_posix()
                for usual in _USUAL:
                    name = name.removeprefix(usual)
                yield f"{name}:{path.name}", path

    def _read(self, name: str, path: Path) -> Manifest:
        layers = read_json_object(path, _MAX_BYTES).get("layers")
        if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
            raise CheckpointError(f"{path}: layers: expected a list of objects")
        models, licence = [], ""
        for layer in layers:
            kind = str(layer.get("mediaType")).removeprefix(_MEDIA)
            if kind in _REFUSED:
                raise CheckpointError(
                    f"{name}: Ollama's model has {_REFUSED[kind]}, which Quire does not read"
                )
            if kind == "model":
                models.append(self._file(path, name, layer))
            if kind == "license":
                licence = licence or "in Ollama's store"
        if len(models) != 1:
            raise CheckpointError(f"{name}: Ollama's model has {len(models)} GGUF files instead of one")
        return Manifest(
            name, self._source, (models[0],), licence=licence, entry=models[0].name,
            pulled=path.stat().st_mtime,
        )  # fmt: skip

    def _file(self, path: Path, name: str, layer: JsonObject) -> StoredFile:
        digest, size = _DIGEST.fullmatch(str(layer.get("digest"))), layer.get("size")
        if digest is None or not isinstance(size, int):
            raise CheckpointError(f"{path}: layers: a model without digest and size")
        assert self.folder is not None
        blob = self.folder / "blobs" / f"sha256-{digest[1]}"
        if not blob.is_file() or blob.stat().st_size != size:
            raise CheckpointError(
                f"{name}: {blob} is not the file of {size} bytes that Ollama's manifest names"
            )
        file = re.sub(r"[^\w.-]", "-", name) + ".gguf"
        return StoredFile(file, size, digest[0], digest[1], blob.stat().st_mtime_ns)
