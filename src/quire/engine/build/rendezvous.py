"""Where ranks, or nodes with ranks, meet that something else has started; see config/launched.

The one that leads listens at MASTER_ADDR, one port above MASTER_PORT, which torchrun uses itself. Each side proves
that it knows QUIRE_RANK_SECRET, without sending it: HMAC-SHA256 (RFC 2104) over random numbers of both and the number
of the one that joins. Whoever cannot is cut off, and the others are waited for. What follows is not encrypted: use an
address of this host, or of a network that nobody else is on.

    leader → rank      32 random bytes
    rank → leader      32 random bytes, the rank in 2, HMAC("rank", theirs, ours, rank)
    leader → rank      HMAC("lead", …)
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import cast

from quire.config.launched import Launched, RendezvousError
from quire.util.keepalive import end_when_gone

JOIN_SECONDS = 60.0
SAY_SECONDS = 30.0  # between two lines that say who is waited for
_HANDSHAKE_SECONDS, _ADMIT_SECONDS = 5.0, 2.0
_REFUSED_SECONDS = 10.0  # of refusals in a row, after which one that waits for ever gives up
_NONCE, _RANK, _PROOF = 32, 2, 32
_MOST_CALLERS = 256  # that prove themselves at once; the oldest gives way


def listen(address: str, port: int, count: int = 64) -> socket.socket:
    """A socket that listens at this address only. Raises RendezvousError if it is not one of this host."""
    try:
        return socket.create_server((address, port), backlog=count)
    except OSError as error:
        raise RendezvousError(f"MASTER_ADDR {address}, port {port}: {error.strerror or error}") from None


def gather(at: Launched) -> Iterator[tuple[int, socket.socket]]:
    """All other ranks by their numbers, as they come. Raises RendezvousError if one does not within a minute."""
    with listen(at.address, at.port) as listener:
        yield from admit(listener, at.secret, range(1, at.world), f"RANK {{}} of {at.world}", JOIN_SECONDS)


def admit(
    listener: socket.socket, secret: bytes, numbers: Collection[int], named: str, seconds: float | None
) -> Iterator[tuple[int, socket.socket]]:
    """Connections of those that know the secret, by their numbers, until all are there; `named` is what {} numbers are
    called; one may come again until then. Raises RendezvousError after `seconds`; with None it says on stderr now and
    then who is missing. Several may prove themselves at once, so a connection that says nothing delays nobody."""
    missing, wait = set(numbers), SAY_SECONDS if seconds is None else seconds
    until = time.monotonic() + wait
    with _Callers(listener, secret) as callers:
        while missing:
            for number, sock in callers.proved(until):
                if number not in missing and (seconds is not None or number not in numbers):
                    sock.close()
                    continue
                missing.discard(number)
                yield number, sock
            if not missing or time.monotonic() < until:
                continue
            who = named.format(", ".join(map(str, sorted(missing))))
            if seconds is not None:
                raise RendezvousError(f"{who} did not join within {seconds:.0f} s")
            print(f"quire: waiting for {who}", file=sys.stderr, flush=True)
            until = time.monotonic() + wait


@dataclass(frozen=True, slots=True)
class _Caller:
    """A connection that has yet to prove that it knows the secret: what it was sent, what it said, its time."""

    nonce: bytes
    said: bytearray
    until: float


class _Callers:
    """Connections to a listener that prove, each in its own time, that they know the secret."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, _Caller] = {}  # the oldest first

    def __enter__(self) -> _Callers:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in list(self._waiting):
            self._drop(sock)
        self._selector.close()

    def proved(self, until: float) -> Iterator[tuple[int, socket.socket]]:
        """Those that prove themselves in what happens next, which may be nothing before `until`."""
        now = time.monotonic()
        for sock in [s for s, caller in self._waiting.items() if caller.until <= now]:
            self._drop(sock)
        first = min((caller.until for caller in self._waiting.values()), default=until)
        for key, _ in self._selector.select(max(0.0, min(first, until) - now)):
            if key.fileobj is self._listener:
                self._accept()
                continue
            sock = cast(socket.socket, key.fileobj)
            try:
                number = self._hear(sock) if sock in self._waiting else None
            except OSError:
                self._drop(sock)
                continue
            if number is not None:
                yield number, sock

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if len(self._waiting) == _MOST_CALLERS:
            self._drop(next(iter(self._waiting)))
        nonce = secrets.token_bytes(_NONCE)
        self._waiting[sock] = _Caller(nonce, bytearray(), time.monotonic() + _ADMIT_SECONDS)
        self._selector.register(sock, selectors.EVENT_READ)
        try:
            _tune(sock)
            sock.setblocking(False)
            sock.sendall(nonce)
        except OSError:
            self._drop(sock)

    def _hear(self, sock: socket.socket) -> int | None:
        """The number of one whose proof is whole and right. Raises OSError for a wrong one and a closed connection."""
        caller = self._waiting[sock]
        piece = sock.recv(_NONCE + _RANK + _PROOF - len(caller.said))
        if not piece:
            raise ConnectionResetError
        caller.said.extend(piece)
        if len(caller.said) < _NONCE + _RANK + _PROOF:
            return None
        number, proof = bytes(caller.said[_NONCE:-_PROOF]), bytes(caller.said[-_PROOF:])
        said = caller.nonce + bytes(caller.said[:-_PROOF])
        if not hmac.compare_digest(proof, _proof(self._secret, b"rank", said)):
            raise ConnectionRefusedError
        sock.sendall(_proof(self._secret, b"lead", said))
        sock.settimeout(None)
        self._selector.unregister(sock)
        del self._waiting[sock]
        return int.from_bytes(number, "little")

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._waiting[sock]
        sock.close()


