"""Starts the engine process before anything else that is slow, so that two interpreters start side by side."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

_SOCKET_BYTES = 2**20  # room for the reports of steps while the API process is busy


class Spawned:
    """An engine process waiting for its first command, and our end of the socket to it.

    The caller of `take` owns both; `close` ends a process that was not taken. `cores`: see engine/host/process.
    """

    def __init__(self, module: str = "quire.engine.host.process", cores: str = "") -> None:
        ours, theirs = socket_pair()
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", module]
        shared = [cores] if cores else []
        try:
            # The kernel ends the process together with the thread that started it (engine/host/process).
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), *shared],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,  # an interrupt typed at the terminal is for the parent only
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.socket = ours
        self._taken = False

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Process and socket; can be called once."""
        self._taken = True
        return self.process, self.socket

    def close(self) -> None:
        """End the process unless it was taken."""
        if self._taken:
            return
        self._taken = True
        self.socket.close()
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a stream socket with room for the report of a step."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return ours, theirs
