"""A bounded folder of cached files, written under a temporary name and renamed once on disk.

Several processes may use it at once; no process sees an incomplete file. The least recently used are removed first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from quire.records import dataclass
from quire.util.files import IrregularFileError, open_regular
from quire.util.sizes import format_size

SUFFIXES = (".weights", ".tokenizer", ".costs")
_UNFINISHED = ".writing-"
_SPARE_BYTES = 2**30  # disk space that must stay free


class DamagedError(Exception):
    """A file that must not be used; the message says why."""


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """The files of a folder, at most `limit` bytes in total.

    Only files that belong to this user or root, and that others cannot write to, are read.
    """

    folder: Path
    limit: int

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[BinaryIO | None]:
        """Open a file for reading; None if it does not exist. A normal exit marks it as used.

        Raises DamagedError and removes the file if it is not a regular file of ours, or if the caller raises it.
        """
        try:
            try:
                file = open_regular(path, os.O_NOFOLLOW)
            except OSError:
                yield None
                return
            except IrregularFileError:
                raise DamagedError("it is not a regular file") from None
            with file:
                status = os.fstat(file.fileno())
                if status.st_uid not in {os.geteuid(), 0} or status.st_mode & 0o022:
                    raise DamagedError("other users can write to it")
                yield file
                with contextlib.suppress(OSError):  # a read-only folder, such as in a container image
                    os.utime(file.fileno())
        except DamagedError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def write(self, path: Path, size: int, fill: Callable[[int], None]) -> threading.Thread:
        """Make room for a file of about `size` bytes and let `fill` write it to a descriptor.

        The returned thread syncs the file to disk and renames it; the interpreter waits for it at exit. Raises OSError
        with the reason; no partial file is left.
        """
        import tempfile  # rarely needed

        self._make_room(size)
        fd, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=self.folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # shows a sweep that the writer is alive
            fill(fd)
        except BaseException:
            os.unlink(name)
            os.close(fd)
            raise
        finishing = threading.Thread(target=self._finish, args=(fd, Path(name), path), name="quire-kept-file")
        finishing.start()
        return finishing

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by name."""
        return {path.name: status.st_size for path, status in self._files()}

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """The files, least recently used first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.suffix in SUFFIXES:
                    with contextlib.suppress(OSError):
                        found.append((path, path.lstat()))
        return sorted(found, key=lambda item: item[1].st_mtime_ns)

    def _make_room(self, size: int) -> None:
        """Create the folder; remove leftovers and the least recently used files."""
        if size > self.limit:
            raise OSError(f"{format_size(size)} exceed the limit of {format_size(self.limit)}")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep()
        files = self._files()
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total + size <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= status.st_size
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if free < size + _SPARE_BYTES:
            raise OSError(f"{format_size(size)} do not fit: {self.folder} has {format_size(free)} free")

    def _sweep(self) -> None:
        """Remove unfinished files of killed writers: they are no longer locked."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(OSError, IrregularFileError):
                file = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
                with file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()

    def _finish(self, fd: int, written: Path, path: Path) -> None:
        try:
            os.fsync(fd)
            os.replace(written, path)
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:  # a disk error: the next start writes the file again, and reports a further failure
            written.unlink(missing_ok=True)
        finally:
            os.close(fd)
