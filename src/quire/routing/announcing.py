"""What a server says to its routers of itself, and how they know that it is one of theirs.

    server ── POST /router/announce: name, url, role, weight ──▶ router
       ◀── 401 with a nonce of the router ──┘
       └── the same with that nonce, and a code over all of it ──▶    every five seconds, each with the last nonce
       └── the same, leaving ──▶                                      when it shuts down

A nonce is of the router that made it, and holds for half a minute: what was heard on the way cannot be said again
later, when another machine may have the address. Clocks of servers do not matter.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

import msgspec

from quire.records import dataclass
from quire.routing.addresses import is_server_url
from quire.routing.tickets import is_code

PATH = "/router/announce"
CODE = "x-quire-announce"  # header with the code over the body
EVERY = 5.0  # seconds between two announcements
EXPIRES = 16.0  # seconds after the last one
MOST_BODY = 4096  # bytes
MOST_SERVERS = 1000
MOST_WEIGHT = 1000
_HOLDS = 30.0  # seconds
_ROLES = ("", "prefill", "decode", "both")


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server as it describes itself. `leaving`: it takes no more requests."""

    name: str
    url: str
    nonce: str = ""
    role: str = ""
    weight: float = 1.0
    leaving: bool = False


class Noted(msgspec.Struct, frozen=True):
    """What a router answers: the nonce of the next announcement."""

    nonce: str


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server that was not configured."""

    url: str
    role: str = ""
    weight: float = 1.0


def announcement_code(key: bytes, body: bytes) -> str:
    """The code over an announcement."""
    return hmac.digest(key, b"announce\0" + body, "sha256").hex()


class AnnouncedServers:
    """The servers that have announced themselves to a router. Times are of one clock, in seconds."""

    def __init__(self, key: bytes) -> None:
        self._key, self._secret = key, secrets.token_bytes(32)
        self._known: dict[str, tuple[FoundServer, float]] = {}  # and until when

    @property
    def servers(self) -> Mapping[str, FoundServer]:
        """Those that are there, by name."""
        return {name: server for name, (server, _) in self._known.items()}

    def nonce(self, now: float) -> str:
        """One that holds for a while from now on."""
        text = f"{now:.3f}"
        return f"{text}-{hmac.digest(self._secret, text.encode(), 'sha256').hex()[:32]}"

    def _holds(self, nonce: str, now: float) -> bool:
        text, _, _ = nonce.partition("-")
        try:
            made = float(text)
        except ValueError:
            return False
        return is_code(self.nonce(made), nonce) and -1.0 <= now - made <= _HOLDS

    def take(self, body: bytes, code: str, now: float) -> bool | None:
        """Take an announcement: whether the servers are others now; None if its nonce does not hold. Raises
        PermissionError for one of somebody without the key, ValueError for one that is wrong, and LookupError for the
        name of another server."""
        if not is_code(announcement_code(self._key, body), code):
            raise PermissionError("its code is not that of who has the key")
        try:
            said = msgspec.json.decode(body, type=Announcement)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None
        if not self._holds(said.nonce, now):
            return None
        if not (said.name.isascii() and said.name.isprintable() and 0 < len(said.name) <= 128):
            raise ValueError("name: must be 1 to 128 printable ASCII characters")
        if not 0 < said.weight <= MOST_WEIGHT:
            raise ValueError(f"weight: {said.weight} is not above 0 and up to {MOST_WEIGHT}")
        if not is_server_url(said.url):
            raise ValueError(f"url: {said.url[:200]!r} is not an address such as http://host:8000")
        if said.role not in _ROLES:
            raise ValueError(f"role: {said.role!r} is not one of {', '.join(_ROLES[1:])}")
        server, before = FoundServer(said.url, said.role, said.weight), self._known.get(said.name)
        if before is not None and before[0].url != said.url and now < before[1]:
            raise LookupError(f"another server is named {said.name!r}")
        if said.leaving:
            return self._known.pop(said.name, None) is not None
        if before is None and len(self._known) >= MOST_SERVERS:
            raise LookupError("there are too many servers")
        self._known[said.name] = server, now + EXPIRES
        return before is None or before[0] != server

    def expire(self, now: float) -> bool:
        """Forget those that have said nothing for long; whether there were any."""
        gone = [name for name, (_, until) in self._known.items() if now >= until]
        for name in gone:
            del self._known[name]
        return bool(gone)
