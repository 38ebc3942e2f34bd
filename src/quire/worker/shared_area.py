"""Contents of blocks in memory that two processes of a host share, in place of a stream: one copy less on each side,
and none in the kernel.

Each side of a Unix socket makes an anonymous file in memory for what it sends, and passes it to the other, for
reading. Nothing has a name, so nothing is left when a side dies. A content is copied out before its sum is
checked: whoever changes an area later changes nothing that was taken.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

import numpy as np

from quire.worker.kv_wire import WireError

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL  # reading behind its end would be deadly
_PASSED = b"area"


class SharedArea:
    """Room for `slots` contents of `size` bytes, used in turn: by then the other side must have taken the one before.

    The maker `put`s, the other side `take`s; each counts for itself.
    """

    def __init__(self, file: int, size: int, slots: int, *, ours: bool) -> None:
        """Map a file, which is closed by that. Raises OSError."""
        try:
            access = mmap.PROT_READ | mmap.PROT_WRITE if ours else mmap.PROT_READ
            self._map = mmap.mmap(file, size * slots, mmap.MAP_SHARED, access)
        finally:
            os.close(file)
        self.size, self._slots, self._next = size, slots, 0

    def _slot(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        at = self._next % self._slots * self.size
        self._next += 1
        return np.frombuffer(self._map, np.uint8, self.size, at)

    def put(self, content: bytes | bytearray | memoryview) -> None:
        """Copy a content of `size` bytes in."""
        np.copyto(self._slot(), np.frombuffer(content, np.uint8))

    def take(self, room: memoryview) -> None:
        """Copy the next content out."""
        np.copyto(np.frombuffer(room, np.uint8), self._slot())

    def close(self) -> None:
        """Unmap it. Nobody may use it meanwhile."""
        self._map.close()


def pass_area(sock: socket.socket, size: int, slots: int, seconds: float) -> SharedArea:
    """Make an area and pass it to the other side. Raises OSError."""
    file = os.memfd_create("quire kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size * slots)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        reader = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            sock.settimeout(seconds)
            socket.send_fds(sock, [_PASSED], [reader])
        finally:
            os.close(reader)
    except BaseException:
        os.close(file)
        raise
    return SharedArea(file, size, slots, ours=True)


def passed_area(sock: socket.socket, size: int, slots: int, seconds: float) -> SharedArea:
    """The area that the other side passes. Raises OSError, and WireError for anything else than such an area."""
    sock.settimeout(seconds)
    said, files, _, _ = socket.recv_fds(sock, len(_PASSED), 1)
    try:
        if not said:
            raise ConnectionError("the connection has ended")
        if said != _PASSED or len(files) != 1:
            raise WireError("no area was passed")
        seals = fcntl.fcntl(files[0], fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS or os.fstat(files[0]).st_size != size * slots:
            raise WireError("an area that is no sealed file in memory of the right size")
    except BaseException as error:
        for file in files:
            os.close(file)
        if isinstance(error, OSError) and not isinstance(error, WireError | ConnectionError):
            raise WireError("an area that is no file in memory") from None
        raise
    return SharedArea(files[0], size, slots, ours=False)
