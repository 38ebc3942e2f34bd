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
import socket
import sys
import time
from collections.abc import Collection, Iterator

from quire.config.launched import Launched, RendezvousError

JOIN_SECONDS = 60.0
SAY_SECONDS = 30.0  # between two lines that say who is waited for
_HANDSHAKE_SECONDS, _ADMIT_SECONDS = 5.0, 2.0
_REFUSED_SECONDS = 10.0  # of refusals in a row, after which one that waits for ever gives up
_NONCE, _RANK, _PROOF = 32, 2, 32


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
    then who is missing."""
    missing, wait = set(numbers), SAY_SECONDS if seconds is None else seconds
    until = time.monotonic() + wait
    while missing:
        listener.settimeout(max(0.0, until - time.monotonic()))
        try:
            sock, _ = listener.accept()
        except (TimeoutError, BlockingIOError):
            who = named.format(", ".join(map(str, sorted(missing))))
            if seconds is not None:
                raise RendezvousError(f"{who} did not join within {seconds:.0f} s") from None
            print(f"quire: waiting for {who}", file=sys.stderr, flush=True)
            until = time.monotonic() + wait
            continue
        number = _admit(sock, secret)
        if number not in missing and (seconds is not None or number not in numbers):
            sock.close()
            continue
        missing.discard(number)
        yield number, sock


def _admit(sock: socket.socket, secret: bytes) -> int:
    """The number of one that knows the secret; -1 for anybody else."""
    until, ours = time.monotonic() + _ADMIT_SECONDS, secrets.token_bytes(_NONCE)
    try:
        _tune(sock)
        sock.sendall(ours)
        theirs, number, proof = (_receive(sock, size, until) for size in (_NONCE, _RANK, _PROOF))
        if not hmac.compare_digest(proof, _proof(secret, b"rank", ours + theirs + number)):
            return -1
        sock.sendall(_proof(secret, b"lead", ours + theirs + number))
    except OSError:
        return -1
    sock.settimeout(None)
    return int.from_bytes(number, "little")


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
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


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
