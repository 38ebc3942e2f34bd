"""The folder of pulled models: files by content, a manifest for each name, and folders that the loader opens.

    blobs/SHA256            the files, each once
    manifests/NAME.json     what a name means
    pending/NAME.json       what a pull is fetching, or has left
    partial/DIGEST          a file that is arriving
    snapshots/NAME/DIGEST/  links to blobs under the names of the files

Changes hold one lock between processes. A killed process leaves nothing that a later call takes for a model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.config.env import store_folder
from quire.records import dataclass
from quire.store.manifests import Manifest, read_manifest
from quire.store.references import ModelReference
from quire.types import CheckpointError
from quire.util.files import written_anew
from quire.util.sizes import format_size

_ABANDONED = 86_400  # seconds after which nobody writes to an unfinished copy
SPARE_BYTES = 64 * 2**20  # disk space that a pull leaves free


@dataclass(frozen=True, slots=True)
class Freed:
    """What a removal freed on disk, and what remains of the model because others need it."""

    size: int
    files: int
    kept: int
    used_by: tuple[str, ...]


class ModelStore:
    """The store in `folder`: by default that of QUIRE_STORE, or of the user. Nothing is made before the first pull."""

    def __init__(self, folder: Path | None = None) -> None:
        chosen = folder or store_folder()
        if chosen is None:
            raise CheckpointError("no folder for models: set the environment variable QUIRE_STORE")
        self.folder = chosen
        self.blobs, self.partial = chosen / "blobs", chosen / "partial"
        self._manifests, self._pending, self._snapshots = (
            chosen / name for name in ("manifests", "pending", "snapshots")
        )

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock of the store. It is held briefly: never while a file is fetched or read.

        Raises CheckpointError where the block cannot write.
        """
        try:
            for folder in (self.blobs, self.partial, self._manifests, self._pending, self._snapshots):
                folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "lock").open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._sweep()
                yield
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise CheckpointError(f"{self.folder}: {reason}; QUIRE_STORE names another folder") from None

    def find(self, reference: ModelReference) -> Manifest | None:
        """The model of a name, or None. Raises CheckpointError if its manifest is damaged."""
        path = self._manifests / f"{reference.key}.json"
        return read_manifest(path) if path.is_file() else None

    def all(self) -> list[Manifest]:
        """The models by name."""
        return self._read(self._manifests)

    def pending(self) -> list[Manifest]:
        """What unfinished pulls fetch, by name."""
        return self._read(self._pending)

    def path(self, manifest: Manifest) -> Path:
        """The folder or GGUF file of a model, for the loader.

        Raises CheckpointError if a blob is missing, or was written to since the pull.
        """
        folder = self._snapshot(manifest)
        for file in manifest.files:
            try:
                status = (folder / file.name).stat()
            except OSError:
                problem = "is missing in the store"
            else:
                if (status.st_size, status.st_mtime_ns) == (file.size, file.modified):
                    continue
                problem = "was written to after it was verified"
            raise CheckpointError(
                f"{manifest.reference}: {file.name} {problem}; quire pull {manifest.reference} repairs it"
            )
        return folder / manifest.entry if manifest.entry else folder

    def known_files(self) -> dict[str, tuple[str, int, int]]:
        """SHA-256, size and time of the blobs that manifests describe, by SHA-256 and by promised digest."""
        found = {}
        for manifest in (*self.all(), *self.pending()):
            for file in manifest.files:
                if file.sha256:
                    content = file.sha256, file.size, file.modified
                    found[file.sha256] = content
                    found[file.promised] = content
        return found

    def used(self) -> int:
        """Bytes that blobs take, and those that unfinished pulls will."""
        there = _sizes(self.blobs)
        coming = {file.key: file.size for manifest in self.pending() for file in manifest.files}
        return sum((coming | there).values())

    def begin(self, manifest: Manifest, limit: int | None) -> None:
        """Note what a pull will fetch. Raises CheckpointError if it exceeds `limit` bytes or the free space."""
        with self.changing():
            there, arrived, known = _sizes(self.blobs), _allocated(self.partial), self.known_files()
            coming = {
                file.key: file.size
                for file in manifest.files
                if known.get(file.promised, (file.key,))[0] not in there
            }
            needed = sum(size - min(size, arrived.get(key, 0)) for key, size in coming.items())
            others = {
                file.key: file.size
                for other in self.pending()
                if other.reference != manifest.reference
                for file in other.files
            }
            used = sum((others | there).values())
            added = sum(size for key, size in coming.items() if key not in others)
            if limit is not None and used + added > limit:
                raise CheckpointError(
                    f"{manifest.reference}: {format_size(added)} more exceed --store-limit {format_size(limit)}:"
                    f" {format_size(used)} are used; quire rm frees some"
                )
            free = shutil.disk_usage(self.folder).free
            if needed and needed + SPARE_BYTES > free:
                raise CheckpointError(
                    f"{manifest.reference}: {format_size(needed)} more do not fit on the disk of {self.folder}:"
                    f" {format_size(free)} are free, and {format_size(SPARE_BYTES)} stay so"
                )
            self._note(manifest)

    def note(self, manifest: Manifest) -> None:
        """Note which files of a pull have arrived, beside those that another process has noted."""
        with self.changing():
            self._note(manifest)

    def finish(self, manifest: Manifest) -> Freed:
        """Make a pulled model the one of its name. Returns what the one before it has freed.

        Raises CheckpointError if a blob is gone because the name was removed meanwhile.
        """
        with self.changing():
            for file in manifest.files:
                if not (self.blobs / file.sha256).exists():
                    raise CheckpointError(
                        f"{manifest.reference}: {file.name} was removed during the pull; pull again"
                    )
            before = self.find(ModelReference.parse(manifest.reference))
            self._link(manifest)
            self._write(self._manifests, manifest)
            self._file(self._pending, manifest.reference).unlink(missing_ok=True)
            return self._release([before] if before else [], keep=manifest)

    def remove(self, reference: ModelReference, *, dry: bool = False) -> Freed:
        """Remove a model, or what an unfinished pull has left; `dry` only says what it would free.

        Raises CheckpointError if there is neither, or while another process pulls it.
        """
        with self.changing():
            paths = [folder / f"{reference.key}.json" for folder in (self._manifests, self._pending)]
            gone = [read_manifest(path) for path in paths if path.is_file()]
            if not gone:
                raise CheckpointError(f"{reference}: no such model in {self.folder}")
            if dry:
                return self._release(gone, dry=True)
            for key in {key for manifest in gone for key in manifest.contents()}:
                if _locked(self.partial / key):
                    raise CheckpointError(f"{reference}: another process is pulling it")
            for path in paths:
                path.unlink(missing_ok=True)
            freed = self._release(gone)
            shutil.rmtree(self._snapshots / _folder_name(reference), ignore_errors=True)
            return freed

    def _release(self, gone: list[Manifest], *, keep: Manifest | None = None, dry: bool = False) -> Freed:
        """Remove the snapshots and files of manifests that no other one needs."""
        names = {manifest.reference for manifest in gone} if keep is None else set()
        others = [other for other in (*self.all(), *self.pending()) if other.reference not in names]
        needed = {key: other.reference for other in others for key in other.contents()}
        size = files = 0
        shared = set()
        for key in {key for manifest in gone for key in manifest.contents()}:
            if key in needed:
                shared.add(key)
                continue
            for path in (self.blobs / key, self.partial / key):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if not dry:
                        path.unlink()
                    files += 1
                    size += status.st_blocks * 512 if status.st_nlink == 1 else 0
        for manifest in () if dry else gone:
            if keep is None or self._snapshot(manifest) != self._snapshot(keep):
                shutil.rmtree(self._snapshot(manifest), ignore_errors=True)
        return Freed(size, files, len(shared), tuple(sorted({needed[key] for key in shared})))

    def _snapshot(self, manifest: Manifest) -> Path:
        content = repr([(file.name, file.sha256) for file in manifest.files])
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        reference = ModelReference.parse(manifest.reference)
        return self._snapshots / _folder_name(reference) / digest

    def _link(self, manifest: Manifest) -> None:
        """Make the folder of a model: complete, or not at all."""
        folder = self._snapshot(manifest)
        if all((folder / file.name).is_file() for file in manifest.files):
            return  # somebody may be opening it
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        for old in (unfinished, folder):
            shutil.rmtree(old, ignore_errors=True)
        for file in manifest.files:
            link = unfinished / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(self.blobs / file.sha256, folder / Path(file.name).parent))
        unfinished.rename(folder)

    def _note(self, manifest: Manifest) -> None:
        path = self._file(self._pending, manifest.reference)
        noted = read_manifest(path).files if path.is_file() else ()
        known = {file.promised: file for file in (*noted, *manifest.files) if file.promised and file.sha256}
        self._write(self._pending, manifest.filled(known) if known else manifest)

    def _sweep(self) -> None:
        """Remove what killed processes were writing: under the lock nobody else writes manifests."""
        for folder in (self._manifests, self._pending):
            for path in folder.glob(".*.unfinished"):
                path.unlink(missing_ok=True)
        for path in self.partial.glob(".*"):  # shared files on their way to be blobs, which takes no lock
            with contextlib.suppress(OSError):
                if path.stat().st_ctime < time.time() - _ABANDONED:
                    path.unlink()

    def _read(self, folder: Path) -> list[Manifest]:
        found = []
        for path in sorted(folder.glob("*.json")):
            try:
                found.append(read_manifest(path))
            except CheckpointError:
                if path.exists():  # else it was removed just now
                    raise
        return found

    def _file(self, folder: Path, reference: str) -> Path:
        return folder / f"{ModelReference.parse(reference).key}.json"

    def _write(self, folder: Path, manifest: Manifest) -> None:
        with written_anew(self._file(folder, manifest.reference)) as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())


def _locked(path: Path) -> bool:
    """Whether a process is writing an arriving file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


def _folder_name(reference: ModelReference) -> str:
    return reference.key.replace("%2f", "--").replace("%2F", "--")


def _sizes(folder: Path) -> dict[str, int]:
    return {name: status.st_size for name, status in _files(folder)}


def _allocated(folder: Path) -> dict[str, int]:
    """Bytes on disk of sparse files."""
    return {name: status.st_blocks * 512 for name, status in _files(folder)}


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # it has just become a blob
            yield path.name, path.stat()
