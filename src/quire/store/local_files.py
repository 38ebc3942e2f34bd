"""Take files of this machine into the store: shared with their owner where the file system can, else copied."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.store.manifests import StoredFile
from quire.store.partial_blob import digests
from quire.types import CheckpointError
from quire.util.files import open_regular

_FICLONE = 0x40049409  # of linux/fs.h: the clone shares blocks until one side writes


def verified(path: Path, file: StoredFile, read: Callable[[int], None] | None = None) -> StoredFile | None:
    """The file with the content of `path`, or None if that is not what was promised.

    A file without a promise takes any content. Raises CheckpointError if it cannot be read, or changes meanwhile.
    """
    try:
        with open_regular(path) as opened:
            before = os.fstat(opened.fileno())
            sha256, found = digests(opened.fileno(), before.st_size, file.promised, read)
            after = os.fstat(opened.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise CheckpointError(f"{path}: the file changed while it was read")
    if file.promised and (file.promised, file.size) != (found, before.st_size):
        return None
    return msgspec.structs.replace(file, size=before.st_size, sha256=sha256, modified=before.st_mtime_ns)


def share(path: Path, blob: Path, scratch: Path) -> int:
    """Make a blob of a file: a clone, a hard link, or a copy. Returns the blob's time (ns).

    `scratch` is a folder on the disk of the blob.
    """
    unfinished = scratch / f".{blob.name}.{os.getpid()}"
    try:
        unfinished.unlink(missing_ok=True)
        if not _clone(path, unfinished):
            try:
                os.link(path.resolve(), unfinished)
            except OSError:  # another file system, or not ours
                shutil.copyfile(path, unfinished)
        modified = unfinished.stat().st_mtime_ns
        unfinished.replace(blob)
        return modified
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}: {blob.parent}") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _clone(path: Path, new: Path) -> bool:
    try:
        with path.open("rb") as source, new.open("wb") as clone:
            fcntl.ioctl(clone.fileno(), _FICLONE, source.fileno())
        return True
    except OSError:
        new.unlink(missing_ok=True)
        return False
