"""What the store knows of a model: where it is from, and its files by content."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec

from quire.types import CheckpointError
from quire.util.strict_json import read_small_file

MAX_BYTES = 16 * 2**20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a model. `promised` is the digest of its source as "sha256:…", or "git:…" (the id of a git blob).

    `sha256` is "" until the file has arrived. `modified` (ns) is that of the blob: another time means that somebody
    wrote to it.
    """

    name: str
    size: int
    promised: str = ""
    sha256: str = ""
    modified: int = 0

    @property
    def key(self) -> str:
        """What identifies the content, also before it has arrived."""
        return self.sha256 or self.promised.removeprefix("sha256:").replace(":", "-")


class Manifest(msgspec.Struct, frozen=True):
    """A model of the store, under the name that a person typed. `entry` is its GGUF file, "" for a folder.

    `source` is the address of the repository, or a path; `commit` is what its revision was; `pulled` is in seconds
    since 1970.
    """

    reference: str
    source: str
    files: tuple[StoredFile, ...]
    commit: str = ""
    licence: str = ""
    entry: str = ""
    pulled: float = 0.0

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def filled(self, have: Mapping[str, StoredFile]) -> Manifest:
        """The manifest with what is known of files that are here, by promised digest."""
        files = (
            msgspec.structs.replace(file, sha256=found.sha256, modified=found.modified)
            if (found := have.get(file.promised)) is not None
            else file
            for file in self.files
        )
        return msgspec.structs.replace(self, files=tuple(files))

    def contents(self) -> set[str]:
        """What identifies the contents of its files."""
        return {file.key for file in self.files}


def read_manifest(path: Path) -> Manifest:
    """Raises CheckpointError naming the file and what is wrong with it."""
    try:
        found = msgspec.json.decode(read_small_file(path, MAX_BYTES), type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: not a manifest of the store: {error}") from None
    for file in found.files:
        check_file_name(file.name)
        if file.sha256 and not _SHA256.fullmatch(file.sha256):
            raise CheckpointError(f"{path}: {file.name}: sha256 is not a digest")
    return found


def check_file_name(name: str) -> None:
    """Raises CheckpointError for a name that is not a plain path below its folder."""
    path = PurePosixPath(name)
    if not name or not name.isprintable() or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise CheckpointError(f"{name!r}: not a name of a model's file")


def now() -> float:
    """The time of a manifest, in seconds since 1970."""
    return round(time.time(), 3)
