"""The engine's end of the socket: blocks when idle, polls between steps while there is work."""

from __future__ import annotations

import select
import socket

from quire.engine.host.messages import Command, FrameReader, Report, command_decoder, frame

_READ_BYTES = 2**18


class ChannelClosedError(Exception):
    """The other end is gone: there is no one left to compute for."""


class Channel:
    """Commands in, reports out, over a connected stream socket in blocking mode."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._decode = command_decoder().decode
        self._returned: list[Command] = []

    def put_back(self, commands: list[Command]) -> None:
        """Let the next `receive` return these, after others that were put back."""
        self._returned += commands

    def receive(self, *, wait: bool, seconds: float | None = None) -> list[Command]:
        """The commands that have arrived; with `wait`, at least one, or none after `seconds` if given.

        Raises ChannelClosedError at the end.
        """
        if self._returned:
            commands, self._returned = self._returned, []
            return commands
        commands = []
        if wait and seconds is not None:
            wait = bool(select.select([self._sock], [], [], seconds)[0])
        while True:
            try:
                data = self._sock.recv(_READ_BYTES, 0 if wait and not commands else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return commands
            except OSError as error:
                raise ChannelClosedError from error
            if not data:
                raise ChannelClosedError
            commands.extend([self._decode(body) for body in self._reader.feed(data)])
            if commands and len(data) < _READ_BYTES:
                return commands

    def send(self, report: Report) -> None:
        """Send a report; waits while the other end does not read. Raises ChannelClosedError when it is gone."""
        try:
            self._sock.sendall(frame(report))
        except OSError as error:
            raise ChannelClosedError from error

    def close(self) -> None:
        self._sock.close()
