"""Files of clients on disk, each in the folder of its domain: an API key, or everyone if there is at most one key."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Literal

import msgspec

from quire.server.errors import ApiError
from quire.types import QuireError
from quire.util.files import UNFINISHED, written_anew
from quire.util.sizes import format_size

MAX_FILES = 10_000  # of a domain
_SHARED = "shared"


class FilesDirError(QuireError):
    """The folder of files cannot be used."""


class FileBody(msgspec.Struct, kw_only=True):
    """A file, as OpenAI describes it. Times are wall-clock seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


def storage_error(error: OSError) -> ApiError:
    """The response when a file cannot be written."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ApiError(507, "no space is left for files", code="storage_full")
    return ApiError(500, "the file cannot be written", code="storage_error")


class FileStore:
    """The files below a folder that one server uses at a time: <domain>/<id>.json describes <domain>/<id>.data.

    `most_bytes` bounds a domain. `in_use` says whether a file must stay although its time has come. Raises
    FilesDirError for a folder that cannot be used.
    """

    def __init__(self, root: Path, most_bytes: int, expiry: float) -> None:
        self.root = root
        self.in_use: Callable[[str, str], bool] = lambda _domain, _name: False
        self._most_bytes, self._expiry = most_bytes, expiry
        self._files: dict[str, dict[str, FileBody]] = {}
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock: IO[bytes] = (root / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in root.iterdir():
                if folder.is_dir():
                    self._files[folder.name] = self._load(folder)
        except BlockingIOError:
            raise FilesDirError(f"files_dir: {root}: another server uses it") from None
        except OSError as error:
            raise FilesDirError(f"files_dir: {root}: {error.strerror or error}") from None

    def close(self) -> None:
        """Leave the folder to others."""
        self._lock.close()

    @staticmethod
    def _load(folder: Path) -> dict[str, FileBody]:
        found = {}
        for path in sorted(folder.glob("file-*.json")):
            try:
                body = msgspec.json.decode(path.read_bytes(), type=FileBody)
            except msgspec.DecodeError as error:
                raise FilesDirError(f"files_dir: {path}: {error}") from None
            if path.with_suffix(".data").exists():
                found[body.id] = body
        # uploads and writes that a crash cut off
        for path in (
            *folder.glob("file-*.part"),
            *folder.glob("file-*.data"),
            *folder.glob(f".*{UNFINISHED}"),
        ):
            if path.stem not in found:
                path.unlink()
        return found

    @staticmethod
    def domain(tenant: str) -> str:
        """The domain of a tenant."""
        return tenant or _SHARED

    def folder(self, domain: str) -> Path:
        """The folder of a domain, made when it is first needed."""
        path = self.root / domain
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def domains(self) -> Iterable[str]:
        """All domains that have a folder."""
        return list(self._files)

    def path(self, domain: str, name: str) -> Path:
        """Where the bytes of a file are."""
        return self.root / domain / f"{name}.data"

    def all(self, domain: str) -> list[FileBody]:
        """The files of a domain in order of creation, without those whose time is over, which are removed."""
        files, now = self._files.setdefault(domain, {}), time.time()
        for body in list(files.values()):
            if body.expires_at is not None and body.expires_at <= now and not self.in_use(domain, body.id):
                self._remove(domain, body.id)
        return sorted(files.values(), key=lambda body: (body.created_at, body.id))

    def get(self, domain: str, name: str) -> FileBody:
        """A file. Raises ApiError 404, also for that of another domain."""
        for body in self.all(domain):
            if body.id == name:
                return body
        raise ApiError(404, f"no such file: {name[:100]!r}", code="not_found", param="id")

    def check_room(self, domain: str, size: int) -> None:
        """Raise ApiError unless the domain has room for one more file of so many bytes."""
        files = self.all(domain)
        if len(files) >= MAX_FILES:
            raise ApiError(400, f"there are {MAX_FILES} files, the limit: delete some", code="too_many_files")
        used = sum(body.bytes for body in files)
        if used + size > self._most_bytes:
            message = (
                f"file: {format_size(size)} more than the {format_size(used)} of all files exceed the limit of "
                f"{format_size(self._most_bytes)} (--files-size): delete some"
            )
            raise ApiError(400, message, code="storage_limit", param="file")

    def new_id(self) -> str:
        """The id of a new file."""
        return f"file-{uuid.uuid4().hex}"

    def add(
        self, domain: str, name: str, part: Path, filename: str, purpose: Literal["batch", "batch_output"],
        seconds: float | None = None,
    ) -> FileBody:  # fmt: skip
        """Make a file of the bytes at `part`, which becomes its own. `seconds` is how long it is kept."""
        now = int(time.time())
        body = FileBody(
            id=name, bytes=part.stat().st_size, created_at=now, filename=filename, purpose=purpose,
            expires_at=now + int(self._expiry if seconds is None else seconds),
        )  # fmt: skip
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        with written_anew(self.root / domain / f"{name}.json", durable=True) as file:
            file.write(msgspec.json.encode(body))
        part.replace(self.path(domain, name))
        self._files.setdefault(domain, {})[name] = body
        return body

    def delete(self, domain: str, name: str) -> None:
        """Remove a file. Raises ApiError 404, or 409 while a batch reads it."""
        self.get(domain, name)
        if self.in_use(domain, name):
            raise ApiError(
                409, f"{name}: a batch that has not ended reads it; cancel it first", code="file_in_use"
            )
        self._remove(domain, name)

    def _remove(self, domain: str, name: str) -> None:
        del self._files[domain][name]
        for path in (self.root / domain / f"{name}.json", self.path(domain, name)):
            path.unlink(missing_ok=True)
