"""From what a user names as a model to a folder or a GGUF file: given, shipped with Quire, or from the hub."""

from __future__ import annotations

import re
from pathlib import Path

from quire.loader.gguf_source import single_gguf
from quire.loader.shipped import shipped_models
from quire.types import CheckpointError

# What a text model needs. Weights of other frameworks and formats are never fetched.
ALLOWED = ["*.json", "*.jinja", "*.txt", "tokenizer*", "*.tiktoken", "model*.safetensors"]
IGNORED = ["*/*"]  # subfolders hold other formats (original/, onnx/)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)


def resolve_model(model: str | Path, *, revision: str | None = None) -> Path:
    """The folder or .gguf file of a model: `model` itself, a shipped model's, or a snapshot of that hub repository.

    An existing path always wins; a folder that has one GGUF model and no config.json stands for that file. Then
    come the names of `shipped_models`. Another name of the form "name" or "organisation/name" is looked up with
    huggingface_hub, which uses its cache, downloads what is missing (weights as safetensors only), and honours
    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN. `revision` is a branch, tag or commit.

    Raises CheckpointError when neither works, with both reasons.
    """
    if not str(model):
        raise CheckpointError("no model was named")
    path = Path(model).expanduser()
    if path.is_dir():
        gguf = None if (path / "config.json").exists() else single_gguf(path)
        return gguf or path
    if path.exists():
        if path.suffix == ".gguf":
            return path
        raise CheckpointError(
            f"{model}: a file; give a .gguf file, or the folder that holds config.json and model.safetensors"
        )
    name = str(model)
    shipped = shipped_models()
    if name in shipped:
        return shipped[name]
    if not _REPOSITORY.fullmatch(name) or "--" in name or ".." in name:
        raise CheckpointError(f"{model}: no such folder, and not a hub name of the form organisation/name")
    return _snapshot(name, revision)


def _snapshot(name: str, revision: str | None) -> Path:
    # Imported here: a model in a local folder needs neither the package nor its start-up time.
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name}: no such folder, and the package huggingface_hub is not installed"
        ) from None
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=ALLOWED, ignore_patterns=IGNORED)
    except Exception as error:  # the edge to the network: errors of three HTTP libraries, no common base
        reason = str(error).strip().splitlines()
        detail = reason[0][:300] if reason else type(error).__name__
        raise CheckpointError(f"{name}: no such folder, and the hub did not give it: {detail}") from error
    return Path(folder)
