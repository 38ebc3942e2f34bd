"""Pull a model into the store: from a hub, or from a folder or GGUF file of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock

import msgspec

from quire.records import dataclass
from quire.store.fetching_files import FileFetcher
from quire.store.gguf_names import shards, single_gguf
from quire.store.hub_client import HubClient
from quire.store.hub_listing import model_files, planned, read_repository
from quire.store.local_files import share, verified
from quire.store.manifests import Manifest, StoredFile, now
from quire.store.model_store import Freed, ModelStore
from quire.store.references import ModelReference
from quire.types import CheckpointError

CONNECTIONS = 4
MAX_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class PullOptions:
    """`limit`: bytes that the store may have; `progress` gets (done, total) in bytes, `tell` lines for the user."""

    connections: int
    limit: int | None
    progress: Callable[[int, int], None]
    tell: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pulled model: where it is, how many bytes were fetched, and what its version before has freed."""

    manifest: Manifest
    path: Path
    fetched: int
    seconds: float
    freed: Freed


def pull(store: ModelStore, reference: ModelReference, options: PullOptions) -> Pulled:
    """Bring a model of the hub into the store, or up to date. What an earlier pull has left is used.

    HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are those of huggingface_hub; files of its cache are taken from there.

    Raises CheckpointError: no such model, no permission, no room, no connection, wrong bytes.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{reference}: not in the store, and HF_HUB_OFFLINE forbids to ask the hub")
    begun = time.monotonic()
    client = HubClient(constants.ENDPOINT, get_token(), options.tell)
    repository = read_repository(client, reference)
    manifest = planned(client, repository, reference)
    store.begin(manifest, options.limit)
    cache = Path(constants.HF_HUB_CACHE, f"models--{repository.name.replace('/', '--')}", "blobs")
    have = _present(store, manifest.files, cache, options.tell)
    missing = {file.promised: file for file in manifest.files if file.promised not in have}

    noting = Lock()

    def arrived(file: StoredFile) -> None:
        with noting:
            have[file.promised] = file
            store.note(manifest.filled(have))

    fetcher = FileFetcher(store, client, manifest, options.connections, options.tell, arrived)
    fetcher.run(list(missing.values()), options.progress)
    return _finished(store, manifest.filled(have), fetcher.fetched, begun)


def pull_local(store: ModelStore, path: Path, reference: ModelReference, options: PullOptions) -> Pulled:
    """Bring a folder or a GGUF file of this machine into the store. Its files are shared where that is possible.

    Raises CheckpointError: no model, no room, unreadable files.
    """
    begun = time.monotonic()
    folder, names, entry = _local_model(path)
    total, done = sum((folder / name).stat().st_size for name in names), 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        options.progress(min(done, total), total)

    files = []
    for name in names:
        file = verified(folder / name, StoredFile(name, 0), read)
        assert file is not None, "no content was promised"
        files.append(file)
    manifest = Manifest(str(reference), str(path.absolute()), tuple(files), entry=entry, pulled=now())
    store.begin(manifest, options.limit)
    shared = {}
    for file in files:
        blob = store.blobs / file.sha256
        known = _trusted(store, file, store.known_files(), options.tell)
        modified = known.modified if known else share(folder / file.name, blob, store.partial)
        if (folder / file.name).stat().st_mtime_ns != file.modified:
            raise CheckpointError(f"{folder / file.name}: the file changed while it was read")
        shared[file.name] = msgspec.structs.replace(file, modified=modified)
    manifest = msgspec.structs.replace(manifest, files=tuple(shared.values()))
    return _finished(store, manifest, 0, begun)


def _finished(store: ModelStore, manifest: Manifest, fetched: int, begun: float) -> Pulled:
    freed = store.finish(manifest)
    return Pulled(manifest, store.path(manifest), fetched, time.monotonic() - begun, freed)


def _present(
    store: ModelStore, files: Iterable[StoredFile], cache: Path, tell: Callable[[str], None]
) -> dict[str, StoredFile]:
    """The files whose content is in the store, or in huggingface_hub's cache of the repository, by promised digest."""
    known, have = store.known_files(), {}
    for file in files:
        found = _trusted(store, file, known, tell)
        cached = cache / file.promised.partition(":")[2]
        if found is None and cached.is_file():
            found = verified(cached, file)
            if found is not None:
                modified = share(cached, store.blobs / found.sha256, store.partial)
                found = msgspec.structs.replace(found, modified=modified)
        if found is not None:
            have[file.promised] = found
    return have


def _trusted(
    store: ModelStore,
    file: StoredFile,
    known: dict[str, tuple[str, int, int]],
    tell: Callable[[str], None],
) -> StoredFile | None:
    """The file if its blob is as it was when it was verified, or is verified now. A wrong blob is removed."""
    kind, _, digest = file.promised.partition(":")
    noted = known.get(file.promised or file.sha256)
    sha256 = noted[0] if noted else file.sha256 or (digest if kind == "sha256" else "")
    blob = store.blobs / sha256
    if not sha256 or not blob.is_file():
        return None
    status = blob.stat()
    if noted == (sha256, status.st_size, status.st_mtime_ns):
        return msgspec.structs.replace(file, sha256=sha256, modified=status.st_mtime_ns)
    content = msgspec.structs.replace(file, size=status.st_size, promised=f"sha256:{sha256}")
    found = verified(blob, content)
    if found is None:
        tell(f"{file.name}: the blob in the store has been written to; replacing it")
        blob.unlink(missing_ok=True)
        return None
    return msgspec.structs.replace(file, sha256=sha256, modified=found.modified)


def _local_model(path: Path) -> tuple[Path, list[str], str]:
    """Folder, file names and GGUF file of a model on this machine."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: not a GGUF file; pull a .gguf file, or a folder with safetensors")
        return path.parent, [part.name for part in shards(path)], path.name
    names = model_files(sorted(file.name for file in path.iterdir() if file.is_file()))
    if any(name.endswith(".safetensors") for name in names):
        return path, names, ""
    found = single_gguf(path)
    if found is None:
        raise CheckpointError(f"{path}: a folder without weights in safetensors or GGUF")
    return path, [part.name for part in shards(found)], found.name
