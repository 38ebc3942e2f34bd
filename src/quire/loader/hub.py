"""From what a user names as a model to a folder or a GGUF file: given, shipped with Quire, or from the hub."""

from __future__ import annotations

import re
from pathlib import Path

from quire.config.shipped import shipped_models
from quire.loader.checkpoint import INDEX, SINGLE
from quire.loader.gguf_source import chosen_gguf, single_gguf
from quire.types import CheckpointError

# What a text model needs. Weights of other frameworks and formats are never fetched.
ALLOWED = ["*.json", "*.jinja", "*.txt", "tokenizer*", "*.tiktoken", "model*.safetensors"]
IGNORED = ["*/*"]  # subfolders hold other formats (original/, onnx/)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
# organisation/name:Q4_K_M, organisation/name:file.gguf, organisation/name/file.gguf (also in a folder of its own)
_CHOICE = re.compile(r"([\w.-]{1,96}/[\w.-]{1,96})(?::([\w./-]{1,200})|/([\w./-]{1,200}\.gguf))", re.ASCII)


def resolve_model(model: str | Path, *, revision: str | None = None) -> Path:
    """The folder or .gguf file of a model: `model` itself, a shipped model's, or a snapshot of that hub repository.

    An existing path always wins; a folder that has one GGUF model and no safetensors stands for that file. Then
    come the names of `shipped_models`. Another name of the form "name" or "organisation/name" is looked up with
    huggingface_hub, which uses its cache, downloads what is missing (weights as safetensors only), and honours
    HF_HUB_OFFLINE, HF_HOME and HF_TOKEN. A GGUF file of a repository is chosen by its name or its type,
    "organisation/name:Q4_K_M", among those that are in the cache. `revision` is a branch, tag or commit.

    Raises CheckpointError when neither works, with both reasons.
    """
    if not str(model):
        raise CheckpointError("no model was named")
    path = Path(model).expanduser()
    if path.is_dir():
        return _of_folder(path)
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
    choice = None if _is_here(name) else _CHOICE.fullmatch(name)
    if choice is not None and ".." not in name and "--" not in choice[1]:
        return chosen_gguf(_snapshot(choice[1], revision, cached=True), choice[2] or choice[3], choice[1])
    if _means_a_path(name):
        raise CheckpointError(f"{model}: no such file or folder")
    if not _REPOSITORY.fullmatch(name) or "--" in name or ".." in name:
        raise CheckpointError(
            f"{model}: no such file or folder, and not a hub name of the form organisation/name"
        )
    return _of_folder(_snapshot(name, revision))


def _means_a_path(name: str) -> bool:
    """Whether a name is a path's and not a repository's."""
    return (
        name.startswith(("/", "./", "../", "~"))
        or name.endswith(("/", ".gguf", ".safetensors"))
        or name.count("/") > 1
        or _is_here(name)
    )


def _is_here(name: str) -> bool:
    """Whether the first folder of a path exists."""
    first, slash, _ = name.partition("/")
    return bool(slash and first) and Path(first).is_dir()


def _of_folder(folder: Path) -> Path:
    """The folder, or its one GGUF model when it has no other weights."""
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return folder
    return single_gguf(folder) or folder


def _snapshot(name: str, revision: str | None, *, cached: bool = False) -> Path:
    """A repository's folder in the cache; with `cached` as it is there, all files of it."""
    # Imported here: a model in a local folder needs neither the package nor its start-up time.
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name}: no such file or folder, and the package huggingface_hub is not installed"
        ) from None
    options = (
        {"local_files_only": True} if cached else {"allow_patterns": ALLOWED, "ignore_patterns": IGNORED}
    )
    try:
        folder = snapshot_download(name, revision=revision, **options)
    except Exception as error:  # the edge to the network: errors of three HTTP libraries, no common base
        reason = str(error).strip().splitlines()
        detail = reason[0][:300] if reason else type(error).__name__
        if cached:
            raise CheckpointError(
                f"{name}: no such file, and GGUF files of the hub are taken from its local cache only: {detail}"
            ) from error
        raise CheckpointError(
            f"{name}: no such file or folder, and the hub did not give a repository of that name: {detail}"
        ) from error
    return Path(folder)
