"""How ranks of torch tell each other where they listen: a store of torch.distributed, without a port of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import BinaryIO, Protocol, cast

from torch import distributed as dist

_HEAD = struct.Struct("<HI")  # bytes of a key, and of what it has
_MOST = 2**16
_LOOK_SECONDS = 0.002


class SeenRanks(Protocol):
    """All ranks of a model, as _native.SharedRanks shows them."""

    @property
    def left(self) -> bool:
        """Whether one of them has."""

    def wait_more(self, nanoseconds: int) -> None:
        """This one has waited for others."""


class RankStore(dist.Store):  # type: ignore[misc]  # in C++
    """What ranks of a stage say, on all their hosts: a file on each, and sockets of ranks there to ranks on others.

    meeting: the file, which all ranks of this host open. `peers`: this rank's sockets to ranks on other hosts, whose
    secret was proved; nothing else travels over them. What a rank says goes to the file of its host, and over its
    sockets to those of all others. Waits end with RuntimeError when one of the `ranks` has left.
    """

    def __init__(self, meeting: str, ranks: SeenRanks, peers: Iterable[int] = ()) -> None:
        super().__init__()
        self._file, self._ranks = dist.FileStore(meeting, -1), ranks
        # Its end opens the path once more, which may be that of another file by then, and would end the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._file))
        self._peers = [socket.socket(fileno=os.dup(fd)) for fd in peers]
        for peer in self._peers:
            peer.setblocking(True)
            frames = cast("BinaryIO", peer.makefile("rb"))
            threading.Thread(target=self._take, args=(frames,), name="quire-rank-store", daemon=True).start()

    @property
    def address(self) -> str:
        """Where ranks on other hosts reach this one; the loopback if there are none."""
        return str(self._peers[0].getsockname()[0]) if self._peers else "127.0.0.1"

    def set(self, key: str, value: bytes) -> None:
        """Say it to all ranks."""
        self._file.set(key, cast("str", value))  # takes bytes, too
        name = key.encode()
        for peer in self._peers:
            with contextlib.suppress(OSError):  # whoever watches the ranks says why
                peer.sendall(_HEAD.pack(len(name), len(value)) + name + value)

    def get(self, key: str) -> bytes:
        """What was said, once it is."""
        self.wait([key])
        return bytes(self._file.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all of it is said. Raises RuntimeError when a rank has left; no wait is timed."""
        del timeout
        while not self.check(keys):
            if self._ranks.left:
                raise RuntimeError("a rank has left")
            time.sleep(_LOOK_SECONDS)

    def check(self, keys: list[str]) -> bool:
        """Whether all of it is said."""
        return bool(self._file.check(keys))

    def has_extended_api(self) -> bool:
        """Whether several keys go at once."""
        return False

    def _take(self, frames: BinaryIO) -> None:
        """Write down what a peer says, until it ends the connection or says what is not understood."""
        with contextlib.suppress(OSError):
            while len(head := frames.read(_HEAD.size)) == _HEAD.size:
                name, value = _HEAD.unpack(head)
                if value > _MOST:
                    return
                key, said = frames.read(name), frames.read(value)
                if len(said) < value:
                    return
                self._file.set(key.decode(errors="replace"), cast("str", said))
