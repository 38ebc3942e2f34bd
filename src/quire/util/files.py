"""Open untrusted files: regular files only; write files that others may have mapped."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from quire.types import CheckpointError

UNFINISHED = ".unfinished"  # the suffix of what `written_anew` writes to; a writer that was killed leaves it


class IrregularFileError(CheckpointError):
    """A FIFO, a device, a socket or a directory in place of a file."""


def open_regular(path: Path, flags: int = 0) -> BinaryIO:
    """Open a regular file for reading. `flags` are additional flags of os.open.

    Opening a FIFO would wait forever for a writer, and a device may have no end. O_NONBLOCK opens them at once, and the
    check is on the open file, not on its name. Raises OSError if it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise IrregularFileError(f"{path.name}: not a regular file")
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


class Identity(NamedTuple):
    """Which content a file has: another one, or another length or time of writing, is another identity."""

    device: int
    inode: int
    size: int
    written_ns: int


def identity_of(file: BinaryIO) -> Identity:
    """The identity of an open file."""
    found = os.fstat(file.fileno())
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@contextlib.contextmanager
def open_to_map(path: Path) -> Iterator[BinaryIO]:
    """A regular file that the block reads and maps. Raises CheckpointError if it cannot be opened, read or mapped."""
    try:
        with open_regular(path) as file:
            yield file
    except ValueError:  # mmap beyond the end of the file
        raise CheckpointError(f"{path.name}: the file shrank while it was read") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from None


@contextlib.contextmanager
def written_anew(path: Path, *, durable: bool = False, private: bool = False) -> Iterator[BinaryIO]:
    """A file for the block to write, which then takes the place of `path`; after an error `path` is as it was. With
    `durable` that also holds for a crash of the machine: `path` has all of the new content, or the old. With `private`
    its owner alone can read it.

    A file that is written over in place is cut to nothing first: whoever has it mapped is killed by the next page that
    it touches (SIGBUS). Here readers keep the old file until they close it.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with _own_file(unfinished) if private else unfinished.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def _own_file(path: Path) -> BinaryIO:
    """A new file that its owner alone can read, in place of one that a writer who was killed has left."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "wb")
