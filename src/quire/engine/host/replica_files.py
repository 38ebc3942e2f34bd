"""The file in which the ranks of replicas that share experts meet, and which replica has it: see expert_replicas."""

from __future__ import annotations

import os

from quire import _native


class ReplicaFiles:
    """A replica that ends takes its experts with it: the others end, too, and all meet in another file.

    Files are in memory and have no name; they are found through this process.
    """

    def __init__(self, replicas: int) -> None:
        self._joined = [0] * replicas  # the number of the file that each has
        self._files: dict[int, int] = {}
        self._number = 0
        self.renew()

    def join(self, replica: int) -> str:
        """The path of the file for a replica that starts now."""
        self._joined[replica] = self._number
        for number in self._files.keys() - {*self._joined, self._number}:
            os.close(self._files.pop(number))
        return f"/proc/{os.getpid()}/fd/{self._files[self._number]}"

    def left(self, replica: int) -> bool:
        """A replica has ended. Returns whether that is because another one with the same file has."""
        if self._joined[replica] < self._number:
            return True
        self.renew()
        return False

    def behind(self, replica: int) -> bool:
        """Whether a replica has a file that the others have left."""
        return self._joined[replica] < self._number

    def renew(self) -> None:
        """End the steps of all that have the file, and have another one."""
        if self._files:
            self._header().leave()
        self._number += 1
        self._files[self._number] = fd = os.memfd_create("quire-experts", os.MFD_CLOEXEC)
        os.ftruncate(fd, _native.SharedRanks.HEADER_BYTES)

    def beats(self, rank: int) -> int:
        """See SharedRanks.beats."""
        return self._header().beats(rank)

    def close(self) -> None:
        """Forget all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _header(self) -> _native.SharedRanks:
        size, fd = _native.SharedRanks.HEADER_BYTES, self._files[self._number]
        return _native.SharedRanks(fd, size, 64, -1, True)
