"""Resolve the name of a model to a folder or a GGUF file: a path, or a bundled, pulled or hub model."""

from __future__ import annotations

import re
from pathlib import Path

from quire.config.shipped import shipped_models
from quire.loader.checkpoint import INDEX, SINGLE
from quire.store.gguf_names import chosen_gguf, is_gguf, single_gguf
from quire.store.stored import stored_model
from quire.types import CheckpointError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
# organisation/name:Q4_K_M, organisation/name:file.gguf, organisation/name/file.gguf (also in a subfolder)
_CHOICE = re.compile(r"([\w.-]{1,96}/[\w.-]{1,96})(?::([\w./-]{1,200})|/([\w./-]{1,200}\.gguf))", re.ASCII)


def resolve_model(model: str | Path, *, revision: str | None = None) -> Path:
    """Return the folder or GGUF file of a model: a path, or by its name.

    An existing path has priority; a folder with one GGUF model and no safetensors means that file. Next are the names
    of `shipped_models`, of the store (`quire pull`), and of Ollama's models. Another name of the form "name" or
    "organisation/name" is looked up with huggingface_hub, which uses its cache, downloads missing files (weights as
    safetensors only), and honours HF_HUB_OFFLINE, HF_HOME and HF_TOKEN. A GGUF file of a repository is chosen by name
    or type, "organisation/name:Q4_K_M", from the cache. `revision` is a branch, tag or commit.

    Raises CheckpointError with both reasons if neither works.
    """
    if not str(model):
        raise CheckpointError("no model given")
    path = Path(model).expanduser()
    if path.is_dir():
        return _of_folder(path)
    if path.exists():
        if is_gguf(path):
            return path
        raise CheckpointError(
            f"{model}: not a GGUF file; pass a .gguf file, or the folder with config.json and model.safetensors"
        )
    name = str(model)
    shipped = shipped_models()
    if name in shipped:
        return shipped[name]
    stored = stored_model(name, revision)
    if stored is not None:
        return stored
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
    """Whether a name is a path and not a repository."""
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
    """The folder, or its GGUF model if it has no other weights."""
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return folder
    return single_gguf(folder) or folder


def _snapshot(name: str, revision: str | None, *, cached: bool = False) -> Path:
    """The folder of a repository in the cache; with `cached`, without downloading, and with all its files."""
    # Imported here, because a local model needs neither the package nor its import time.
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name}: no such file or folder, and the package huggingface_hub is not installed"
        ) from None
    from quire.store.hub_listing import ALLOWED, IGNORED

    options = (
        {"local_files_only": True} if cached else {"allow_patterns": ALLOWED, "ignore_patterns": IGNORED}
    )
    try:
        folder = snapshot_download(name, revision=revision, **options)
    except Exception as error:  # errors of three HTTP libraries, without a common base
        reason = str(error).strip().splitlines()
        detail = reason[0][:300] if reason else type(error).__name__
        if cached:
            raise CheckpointError(
                f"{name}: no such file, and GGUF files of the hub are only read from the local cache, or after"
                f" quire pull {name}: {detail}"
            ) from error
        raise CheckpointError(
            f"{name}: no such file or folder, and the hub returned no such repository: {detail}"
        ) from error
    return Path(folder)
