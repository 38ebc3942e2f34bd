"""Where ranks meet that something else has started: torchrun, or whatever sets its variables, on one host.

The rank that leads listens at MASTER_ADDR, one port above MASTER_PORT, which torchrun uses itself. Each side proves
that it knows QUIRE_RANK_SECRET, without sending it: HMAC-SHA256 (RFC 2104) over random numbers of both and the rank.
Whoever cannot is cut off, and the others are waited for. What follows is not encrypted: use an address of this host.

    leader → rank      32 random bytes
    rank → leader      32 random bytes, the rank in 2, HMAC("rank", theirs, ours, rank)
    leader → rank      HMAC("lead", …)
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Iterator, Mapping

from quire.records import dataclass
from quire.types import QuireError

JOIN_SECONDS = 60.0
_HANDSHAKE_SECONDS = 5.0
_NONCE, _RANK, _PROOF = 32, 2, 32
_LEAST_SECRET = 16


class RendezvousError(QuireError):
    """Ranks did not meet, or have other settings."""


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher says of this process: its number, and where the ranks meet. Number 0 leads."""

    number: int
    world: int
    address: str
    port: int
    secret: bytes

    @property
    def leads(self) -> bool:
        return self.number == 0


def launched(environ: Mapping[str, str], ranks: int) -> Launched | None:
    """Read a launcher's variables for a model of so many ranks; None where there are none, or one rank.

    Raises RendezvousError for variables that do not fit.
    """
    if ranks == 1 or "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    try:
        number, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local = int(environ.get("LOCAL_WORLD_SIZE", world))
        port = int(environ.get("MASTER_PORT", "29500")) + 1
    except ValueError as error:
        raise RendezvousError(f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_PORT: {error}") from None
    if world != ranks or not 0 <= number < world:
        raise RendezvousError(f"RANK {number} of WORLD_SIZE {world}: the model has {ranks} ranks")
    if local != world:
        raise RendezvousError(
            f"LOCAL_WORLD_SIZE {local} of WORLD_SIZE {world}: ranks on several hosts are not there"
        )
    secret = environ.get("QUIRE_RANK_SECRET", "").encode()
    if len(secret) < _LEAST_SECRET:
        raise RendezvousError(
            f"QUIRE_RANK_SECRET: all ranks need the same secret of {_LEAST_SECRET} bytes or more"
        )
    return Launched(number, world, environ.get("MASTER_ADDR", "127.0.0.1"), port, secret)


def gather(at: Launched) -> Iterator[tuple[int, socket.socket]]:
    """All other ranks by their numbers, as they come. Raises RendezvousError if one does not within a minute."""
    until, missing = time.monotonic() + JOIN_SECONDS, set(range(1, at.world))
    try:
        listener = socket.create_server((at.address, at.port), backlog=at.world)
    except OSError as error:
        raise RendezvousError(
            f"MASTER_ADDR {at.address}, port {at.port}: {error.strerror or error}"
        ) from None
    with listener:
        while missing:
            listener.settimeout(max(0.0, until - time.monotonic()))
            try:
                sock, _ = listener.accept()
            except (TimeoutError, BlockingIOError):
                numbers = ", ".join(map(str, sorted(missing)))
                raise RendezvousError(
                    f"RANK {numbers} of {at.world} did not join within {JOIN_SECONDS:.0f} s"
                ) from None
            number = _admit(sock, at)
            if number not in missing:
                sock.close()
                continue
            missing.remove(number)
            yield number, sock


def _admit(sock: socket.socket, at: Launched) -> int:
    """The number of a rank that knows the secret; -1 for anybody else."""
    until, ours = time.monotonic() + _HANDSHAKE_SECONDS, secrets.token_bytes(_NONCE)
    try:
        sock.sendall(ours)
        theirs, number, proof = (_receive(sock, size, until) for size in (_NONCE, _RANK, _PROOF))
        if not hmac.compare_digest(proof, _proof(at, b"rank", ours + theirs + number)):
            return -1
        sock.sendall(_proof(at, b"lead", ours + theirs + number))
    except OSError:
        return -1
    sock.settimeout(None)
    return int.from_bytes(number, "little")


def join(at: Launched) -> socket.socket:
    """The connection to the rank that leads, which knows the secret. Raises RendezvousError after a minute."""
    until, problem = time.monotonic() + JOIN_SECONDS, ""
    while time.monotonic() < until:
        try:
            sock = socket.create_connection((at.address, at.port), timeout=_HANDSHAKE_SECONDS)
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(0.1)
            continue
        end = time.monotonic() + _HANDSHAKE_SECONDS
        try:
            theirs, ours = _receive(sock, _NONCE, end), secrets.token_bytes(_NONCE)
            said = theirs + ours + at.number.to_bytes(_RANK, "little")
            sock.sendall(said[_NONCE:] + _proof(at, b"rank", said))
            if not hmac.compare_digest(_receive(sock, _PROOF, end), _proof(at, b"lead", said)):
                sock.close()
                raise RendezvousError(
                    f"the leading rank at {at.address}, port {at.port}: it has another secret"
                )
            sock.settimeout(None)
            return sock
        except OSError:
            problem = "it closed the connection: QUIRE_RANK_SECRET is another, or this rank is there already"
        sock.close()
        time.sleep(0.5)
    raise RendezvousError(f"the leading rank at {at.address}, port {at.port}: {problem}")


def _proof(at: Launched, role: bytes, said: bytes) -> bytes:
    return hmac.digest(at.secret, role + said, "sha256")


def _receive(sock: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, until - time.monotonic()))
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data