def join(at: Launched, *, patient: bool = False, own: str = "") -> socket.socket:
    """The connection to the one that leads, which knows the secret; from the address `own`, if it is given. Raises
    RendezvousError for another secret, and after a minute unless `patient`."""
    until, problem = time.monotonic() + JOIN_SECONDS, ""
    said: float | None = None
    refused: float | None = None
    while patient or time.monotonic() < until:
        try:
            sock = socket.create_connection(
                (at.address, at.port), _HANDSHAKE_SECONDS, (own, 0) if own else None
            )
        except OSError as error:
            why = error.strerror or str(error)
            problem = problem or why
            if patient and (said is None or time.monotonic() > said + SAY_SECONDS):
                print(f"quire: waiting for {_leader(at)}: {why}", file=sys.stderr, flush=True)
                said = time.monotonic()
            refused = None
            time.sleep(0.1)
            continue
        try:
            _prove(sock, at)
            return sock
        except TimeoutError:  # it is busy with others
            problem = problem or "it does not answer"
            sock.close()
            continue
        except OSError:
            problem = "it closed the connection: QUIRE_RANK_SECRET is another, or this rank is there already"
        sock.close()
        refused = refused or time.monotonic()
        if patient and time.monotonic() > refused + _REFUSED_SECONDS:
            break
        time.sleep(0.5)
    raise RendezvousError(f"{_leader(at)}: {problem}")


def _leader(at: Launched) -> str:
    return f"the leading {'node' if at.nodes else 'rank'} at {at.address}, port {at.port}"


def _prove(sock: socket.socket, at: Launched) -> None:
    """Raises RendezvousError for a leader with another secret, OSError if it ends the connection."""
    end = time.monotonic() + _HANDSHAKE_SECONDS
    _tune(sock)
    theirs, ours = _receive(sock, _NONCE, end), secrets.token_bytes(_NONCE)
    said = theirs + ours + at.number.to_bytes(_RANK, "little")
    sock.sendall(said[_NONCE:] + _proof(at.secret, b"rank", said))
    if not hmac.compare_digest(_receive(sock, _PROOF, end), _proof(at.secret, b"lead", said)):
        sock.close()
        raise RendezvousError(f"{_leader(at)}: it has another secret")
    sock.settimeout(None)


def _tune(sock: socket.socket) -> None:
    """Send small messages at once, and end within seconds when the other host is gone while nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_when_gone(sock, 5, 2, 3)


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + said, "sha256")


def _receive(sock: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, until - time.monotonic()))
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data
