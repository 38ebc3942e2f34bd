"""What a repository of a hub contains, and which of its files are a model."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, quote_plus

from quire.records import dataclass
from quire.store.gguf_names import choose_gguf, gguf_models, listed, part_names
from quire.store.hub_client import HubClient, HubError
from quire.store.manifests import Manifest, StoredFile, check_file_name, now
from quire.store.references import ModelReference
from quire.types import CheckpointError
from quire.util.sizes import format_size

# Files of a text model. Weights of other frameworks and formats are never downloaded.
ALLOWED = ["*.json", "*.jinja", "*.txt", "tokenizer*", "*.tiktoken", "model*.safetensors"]
IGNORED = ["*/*"]  # subfolders contain other formats (original/, onnx/)
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
MAX_FILES = 20_000
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit, with all its files."""

    name: str
    commit: str
    licence: str
    files: tuple[StoredFile, ...]


def read_repository(client: HubClient, reference: ModelReference) -> Repository:
    """Ask a hub for a repository. Raises CheckpointError, HubError with names that are near if there is none."""
    revision = quote(reference.revision or "main", safe="")
    base = f"api/models/{reference.name}"
    try:
        facts, _ = client.values(f"{base}/revision/{revision}")
    except HubError as error:
        near = "" if error.code in {"GatedRepo", "RevisionNotFound"} else _near(client, reference.name)
        page = f"{client.endpoint}/{reference.name}"
        raise HubError(f"{reference}: {page}: {error}{near}", error.status, error.code) from None
    if not isinstance(facts, dict) or not _COMMIT.fullmatch(commit := str(facts.get("sha"))):
        raise _unexpected(client, "sha")
    files = tuple(_files(client, f"{base}/tree/{commit}?recursive=true"))
    card = facts.get("cardData")
    licence = card.get("license", "") if isinstance(card, dict) else ""
    name = facts.get("id")  # of another case, or after it was renamed
    return Repository(
        name if isinstance(name, str) else reference.name, commit, str(licence or "")[:100], files
    )


def planned(client: HubClient, repository: Repository, reference: ModelReference) -> Manifest:
    """The files of a model among those of its repository. Raises CheckpointError naming what there is instead."""
    by_name = {file.name: file for file in repository.files}
    entry = ""
    if reference.tag:
        refusal = (
            f"{reference}: {{}} among the GGUF models of {client.endpoint}/{repository.name}, which has {{}}"
        )
        entry = choose_gguf(sorted(by_name), reference.tag, refusal)
    else:
        names = model_files(list(by_name))
        if not any(name.endswith(".safetensors") for name in names):
            entry, names = _only_gguf(repository, reference), []
    if entry:
        folder, parts = PurePosixPath(entry).parent, part_names(PurePosixPath(entry).name)
        names = [(folder / part).as_posix() for part in parts]
        if missing := [name for name in names if name not in by_name]:
            raise CheckpointError(f"{reference}: {missing[0]} is missing in the repository")
    return Manifest(
        str(reference), f"{client.endpoint}/{repository.name}", tuple(by_name[name] for name in names),
        repository.commit, repository.licence, entry, now(),
    )  # fmt: skip


def model_files(names: Sequence[str]) -> list[str]:
    """The files of a model among all: configuration, tokenizer, safetensors. Nothing that needs pickle."""
    return [
        name
        for name in names
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in ALLOWED)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in IGNORED)
    ]


def _only_gguf(repository: Repository, reference: ModelReference) -> str:
    models = gguf_models(sorted(file.name for file in repository.files))
    if not models:
        other = [file.name for file in repository.files if file.name.endswith(_OTHER_WEIGHTS)]
        why = f"; it has {listed(other)}, formats that Quire does not load" if other else ""
        raise CheckpointError(f"{reference}: the repository has no weights in safetensors or GGUF{why}")
    if len(models) > 1:
        sizes = {file.name: file.size for file in repository.files}
        shown = listed([f"{name} ({format_size(sizes[name])})" for name in models])
        raise CheckpointError(
            f"{reference}: the repository has {len(models)} GGUF models: choose one by type or name, as in"
            f" {reference.name}:Q4_K_M or --quantization Q4_K_M: {shown}"
        )
    return models[0]


def _files(client: HubClient, page: str) -> Iterator[StoredFile]:
    following: str | None = page
    count = 0
    while following is not None:
        entries, following = client.values(following)
        if not isinstance(entries, list):
            raise _unexpected(client, "tree")
        for entry in entries:
            if not isinstance(entry, dict):
                raise _unexpected(client, "tree")
            if entry.get("type") != "file":
                continue
            count += 1
            if count > MAX_FILES:
                raise CheckpointError(f"{client.endpoint}: a repository of more than {MAX_FILES} files")
            yield _file(client, entry)


def _file(client: HubClient, entry: dict[str, Any]) -> StoredFile:
    """A file of a listing, with the digest that its content must have."""
    lfs = entry.get("lfs")
    kind, facts = ("sha256", lfs) if isinstance(lfs, dict) else ("git", entry)
    name, size, digest = entry.get("path"), facts.get("size"), facts.get("oid")
    if not isinstance(name, str) or not isinstance(size, int) or size < 0 or not isinstance(digest, str):
        raise _unexpected(client, "tree: path, size or oid")
    digest = digest.removeprefix("sha256:")
    if not _DIGEST.fullmatch(digest) or (kind == "sha256") != (len(digest) == 64):
        raise _unexpected(client, "tree: oid")
    check_file_name(name)
    return StoredFile(name, size, f"{kind}:{digest}")


def _near(client: HubClient, name: str) -> str:
    """ " (near: …)" with names of the hub that are like one that it does not have."""
    try:
        found, _ = client.values(f"api/models?search={quote_plus(name.rpartition('/')[2])}&limit=20")
    except CheckpointError:
        return ""
    names = (
        [str(entry.get("id")) for entry in found if isinstance(entry, dict)]
        if isinstance(found, list)
        else []
    )
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f" (near: {', '.join(near)})" if near else ""


def _unexpected(client: HubClient, field: str) -> CheckpointError:
    return CheckpointError(
        f"{client.endpoint}: {field}: the answer is not that of a hub; is HF_ENDPOINT right?"
    )
